"""`nri-gpu guard` as a process of its own, beside a daemon or without one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.support.daemon import Launch, NriGpu, options


class NriGuard(NriGpu):
    """A running guard. beside: how the daemon is started whose state folder it reads; policy: the guard's own file."""

    def __init__(self, beside: Launch, policy: Path | None = None) -> None:
        self._state = beside.state
        super().__init__(replace(beside, base=beside.base.with_name(f"{beside.base.name}-guard"), policy=policy))

    @property
    def run_dir(self) -> Path:
        return self.launch.base / "run"

    def program(self) -> list[str]:
        given = {
            "--socket": self.launch.socket,
            "--policy": self.launch.policy,
            "--state-dir": self._state,
            "--run-dir": self.run_dir,
            "--log-level": self.launch.log_level,
        }
        return [*self.words(), "guard", *options(given)]

    def seen(self) -> Mapping[str, Any]:
        """What it says of itself, for `nri-gpu check`."""
        said: Mapping[str, Any] = json.loads((self.run_dir / "guard.json").read_text())
        return said
