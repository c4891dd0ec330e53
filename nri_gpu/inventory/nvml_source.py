"""The sources of an inventory: the `Source` interface, and this machine as its main implementation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from loguru import logger
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.node import Inventory, KernelGpu
from nri_gpu.host.extras import find_extras, on_the_host
from nri_gpu.host.kernel_view import (
    HostFolders,
    host_majors,
    kernel_view,
    module_load,
    numa_nodes,
    nvswitches,
    unlisted_gpus,
    unusual_minors,
    with_minors,
)
from nri_gpu.inventory.nvml_child import Deadlines, NvmlChild, SampleSink
from nri_gpu.system.clocks import since_boot_s
from nri_gpu.system.tasks import LogOnce

T = TypeVar("T")


class Source(Protocol):
    async def refresh(self) -> Inventory:
        """Return the node as it is now. Raises: InventoryError."""

    async def close(self) -> None:
        """Release what the source holds."""


class FileReader:
    """A reader of the kernel's and the driver's files in a thread, because such a read may hang for ever.

    At most one thread runs at a time: one that hangs is left behind, and no second thread is started. The threads
    are not the event loop's, which waits for its own when it ends.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._running = ""

    async def run(self, what: str, read: Callable[[], T]) -> T:
        """Return what `read` returns, or raise what it raises. what: its name in an error.

        Raises: InventoryError, if it takes too long, or an earlier read still runs.
        """
        if self._running:
            raise InventoryError(f"{self._running} has not finished yet: see `dmesg` for tasks that hang")
        self._running = what
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # who gives up waiting does not stop the thread
        done.add_done_callback(self._finished)
        threading.Thread(target=_fill, args=(done, read), name="nri-gpu-files", daemon=True).start()
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(done)
        except TimeoutError:
            raise InventoryError(f"{what} did not finish within {self._limit_s:g} s") from None

    def _finished(self, _: Future[T]) -> None:
        self._running = ""


def _fill(done: Future[T], read: Callable[[], T]) -> None:
    try:
        done.set_result(read())
    except BaseException as error:
        done.set_exception(error)


class NvmlSource:
    """The machine itself: GPUs from NVML; majors, NUMA nodes, capability minors and extras from the kernel's files."""

    def __init__(
        self,
        driver_root: str | Path,
        library_dirs: Sequence[str] = (),
        *,
        host_root: str = "",
        stage_dir: str = "",
        folders: HostFolders | None = None,
        deadlines: Deadlines | None = None,
        samples: SampleSink | None = None,
        boot_clock: Callable[[], float] = since_boot_s,
    ) -> None:
        folders = folders or HostFolders()
        self._child = NvmlChild(
            str(driver_root),
            library_dirs,
            sysfs=str(folders.sys),
            stage_dir=stage_dir,
            deadlines=deadlines,
            samples=samples,
            boot_clock=boot_clock,
        )
        self._folders = folders.with_driver(Path(driver_root), host_root)
        self._host_root = host_root
        self._files = FileReader((deadlines or Deadlines()).files_s)
        self._unusual = LogOnce()
        self._lacking: set[tuple[str, str]] = set()  # driver version and function
        self.answered: Hashable = None  # the kernel view from before the last answer

    async def refresh(self) -> Inventory:
        """Return what NVML and the kernel report now. Raises: InventoryError."""
        before = await self._files.run("a look at the kernel's files", self.kernel_view)
        try:
            inventory = await self._child.refresh()
        except InventoryError as error:
            raise InventoryError(str(error), await self._without_nvml(str(error))) from error
        self._log_lacking(inventory.driver_version)
        # After NVML, whose start may be what loads the kernel module.
        read = partial(self._with_files, inventory)
        inventory = await self._files.run("reading the driver's files in /proc and /sys", read)
        self._unusual.note("unusual capability minors, used as they are", "; ".join(unusual_minors(inventory.gpus)))
        self.answered = before
        return inventory

    def kernel_view(self) -> Hashable:
        """Return what the kernel shows without the driver: a different value means that the node may have changed."""
        return kernel_view(self._folders)

    def module_load(self) -> str:
        """Return a value that names this load of the driver's kernel module, or empty while it is not loaded.

        A new load is a reset of all GPUs.
        """
        return module_load(self._folders.sys)

    @property
    def starts(self) -> int:
        return self._child.starts

    async def close(self) -> None:
        await self._child.close()

    def _with_files(self, inventory: Inventory) -> Inventory:
        """Return the inventory completed from files. Raises: InventoryError."""
        majors, gpus = host_majors(self._folders.proc), with_minors(inventory.gpus, self._folders.proc)
        extras = find_extras(self._folders, inventory.driver_version)
        if self._host_root:
            extras = on_the_host(extras, self._folders.driver, Path(self._host_root))
        listed = {gpu.pci_bus_id for gpu in gpus}
        return replace(
            inventory,
            majors=majors,
            gpus=gpus,
            numa=numa_nodes(gpus, self._folders.sys),
            extras=extras,
            unlisted=unlisted_gpus(self._folders, listed, faults=len(inventory.faults)),
            nvswitches=nvswitches(self._folders.proc),
        )

    async def _without_nvml(self, fault: str) -> tuple[KernelGpu, ...]:
        """Return the GPUs that the kernel shows, or none if its files cannot be read."""
        with contextlib.suppress(InventoryError):
            read = partial(unlisted_gpus, self._folders, (), fault=fault)
            return await self._files.run("reading what the kernel shows of GPUs", read)
        return ()

    def _log_lacking(self, version: str) -> None:
        """Log the functions that NVML lacks, once for each driver version."""
        if fresh := [name for name in self._child.lacking if (version, name) not in self._lacking]:
            self._lacking |= {(version, name) for name in fresh}
            bound = logger.bind(driver_version=version, fault=", ".join(fresh))
            bound.info("this driver's NVML lacks functions: older ones are used, or the facts stay unknown")
