"""The owner's side of the keeper: its process, its pipe, and the containerd it started, held by a pidfd."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.config import Layout
from tests.support.errors import HarnessError

PROJECT: Final = Path(__file__).resolve().parents[2]
TEAR_DOWN_TIMEOUT_S: Final = 60.0


class Daemon:
    """A process that is not our child: signalled and awaited by pidfd, so its number cannot be mistaken."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            signal.pidfd_send_signal(self._fd, number)

    def alive(self) -> bool:
        return not self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def close(self) -> None:
        os.close(self._fd)


class Keeper:
    """A running keeper for one layout. Closing it, or our death, takes everything of that layout away."""

    def __init__(self, layout: Layout, cgroup: str) -> None:
        self._layout = layout
        with layout.keeper_log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation", "slave", "--"),
                    *(sys.executable, "-m", "tests.support.keeper", str(layout.base), cgroup),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(PROJECT)},
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal is for the owner alone
            )
        self._expect("ready")

    @property
    def pid(self) -> int:
        # unshare(1) replaces itself by the program, so its pid is the keeper's
        return self._process.pid

    def start(self, program: Path, search_path: str) -> Daemon:
        """Start containerd with the layout's configuration. Raises: HarnessError with the keeper's sentence."""
        answer = self._ask(f"start {program} {search_path}\n")
        if not answer.isdecimal():
            raise HarnessError(answer or f"the keeper of {self._layout.base} is gone: {self._log()}")
        return Daemon(int(answer))

    def close(self) -> None:
        """Tear everything down. Raises: HarnessError with what stayed."""
        try:
            self._process.communicate(timeout=TEAR_DOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        if self._process.returncode:
            raise HarnessError(f"the keeper of {self._layout.base} could not clean up: {self._log()}")

    def _ask(self, line: str) -> str:
        assert self._process.stdin  # both ends were asked for
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._read()

    def _expect(self, word: str) -> None:
        if (said := self._read()) != word:
            self._process.communicate(timeout=TEAR_DOWN_TIMEOUT_S)
            raise HarnessError(f"the keeper did not start ({said!r}): {self._log()}")

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def _log(self) -> str:
        log = self._layout.keeper_log
        return log.read_text()[-2000:] if log.exists() else ""
