"""A made-up machine that one NVML process describes again and again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.nvml_child import NvmlChild
from tests.support.files import write_files
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure


class Machine:
    """root: its driver's. sysfs: its kernel's, empty at first."""

    def __init__(self, folder: Path) -> None:
        self.root, self.sysfs = folder / "driver", folder / "sys"
        self._runner = asyncio.Runner()
        self._child = NvmlChild(str(self.root), sysfs=str(self.sysfs), boot_clock=lambda: 7.0)
        self._library: object = None
        self.lacking: tuple[str, ...] = ()

    def look(
        self,
        gpus: Sequence[FakeGpu],
        acts: Sequence[Act] = (),
        *,
        without: Iterable[str] = (),
        ancestors: Iterable[tuple[int, int, str]] = (),
        driver: str = "580.95.05",
        reported: str = "",
    ) -> Inventory:
        """What the process reports of these GPUs. Another library needs another process.

        reported: the version that the library gives, if that is not the one of its file.
        """
        if (library := (*without, driver)) != self._library:
            build_fake_nvml(self.root, gpus, acts, without=without, ancestors=ancestors, driver=driver)
            self._library = library
        else:
            configure(self.root, gpus, acts, ancestors=ancestors, driver=reported or driver)
        inventory = self._runner.run(self._child.refresh())
        self.lacking = self._child.lacking
        return inventory

    def write(self, path: str, text: str) -> None:
        """A file of sysfs."""
        write_files(self.sysfs, {path: text})

    def forget(self) -> None:
        """Empties sysfs."""
        shutil.rmtree(self.sysfs, ignore_errors=True)

    def close(self) -> None:
        self._runner.run(self._child.close())
        self._runner.close()
