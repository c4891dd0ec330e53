"""Lets the NVML process go of what it does not need, before a driver's library is loaded into it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import pynvml
from msgspec import Struct, field

from nri_gpu.inventory.library import NVML, Refusal, advice, find_library, tried
from nri_gpu.inventory.nvml_client import CallError
from nri_gpu.inventory.nvml_symbols import Failed, Symbols
from nri_gpu.inventory.survey import survey

# linux/prctl.h, linux/capability.h
PR_SET_PDEATHSIG: Final = 1
PR_SET_NO_NEW_PRIVS: Final = 38
LINUX_CAPABILITY_VERSION_3: Final = 0x20080522
_CAPABILITY_WORDS: Final = 6  # effective, permitted, inheritable, twice 32 bits each


def confine() -> None:
    """No environment, no capabilities, none to be had back by a setuid program, and no life beyond the parent's.

    NVML asks the setuid nvidia-modprobe to make device nodes where they are missing; describing GPUs must not change
    the host, and NVIDIA's own container library drops the same (libnvidia-container: src/driver.c).
    Failures are ignored: each is a second fence, and a kernel without it still answers.
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


START: Final = "nvmlInit"
LOAD: Final = "dlopen"  # what a progress line calls the loading of the library
Fingerprint = tuple[str, int, int, int]


class LibraryError(Exception):
    """NVML's library is not there or cannot be loaded: a sentence."""


class Speaker(Struct, frozen=True):
    """The way to the keeper. pipe: a copy of stdout that nobody else knows. symbols: of the library, once loaded."""

    pipe: BinaryIO
    symbols: Symbols = field(default_factory=lambda: Symbols(lambda: ctypes.CDLL(NVML)))

    def say(self, **words: object) -> None:
        """One line, flushed: it must be out before the call it announces."""
        self.pipe.write(json.dumps(words).encode() + b"\n")
        self.pipe.flush()

    def ask(self, name: str, *arguments: object, gpu: int | None = None) -> Any:  # noqa: ANN401 (NVML's own types)
        """Announces and makes one NVML call.

        Raises: CallError.
        """
        self.say(call=name, gpu=gpu)
        try:
            if (older := self.symbols.stand_in(name)) is None:
                return _bindings(name)(*arguments)
            if name == START:
                _let_the_binding_load()
            return older(*arguments)
        except pynvml.NVMLError as error:
            raise CallError(name, str(error), error.value) from error
        except Failed as error:
            raise CallError(name, str(pynvml.NVMLError(error.code)), error.code) from error
        except ValueError as error:  # bytes that are no UTF-8
            raise CallError(name, f"unreadable answer ({error})") from error


def _fabric_info(handle: object) -> Any:  # noqa: ANN401 (an nvmlGpuFabricInfo of some version)
    """The binding wants the struct to be filled; the others it makes itself. Before R550: an older struct and call."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
    except pynvml.NVMLError as error:
        if error.value not in _TOO_NEW:
            raise
        info = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(handle, pynvml.byref(info))
    return info


def _lacking(*_: object) -> None:
    """What a binding older than ours does not declare. Raises: NVMLError."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


_TOO_NEW: Final = frozenset({pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH})
_OURS: Final[Mapping[str, Callable[..., Any]]] = {"nvmlDeviceGetGpuFabricInfoV": _fabric_info}


def _let_the_binding_load() -> None:
    """It opens the library in this call alone, before it finds that the function is not there."""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()


def _bindings(name: str) -> Callable[..., Any]:
    return _OURS.get(name, getattr(pynvml, name, None) or _lacking)


class Library:
    """NVML's library, loaded at most once: a second copy in one process would not be the one that pynvml finds."""

    def __init__(self, driver_root: Path, library_dirs: Sequence[str] = ()) -> None:
        self._driver_root = driver_root
        self._library_dirs = library_dirs
        self._loaded: ctypes.CDLL | None = None
        self._fingerprint: Fingerprint | None = None

    def find(self) -> Path:
        """Where it lies now.

        Raises: LibraryError.
        """
        path = find_library(self._driver_root, self._library_dirs)
        if path is None:
            places = tried(self._driver_root, self._library_dirs)
            raise LibraryError(
                f"{NVML} was not found below the driver root {self._driver_root}: looked in {places}; "
                "install the driver, or set the driver root to where it is"
            )
        return path

    def stale(self, path: Path) -> bool:
        """Another file than the one that was loaded."""
        return self._fingerprint not in (None, _fingerprint(path))

    def load(self, path: Path) -> None:
        """Loads it by path, so that pynvml, which asks for it by name, is given this one.

        Raises: LibraryError.
        """
        if self._loaded is not None:
            return
        try:
            self._loaded, self._fingerprint = ctypes.CDLL(str(path)), _fingerprint(path)
            by_name = ctypes.CDLL(NVML)
        except OSError as error:
            raise LibraryError(f"cannot load {path}: {error}") from error
        if by_name._handle != self._loaded._handle:
            raise LibraryError(f"{path} does not call itself {NVML}: not an NVML of this driver root was loaded")


def _fingerprint(path: Path) -> Fingerprint:
    real = path.resolve()
    stat = real.stat()
    return str(real), stat.st_dev, stat.st_ino, stat.st_mtime_ns


def answer(library: Library, speaker: Speaker, sysfs: Path) -> Mapping[str, object]:
    """The one line that ends a refresh."""
    try:
        path = library.find()
        if library.stale(path):
            return {"stale": f"{path} is not the file that was loaded"}
        speaker.say(call=LOAD, gpu=None)
        library.load(path)
        with session(speaker, path, sysfs):
            return {"inventory": {**survey(speaker.ask, sysfs), "lacking": speaker.symbols.lacking}}
    except (LibraryError, CallError) as error:
        return {"fault": str(error)}


@contextlib.contextmanager
def session(speaker: Speaker, path: Path, sysfs: Path) -> Iterator[None]:
    """NVML started, for one refresh only: while it is open the kernel module cannot be unloaded.

    Raises: LibraryError.
    """
    try:
        speaker.ask(START)
    except CallError as error:
        refusal = Refusal(error.code, str(error), str(path.resolve()), _module_version(sysfs))
        raise LibraryError(advice(refusal)) from error
    try:
        yield
    finally:
        with contextlib.suppress(CallError):
            speaker.ask("nvmlShutdown")


def _module_version(sysfs: Path) -> str:
    """The version of the kernel module that is loaded; empty when none is."""
    try:
        return (sysfs / "module/nvidia/version").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def private_pipes() -> tuple[Speaker, int]:
    """Our ends of stdin and stdout, kept from the library and whatever it starts: they may read and print."""
    requests, replies = os.dup(0), os.dup(1)  # not inherited by programs
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return Speaker(os.fdopen(replies, "wb")), requests


def options_of(program: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Where the driver is, from the command line."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--driver-root", type=Path, required=True)
    parser.add_argument("--library-dir", action="append", default=[], help="below the root, before those we know")
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves refreshes until stdin ends."""
    options = options_of("nri_gpu.inventory.nvml", arguments)
    speaker, requests = private_pipes()
    confine()
    library = Library(options.driver_root, options.library_dir)
    with os.fdopen(requests, "rb", buffering=0) as lines, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in lines:  # every line is the one request there is
            reply = answer(library, speaker, options.sysfs)
            speaker.say(**reply)
            if "stale" in reply:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
