"""The NVML process that samples each second, while somebody asks: it holds NVML started meanwhile.

    python -I -m nri_gpu.usage.nvml_samples --driver-root DIR [--library-dir DIR ...] [--sysfs DIR] [--stage-dir DIR]

One JSON object a line. In: {"sample": [GPUs]}, each a `SampleTarget`. Out, for each: {"sample": [...]}. Calls are not
announced one by one, which would cost more than they do: {"type": "call", ...} comes of one that takes long. The last
line of a process that fails is {"fault": "a sentence"}. It ends when stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from nri_gpu.domain.sample import SampleTarget, read_targets
from nri_gpu.inventory.library import Library, LibraryError
from nri_gpu.inventory.nvml_client import NvmlCallError
from nri_gpu.inventory.nvml_program import NvmlProgram, start
from nri_gpu.inventory.nvml_sample import Sampler
from nri_gpu.system.proc import name_process

LONG_S: Final = 1.0  # for a call, before it is announced; up to twice that


class SampleProgram(NvmlProgram):
    """A program that answers each request with a sample, until stdin ends."""

    def __init__(self, pipe: BinaryIO, library: Library, sysfs: Path) -> None:
        super().__init__(pipe, library, sysfs)
        self._call: tuple[str, int | None] | None = None  # the one under way

    def run(self, requests: BinaryIO) -> None:
        """Sample until stdin ends. Raises: NvmlCallError, LibraryError."""
        threading.Thread(target=self._announce_long_calls, daemon=True).start()
        wanted = _read(requests)
        while wanted:
            with self.session(self.library.find()):
                sampler, opened = Sampler(self.nvml, self._told_us), _uuids(wanted)
                while wanted and opened <= _uuids(wanted):  # only the end of a session closes a GPU's device node
                    opened = _uuids(wanted)
                    answer = sampler.sample(wanted)
                    self._call = None
                    self.send(sample=answer)
                    wanted = _read(requests)

    def _announce(self, name: str, gpu: int | None) -> None:
        self._call = (name, gpu)

    def _announce_long_calls(self) -> None:
        """Announce a call that takes long. In a thread of its own, since such a call holds up the other one."""
        seen = None
        while True:
            time.sleep(LONG_S)
            call = self._call
            if call is not None and call is seen:
                super()._announce(*call)
            seen = call


def _uuids(targets: Sequence[SampleTarget]) -> frozenset[str]:
    return frozenset(each.uuid for each in targets)


def _read(requests: BinaryIO) -> tuple[SampleTarget, ...]:
    """Return the GPUs of the next request, or none once stdin has ended."""
    line = requests.readline()
    return read_targets(json.loads(line)["sample"]) if line else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample until stdin ends. Return 1 if NVML failed."""
    program, descriptor = start("nri_gpu.usage.nvml_samples", arguments, SampleProgram)
    with (
        os.fdopen(descriptor, "rb", buffering=0) as requests,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        try:
            program.run(requests)
        except (NvmlCallError, LibraryError) as error:
            program.send(fault=str(error))
            return 1
    return 0


if __name__ == "__main__":
    name_process("samples")
    sys.exit(main())
