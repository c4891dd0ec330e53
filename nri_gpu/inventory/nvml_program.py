"""The NVML process: answers each request for a refresh with a report, one JSON object a line.

    python -I -m nri_gpu.inventory.nvml_program --driver-root DIR [--library-dir DIR ...] [--sysfs DIR]
        [--stage-dir DIR]

Out: {"type": "call", "call": "nvmlDeviceGetName", "gpu": 0} before each call, so that the daemon knows which one hangs,
then one of {"inventory": ...}, {"fault": "a sentence"} and {"stale": "a sentence"}. It ends when stdin ends.

A request with {"sample": true} has a second answer after an inventory: {"sample": [...]}, or a fault. It comes last, so
that a call of the sample which hangs costs no inventory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from nri_gpu.domain.sample import read_targets
from nri_gpu.host.modules import module_version
from nri_gpu.inventory.library import Library, LibraryError, StartFailure, advice
from nri_gpu.inventory.nvml_client import INIT, NvmlCallError, NvmlClient
from nri_gpu.inventory.nvml_sample import Sampler
from nri_gpu.inventory.nvml_survey import survey
from nri_gpu.system.proc import name_process

# linux/prctl.h, linux/capability.h
PR_SET_PDEATHSIG: Final = 1
PR_SET_NO_NEW_PRIVS: Final = 38
LINUX_CAPABILITY_VERSION_3: Final = 0x20080522
_CAPABILITY_WORDS: Final = 6  # effective, permitted, inheritable, twice 32 bits each
LOAD: Final = "dlopen"  # announced like a call


class NvmlProgram:
    """The shared part of all NVML processes. pipe: a copy of stdout that the library does not know."""

    def __init__(self, pipe: BinaryIO, library: Library, sysfs: Path) -> None:
        self._pipe = pipe
        self._sysfs = sysfs
        self.library = library
        self.nvml = NvmlClient(self._announce)
        self._told_us: dict[str, int] = {}  # as of Sampler: the sessions go on where the one before ended

    def send(self, **message: object) -> None:
        """Write one line and flush it: an announcement must be out before the call is made."""
        self._pipe.write(json.dumps(message).encode() + b"\n")
        self._pipe.flush()

    @contextlib.contextmanager
    def session(self, path: Path) -> Iterator[None]:
        """Hold NVML started from the library at `path`. Until it is shut down, the kernel module cannot be unloaded.

        Raises: LibraryError.
        """
        self._announce(LOAD, None)
        self.library.load(path)
        try:
            self.nvml.call(INIT)
        except NvmlCallError as error:
            failure = StartFailure(error.code, str(error), str(path.resolve()), module_version(self._sysfs))
            raise LibraryError(advice(failure)) from error
        try:
            yield
        finally:
            with contextlib.suppress(NvmlCallError):
                self.nvml.call("nvmlShutdown")

    def refresh(self, *, sample: bool = False) -> Iterator[Mapping[str, object]]:
        """Yield the lines that answer a request."""
        try:
            path = self.library.find()
            if self.library.is_stale(path):
                yield {"stale": f"{path} is not the file that was loaded"}
                return
            with self.session(path):
                report = survey(self.nvml, self._sysfs)
                answer: dict[str, object] = {"inventory": {**report, "lacking": self.nvml.lacking}}
                if sample:
                    yield answer
                    answer = {"sample": Sampler(self.nvml, self._told_us).sample(read_targets(report["gpus"]))}
            yield answer
        except (LibraryError, NvmlCallError) as error:
            yield {"fault": str(error)}

    def _announce(self, name: str, gpu: int | None) -> None:
        self.send(type="call", call=name, gpu=gpu)


P = TypeVar("P", bound="NvmlProgram")


def start(name: str, arguments: Sequence[str] | None, program: type[P]) -> tuple[P, int]:
    """Read the command line, take stdin and stdout, and confine this process.

    name: of the program. Returns also the descriptor that requests come from.
    """
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--driver-root", type=Path, required=True)
    parser.add_argument("--library-dir", action="append", default=[], help="below the root, tried before other folders")
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    parser.add_argument("--stage-dir", type=Path, help="of staged drivers, tried last for the module's version")
    options = parser.parse_args(arguments)
    requests, replies = _private_pipes()
    confine()
    library = Library(options.driver_root, options.library_dir, options.sysfs, options.stage_dir)
    return program(replies, library, options.sysfs), requests


def _private_pipes() -> tuple[int, BinaryIO]:
    """Return copies of stdin and stdout. The library, and what it starts, reads /dev/null and prints to stderr."""
    requests, replies = os.dup(0), os.dup(1)  # not inherited by programs
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return requests, os.fdopen(replies, "wb")


def confine() -> None:
    """Drop the environment and all capabilities, and make this process die with its parent.

    NVML asks the setuid nvidia-modprobe to make missing device nodes. Describing GPUs must not change the host;
    NVIDIA's own container library drops the same (libnvidia-container: src/driver.c).
    Failures are ignored: a kernel without one of these still answers.
    """
    os.environ.clear()  # Python itself may have put LC_CTYPE there (PEP 538)
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    libc.capset(header, (ctypes.c_uint32 * _CAPABILITY_WORDS)())
    # The signal follows the thread that forked us: the daemon's main thread, which lives as long as the daemon.
    _prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero)


def main(arguments: Sequence[str] | None = None) -> int:
    program, requests = start("nri_gpu.inventory.nvml_program", arguments, NvmlProgram)
    with os.fdopen(requests, "rb", buffering=0) as lines, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for line in lines:
            for reply in program.refresh(sample="sample" in json.loads(line)):
                program.send(**reply)
            if "stale" in reply:
                break
    return 0


if __name__ == "__main__":
    name_process("nvml")
    sys.exit(main())
