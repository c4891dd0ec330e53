"""`nri-gpu run` as a process of its own, on private paths, ready when it says so to its service manager.

with NriGpu(Launch(base, socket=node.nri_socket, topology=FOUR_GPUS)) as daemon:
    daemon.wait_ready()
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct, field
from msgspec.structs import replace

from tests.support.schemas import conforming
from tests.support.waiting import wait_for

TOPOLOGIES: Final = Path(__file__).parents[2] / "config" / "topologies"
FOUR_GPUS: Final = TOPOLOGIES / "four-gpus.toml"
UUIDS: Final = [f"GPU-{n}a100004-0000-4000-8000-00000000000{n}" for n in range(4)]  # of its GPUs
READY_S: Final = 20.0
# The package beside these tests, whatever else is installed.
ENVIRONMENT: Final = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TOPOLOGIES.parents[1]), "PYTHONFAULTHANDLER": "1"}
# What is read without --policy is not to be the file of the machine that tests run on.
DEFAULT_POLICY: Final = """
import sys
from pathlib import Path
try:
    from nri_gpu.daemon import policy_file  # of the version before this one
except ImportError:
    from nri_gpu.records import policy_file
policy_file.DEFAULT_PATH = Path(sys.argv.pop(1))
from nri_gpu.cli.main import main
sys.exit(main())
"""


def options(given: Mapping[str, object]) -> list[str]:
    """Flags with their values, but for those that are None."""
    return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


class Launch(Struct, frozen=True):
    """How a daemon is started. base: folder for state, log and notify socket, made when missing.

    stage_dir: where drivers are staged, `drivers` in the base by default. default_policy: in place of the file that is
    read where no policy is named.
    """

    base: Path
    socket: Path
    topology: Path | None = FOUR_GPUS
    driver_root: Path | None = None
    policy: Path | None = None
    default_policy: Path | None = None
    stage_dir: Path | None = None
    run_dir: Path | None = None
    index: str | None = None
    metrics: str | None = None
    log_level: str = "DEBUG"
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.base / "state"

    @property
    def log(self) -> Path:
        return self.base / "nri-gpu.log"

    def arguments(self) -> Sequence[str]:
        given = {
            "--socket": self.socket,
            "--gpus": self.topology,
            "--driver-root": self.driver_root,
            "--policy": self.policy,
            "--index": self.index,
            "--metrics": self.metrics,
            "--state-dir": self.state,
            "--stage-dir": self.stage_dir or self.base / "drivers",
            "--run-dir": self.run_dir,
            "--log-level": self.log_level,
        }
        return options(given)

    def with_policy(self, text: str) -> Launch:
        """The same with a policy file of that text, beside its base."""
        policy = self.base.with_name("policy.toml")
        policy.write_text(text)
        return replace(self, policy=policy)


class NriGpu:
    """A running daemon. Started by `start` (or `with`), as often as one likes on the same state folder."""

    def __init__(self, launch: Launch) -> None:
        launch.base.mkdir(parents=True, exist_ok=True)
        self.launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._notify: socket.socket | None = None
        self._log_begins = 0  # bytes of the log that are of earlier starts
        self.notified: list[str] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process and self._process.poll() is None:
            self.terminate()
        self._close()

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Its state folder, as seen from here."""
        return self.launch.state

    def start(self) -> None:
        """Start it; `wait_ready` tells when it serves."""
        self._close()
        address = self.launch.base / "notify"
        address.unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(address))
        self._notify.setblocking(False)
        self.notified.clear()
        self._log_begins = self.launch.log.stat().st_size if self.launch.log.exists() else 0
        environment = ENVIRONMENT | {"NOTIFY_SOCKET": str(address), **self._kept()} | dict(self.launch.environment)
        with self.launch.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), env=environment, cwd="/", stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _kept(self) -> dict[str, str]:
        """What names its own folder to a daemon that keeps a record: none is to use the one of this machine."""
        if self.launch.topology:
            return {}
        folder = self.launch.base / "kept"
        folder.mkdir(mode=0o700, exist_ok=True)
        return {"STATE_DIRECTORY": str(folder)}

    def command(self) -> list[str]:
        """What is started, and ends with whoever started it, however that ends."""
        return ["setpriv", "--pdeathsig", "KILL", *self.program()]

    def program(self) -> list[str]:
        """The daemon and its arguments."""
        return [*self.words(), "run", *self.launch.arguments()]

    def words(self) -> list[str]:
        """What is run, up to its verb."""
        if self.launch.default_policy:
            return [sys.executable, "-c", DEFAULT_POLICY, str(self.launch.default_policy)]
        return [sys.executable, "-m", "nri_gpu"]

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until it told its service manager READY=1."""
        wait_for("nri-gpu to be ready", lambda: self.has_notified("READY=1"), timeout_s, self._explain)

    def wait_session(self, number: int) -> None:
        """Until a runtime has synchronized it so often."""
        wait_for(f"session {number}", lambda: self.log().count("ledger rebuilt") == number, READY_S, self._explain)

    def wait_staged(self) -> None:
        """Until it serves, with the driver's files staged."""
        self.wait_ready()
        self.wait_logged("driver files staged")

    def has_notified(self, line: str) -> bool:
        """Whether it sent that line of sd_notify(3)."""
        assert self._notify
        while True:
            try:
                self.notified += self._notify.recv(4096).decode().splitlines()
            except BlockingIOError:
                return any(line in each for each in self.notified)

    def wait_logged(self, text: str, timeout_s: float = READY_S) -> str:
        """The first log line since the last start that holds a text: one of before proves nothing."""
        wait_for(f"the log to say {text!r}", lambda: bool(self.logged(text)), timeout_s, self._explain)
        return self.logged(text)

    def logged(self, text: str) -> str:
        """That line, or empty where there is none yet."""
        said = self.launch.log.read_bytes()[self._log_begins :].decode(errors="replace")
        return next((each for each in said.splitlines() if text in each), "")

    def log(self) -> str:
        return self.launch.log.read_text() if self.launch.log.exists() else ""

    def ledger(self) -> Mapping[str, Any]:
        """What `ledger.json` says; it is written a moment after each change."""
        file = self.folder / "ledger.json"
        parsed: Mapping[str, Any] = json.loads(file.read_text()) if file.exists() else {"grants": [], "foreign": []}
        return parsed

    def held(self) -> dict[str, list[str]]:
        """`pod/container` -> GPU UUIDs, of what holds GPUs now."""
        grants = [grant for grant in self.ledger()["grants"] if grant["phase"] != "lapsed"]
        return {f"{grant['pod']}/{grant['container']}": grant["gpu_uuids"] for grant in grants}

    def wait_held(self, expected: Mapping[str, Sequence[str]]) -> None:
        """Until exactly these containers hold exactly these GPUs."""
        wait_for("the ledger", lambda: self.held() == expected, READY_S, lambda: f"it is {self.held()}")

    def gpus(self) -> Any:  # noqa: ANN401 - parsed JSON
        """What `nri-gpu gpus -o json` says of the same node."""
        given = {"--gpus": self.launch.topology, "--driver-root": self.launch.driver_root}
        command = [sys.executable, "-m", "nri_gpu", "gpus", "-o", "json", *options(given)]
        return conforming(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))

    def verb(self, *words: str, capture: bool = True) -> subprocess.CompletedProcess[str]:
        """A verb that asks this daemon, or reads its state folder. capture: else it prints where this process does."""
        command = [sys.executable, "-m", "nri_gpu", *words, "--state-dir", str(self.launch.state)]
        environment = ENVIRONMENT if capture else {**os.environ, **ENVIRONMENT}  # a terminal's kind is in it
        return subprocess.run(command, env=environment, capture_output=capture, text=True, check=False, cwd="/")

    def status(self) -> Any:  # noqa: ANN401 - parsed JSON
        """What `nri-gpu status -o json` says."""
        return conforming(json.loads(self.verb("status", "-o", "json").stdout))

    def wait_grants(self, count: int) -> None:
        """Until so many containers hold something."""
        wait_for(f"{count} grants", lambda: len(self.held()) == count, READY_S, lambda: f"it is {self.held()}")

    def hang_up(self) -> None:
        """SIGHUP: reload."""
        self._send(signal.SIGHUP)

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._send(signal.SIGKILL)
        self._reap()

    def terminate(self) -> int:
        """SIGTERM, and wait. Returns the exit code."""
        self._send(signal.SIGTERM)
        return self._reap()

    def wait(self) -> int:
        """Until it ends by itself. Returns the exit code."""
        return self._reap()

    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        assert self._process
        return self._process.poll()

    def restart(self, *, kill: bool = False) -> None:
        """End it, by SIGKILL if asked, start it on the same folders, and wait until it serves."""
        if kill:
            self.kill()
        else:
            assert self.terminate() == 0
        self.start()
        self.wait_ready()

    def reload(self, said: str = "policy reloaded") -> None:
        """Have it read its policy again, until the log has said that once more."""
        before = self.log().count(said)
        self.hang_up()
        wait_for(said, lambda: self.log().count(said) > before, READY_S, self._explain)

    def next(self) -> NriGpu:
        """The daemon after this one, not started: it stands by, and takes over when this one is told to stop."""
        return _Next(self)

    def _send(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)

    def _reap(self) -> int:
        assert self._process
        try:
            return self._process.wait(READY_S)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGABRT)  # Python then writes what each thread does
            self._process.wait()
            raise AssertionError(f"it did not end within {READY_S:.0f} s; {self._explain()}") from None

    def _close(self) -> None:
        if self._notify:
            self._notify.close()
            self._notify = None

    def _explain(self) -> str:
        return "its log ends:\n" + "\n".join(self.log().splitlines()[-25:])


@contextmanager
def staged(launch: Launch) -> Iterator[NriGpu]:
    """A daemon that serves, with the driver's files staged."""
    with NriGpu(launch) as daemon:
        daemon.wait_staged()
        yield daemon


class Simulation(NriGpu):
    """`nri-gpu run --gpus FILE` without some of the usual options."""

    def __init__(self, launch: Launch, *without: str) -> None:
        super().__init__(launch)
        self._without = without

    def program(self) -> list[str]:
        words = super().program()
        for flag in self._without:
            at = words.index(flag)
            del words[at : at + 2]
        return words

    @property
    def private(self) -> Path:
        """The folder that it printed."""
        found = re.search(r"state folder.*: nri-gpu status --state-dir (\S+)$", self.log(), re.MULTILINE)
        assert found
        return Path(found[1])


class _Next(NriGpu):
    """With the folders of the one before, but for what is each process's own."""

    def __init__(self, before: NriGpu) -> None:
        super().__init__(replace(before.launch, base=before.launch.base / "next"))
        self._before = before

    def program(self) -> list[str]:
        return [*self._before.program(), "--stand-by", "--run-dir", str(self.launch.base / "run")]
