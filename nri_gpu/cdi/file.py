"""A CDI specification on disk, and other specifications that name the same devices."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import NriGpuError
from nri_gpu.system.storage import write_whole

SUFFIXES: Final = (".json", ".yaml")  # runtimes read no others (cncf-tags/container-device-interface: pkg/cdi/cache.go)
# Where runtimes look by default. If two files name a device, the one in the later folder wins.
STANDARD: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))
FILE_MODE: Final = 0o644  # rootless runtimes read it too
READ_MAX: Final = 1 << 20  # bytes


class SpecFileError(NriGpuError):
    """The specification cannot be written or removed. Says which and why."""


class OtherSpecification(Struct, frozen=True):
    """Another specification of the same kind. hooks: it has some, which run programs on the host."""

    path: Path
    hooks: bool


class SpecFile:
    """One file, written whole, and removed where it would be wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str) -> bool:
        """Write `text` unless the file has it. Returns whether it was written. Raises: SpecFileError."""
        try:
            if _read(self.path) == text:
                return False
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_whole(self.path, text.encode(), FILE_MODE, sync=True)
        except OSError as error:
            raise SpecFileError(f"{self.path} cannot be written: {error.strerror}") from error
        return True

    def remove(self, kind: str) -> bool:
        """Remove the file if it describes `kind`. Returns whether it did. Raises: SpecFileError."""
        try:
            if not _describes(_read(self.path), kind):
                return False
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecFileError(f"{self.path} cannot be removed: {error.strerror}") from error
        return True

    def others(self, kind: str, folders: Iterable[Path]) -> tuple[OtherSpecification, ...]:
        """Other files that describe `kind`, in its own folder and in `folders`."""
        distinct = {folder.resolve() for folder in (self.path.parent, *folders)}
        return tuple(other for folder in sorted(distinct) for other in self._others_in(folder, kind))

    def _others_in(self, folder: Path, kind: str) -> Iterator[OtherSpecification]:
        ours = self.path.parent.resolve() / self.path.name
        for path in sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")):
            with contextlib.suppress(OSError):  # an unreadable file is passed over
                text = "" if path == ours else _read(path)
                if _describes(text, kind):
                    yield OtherSpecification(path, hooks="hookName" in text)


def _read(path: Path) -> str:
    """At most READ_MAX bytes of a file as text; empty where there is no such regular file."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as stream:
            return stream.read(READ_MAX).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _describes(text: str, kind: str) -> bool:
    """Whether a text is a specification of that kind. Of YAML only the line with the kind is looked for."""
    try:
        document = json.loads(text)
    except ValueError:
        return bool(re.search(rf"""^kind:\s*["']?{re.escape(kind)}["']?\s*$""", text, re.MULTILINE))
    return isinstance(document, dict) and document.get("kind") == kind
