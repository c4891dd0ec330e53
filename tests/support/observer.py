"""`nri-gpu observe` as a process of its own, on private paths.

with Observing(Launch(base, socket=base / "none")) as observer:
    observer.wait_looked()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.daemon import READY_S, Launch, NriGpu, options
from tests.support.waiting import wait_for


class Observing(NriGpu):
    """An observer. Of its launch it takes policy, topology, log level and environment. daemon: the state folder of one.

    more: further words of its command line. before: what that begins with.
    """

    def __init__(
        self, launch: Launch, daemon: Path | None = None, more: Sequence[str] = (), before: Sequence[str] = ()
    ) -> None:
        super().__init__(launch)
        self._before = before
        self._daemon = daemon or launch.base / "no-daemon"
        self._more = more

    @property
    def arguments(self) -> list[str]:
        given = {
            "--run-dir": self.launch.state,
            "--state-dir": self._daemon,
            "--gpus": self.launch.topology,
            "--policy": self.launch.policy,
            "--log-level": self.launch.log_level,
        }
        return ["observe", *options(given), *self._more]

    def program(self) -> list[str]:
        return [*self._before, *self.words(), *self.arguments]

    def wait_looked(self) -> None:
        """Until it has looked at the node."""
        self.wait_ready()
        wait_for("a look", lambda: self.verb("status", "--probe").returncode == 0, READY_S, self._explain)

    def observed(self) -> Any:  # noqa: ANN401 - parsed JSON
        """What its `status` says of the observer."""
        return self.status()["observer"]
