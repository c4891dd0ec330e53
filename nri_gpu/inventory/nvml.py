"""Asks NVML what GPUs there are: the one importer of pynvml, a program of its own that `child.py` runs.

    python -I -m nri_gpu.inventory.nvml --driver-root DIR [--library-dir DIR ...] [--sysfs DIR]

One JSON object a line. In: {"ask": "refresh"}. Out: {"call": "nvmlDeviceGetName", "gpu": 2} before each call, then one
of {"inventory": {…}}, with the functions that the library lacks, {"fault": "a sentence"} and {"stale": "a sentence"}
(a new library was installed: this process cannot load it beside the old one, and ends). The end of stdin is the end of
the program.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import pynvml
from msgspec import Struct, field

from nri_gpu.inventory.advice import Refusal, advice
from nri_gpu.inventory.asking import CallError
from nri_gpu.inventory.confine import confine
from nri_gpu.inventory.library import NVML, find_library, tried
from nri_gpu.inventory.survey import survey
from nri_gpu.inventory.symbols import Failed, Symbols

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
