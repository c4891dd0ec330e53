"""A CDI specification on disk, and other specifications that name the same devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from nri_gpu.cdi.specification import KIND
from nri_gpu.domain.errors import CommandError, NriGpuError, cause_of
from nri_gpu.domain.text import listed
from nri_gpu.system.storage import draft_of, text_of, write_whole
from nri_gpu.system.yaml_documents import read_documents

SUFFIXES: Final = (".json", ".yaml")  # runtimes read no others (cncf-tags/container-device-interface: pkg/cdi/cache.go)
# Where runtimes look by default, the folder that counts most last.
STANDARD: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))
FILE_MODE: Final = 0o644  # rootless runtimes read it too
READ_MAX: Final = 1 << 20  # bytes
# Its udev rule starts even a disabled unit (NVIDIA/nvidia-container-toolkit: deployments/udev).
MASK: Final = "systemctl mask --now nvidia-cdi-refresh.service nvidia-cdi-refresh.path"


class SpecFileError(NriGpuError):
    """A failure to write or remove the specification. Says which and why. denied: for want of permission."""

    def __init__(self, sentence: str, cause: OSError) -> None:
        super().__init__(sentence)
        self.denied = isinstance(cause, PermissionError)


class OverlapError(NriGpuError):
    """A file beside the specification has names of it, so that neither would serve them. Names both files."""


class SpecFile:
    """A file that is written whole, and removed where it would be wrong. kind: what it describes."""

    def __init__(self, path: Path, kind: str = KIND, mode: int = FILE_MODE) -> None:
        self.path = path
        self._kind = kind
        self._mode = mode

    def write(self, text: str) -> bool:
        """Write `text` unless the file has it. Return whether it was written. Raises: SpecFileError."""
        try:
            if text_of(self.path, READ_MAX, "utf-8") == text:
                return False
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_whole(self.path, text.encode(), self._mode, sync=True)
        except OSError as error:
            raise SpecFileError(f"{self.path} cannot be written: {cause_of(error)}", error) from error
        return True

    def remove(self) -> bool:
        """Remove the file if it describes that kind. Return whether it did. Raises: SpecFileError."""
        try:
            draft_of(self.path).unlink(missing_ok=True)
            if _read(text_of(self.path, READ_MAX, "utf-8") or "", _Kind).kind != self._kind:
                return False
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecFileError(f"{self.path} cannot be removed: {cause_of(error)}", error) from error
        return True


def spec_files(folder: Path) -> list[Path]:
    """Return the files of a folder that runtimes read."""
    return sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))


class _Device(Struct, frozen=True):
    name: str | int  # runtimes take a number in JSON for its text


class _Kind(Struct, frozen=True):
    kind: str = ""


class _Specification(_Kind, frozen=True):
    devices: tuple[_Device, ...] = ()


_Part = TypeVar("_Part", _Kind, _Specification)


def names_in(text: str) -> frozenset[str]:
    """Return the names of our kind of devices in a specification, JSON or YAML, or none if the text is no such file."""
    found = _read(text, _Specification)
    return frozenset(str(device.name) for device in found.devices) if found.kind == KIND else frozenset()


def _read(text: str, part: type[_Part]) -> _Part:
    """Return that part of what a text specifies, which is of no kind if it is no specification."""
    try:
        return msgspec.convert(read_documents(text, "", typed=False)[0], part)
    except (CommandError, msgspec.ValidationError):
        return part()


def names_of(path: Path) -> frozenset[str]:
    """Return the names of our kind of devices in a file, or none if it cannot be read."""
    return names_in(text_of(path, READ_MAX, "utf-8") or "")


class Overlap(Struct, frozen=True):
    """Device names that two files have. counts: the file from which runtimes take them, or None for neither."""

    files: tuple[Path, Path]
    names: frozenset[str]
    counts: Path | None

    def __str__(self) -> str:
        one, other = self.files
        both = f"{one} and {other} both name {listed(f'{KIND}={name}' for name in sorted(self.names))}"
        if self.counts is None:
            return f"{both}: runtimes resolve no name that two files of one folder have"
        return f"{both}: runtimes take what {self.counts} says, since its folder comes later"


def overlaps(own: Path, names: Collection[str], folders: Sequence[Path]) -> Iterator[Overlap]:
    """Yield the overlaps of a specification, there or to be written, with others in its folder and in `folders`.

    names: its devices. folders: as the runtime lists them. A folder's order to one that is not listed is not known, so
    such a pair is left out. Source: cncf-tags/container-device-interface, pkg/cdi/cache.go (refresh).
    """
    spelled = {folder.resolve(): folder for folder in (*folders, own.parent)}
    order, place = [folder.resolve() for folder in folders], own.parent.resolve()
    for real, folder in spelled.items():
        paths = (path for path in spec_files(folder) if (real, path.name) != (place, own.name))
        found = {path: shared for path in paths if (shared := names_of(path).intersection(names))}
        if real != place:
            # What two files of an earlier folder name is not resolved, even if a later folder names it too.
            for one, other in combinations(found, 2):
                if twice := found[one] & found[other]:
                    yield Overlap((one, other), twice, None)
        for path, shared in found.items():
            if real == place:
                yield Overlap((own, path), shared, None)
            elif {real, place} <= {*order}:
                yield Overlap((own, path), shared, max(own, path, key=lambda each: order.index(each.parent.resolve())))
