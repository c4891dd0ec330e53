"""A daemon in the sandbox of its unit, with a drop-in."""

from __future__ import annotations

from pathlib import Path

from tests.support import sandbox
from tests.support.daemon import Launch, NriGpu
from tests.support.unit_file import OURS


class Sandboxed(NriGpu):
    """In the unit's sandbox with what the drop-in adds. rw: what it may write to besides its own folders."""

    def __init__(self, launch: Launch, drop_in: str, *options: str, rw: tuple[Path, ...] = ()) -> None:
        super().__init__(launch)
        self._drop_in = drop_in
        self._options = options
        self._rw = (launch.state, launch.base / "drivers", *rw)
        for folder in self._rw[:2]:
            folder.mkdir()

    def program(self) -> list[str]:
        unit = self.launch.base / "nri-gpu.service"
        unit.write_text(f"{OURS.read_text()}\n{self._drop_in}")
        return sandbox.command([*super().program(), *self._options], rw=self._rw, keep=[self.launch.base], unit=unit)
