"""`nri-gpu cdi generate --watch`: updates the specification when GPUs or driver change, until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from loguru import logger

from nri_gpu.cdi.file import SpecFile, SpecFileError
from nri_gpu.cdi.generate import NotReadyError, SpecificationOptions, conflicts, remove_old, specification_text
from nri_gpu.cdi.specification import KIND
from nri_gpu.domain.errors import DriverError, Exit
from nri_gpu.inventory.controller import InventoryCache
from nri_gpu.simulation.source import source_of
from nri_gpu.system.tasks import LogOnce, exit_code


class SpecificationWatch:
    """Keeps the file up to date. It stays when we stop, since containers go on being started."""

    def __init__(self, options: SpecificationOptions, file: SpecFile) -> None:
        self._options = options
        self._file = file
        self._cache = InventoryCache(
            source_of(options.topology, options.driver_root, options.library_dirs),
            publish=lambda _: self._again.set(),
            on_fault=self._fault,
            refresh_s=options.refresh_s,
        )
        self._again = asyncio.Event()
        self._stop = asyncio.Event()
        self._log = LogOnce()

    async def run(self) -> Exit:
        """Returns after SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._look_again)
        parts = [asyncio.create_task(each) for each in (self._cache.run(), self._keep_up_to_date())]
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({*parts, stopping}, return_when=asyncio.FIRST_COMPLETED)
        code = exit_code(parts)
        for task in (*parts, stopping):
            task.cancel()
        await asyncio.gather(*parts, stopping, return_exceptions=True)
        return code

    def stop(self) -> None:
        """Make `run` return."""
        self._stop.set()

    async def _keep_up_to_date(self) -> None:
        await self._cache.ready()
        while True:
            self._again.clear()
            # In a thread: it reads the disk, and staging may copy files.
            await asyncio.to_thread(self._update)
            # Nothing tells when the driver's files change, so they are looked at each time: a few milliseconds.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.refresh_s):
                    await self._again.wait()

    def _update(self) -> None:
        inventory = self._cache.current
        assert inventory, "the cache is ready"
        bound = logger.bind(path=str(self._file.path), driver_version=inventory.driver_version)
        try:
            if self._file.write(specification_text(inventory, self._options)):
                bound.bind(gpus=len(inventory.gpus)).info("CDI specification written")
                for sentence in conflicts(self._file):
                    bound.bind(fault=sentence).warning("other CDI specification describes the same devices")
                for generation in remove_old(self._options, self._file, inventory):
                    bound.bind(generation=generation).info("old driver files removed")
            self._log.clear()
        except NotReadyError as error:
            self._report("CDI specification removed, nothing to describe", str(error))
            with contextlib.suppress(SpecFileError):  # such a file cannot be written either, which is logged
                self._file.remove(KIND)
        except SpecFileError as error:
            self._report("CDI specification not written", str(error))
        except DriverError as error:
            self._report("old driver files not removed", str(error))

    def _report(self, phrase: str, fault: str) -> None:
        self._log.warning(phrase, fault, path=str(self._file.path))

    def _fault(self, sentence: str) -> None:
        logger.bind(fault=sentence).warning("inventory not refreshed")

    def _look_again(self) -> None:
        self._cache.poke()
        self._again.set()
