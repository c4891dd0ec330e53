"""A CDI specification on disk: whole or not there, and never beside another that claims the same devices unseen."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import NriGpuError

SUFFIXES: Final = (".json", ".yaml")  # runtimes read no others (cncf-tags/container-device-interface: pkg/cdi/cache.go)
# Where runtimes look unless told otherwise; where two files name one device, the later folder's wins.
STANDARD: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))
FILE_MODE: Final = 0o644  # rootless runtimes read it too
READ_MAX: Final = 1 << 20  # bytes; enough to tell what a file is


class SpecFileError(NriGpuError):
    """The specification cannot be written or removed. Says which and why."""


class OtherSpecification(Struct, frozen=True):
    """Another specification of the same kind. hooks: it runs programs on the host for each container."""

    path: Path
    hooks: bool


class SpecFile:
    """One file that we keep true: written whole, or removed where nothing true can be said."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str) -> bool:
        """Put `text` there unless it is there. Returns whether it was not. Raises: SpecFileError."""
        try:
            if self._text() == text:
                return False
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._replace(text.encode())
        except OSError as error:
            raise SpecFileError(f"{self.path} cannot be written: {error.strerror}") from error
        return True

    def remove(self, kind: str) -> bool:
        """Take it away if it is there and describes `kind`. Returns whether it did. Raises: SpecFileError."""
        try:
            if not _describes(self._text(), kind):
                return False
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecFileError(f"{self.path} cannot be removed: {error.strerror}") from error
        return True

    def rivals(self, kind: str, folders: Iterable[Path]) -> tuple[OtherSpecification, ...]:
        """Other files that describe `kind`, beside it and in `folders`."""
        distinct = {folder.resolve() for folder in (self.path.parent, *folders)}
        return tuple(rival for folder in sorted(distinct) for rival in self._rivals_in(folder, kind))

    def _rivals_in(self, folder: Path, kind: str) -> Iterator[OtherSpecification]:
        ours = self.path.parent.resolve() / self.path.name
        for path in sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")):
            with contextlib.suppress(OSError):  # what we cannot read, we cannot judge
                text = "" if path == ours else _read(path)
                if _describes(text, kind):
                    yield OtherSpecification(path, hooks="hookName" in text)

    def _text(self) -> str:
        return _read(self.path)

    def _replace(self, content: bytes) -> None:
        # Runtimes watch the folder: under this name, a file half written is none to them.
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(fd, "wb") as stream:
            os.fchmod(fd, FILE_MODE)  # the umask has no say in it
            stream.write(content)
            stream.flush()
            os.fsync(fd)
        fresh.replace(self.path)


def _read(path: Path) -> str:
    """Its text, the first of it if it is long; empty where there is no such regular file."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as stream:
            return stream.read(READ_MAX).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _describes(text: str, kind: str) -> bool:
    """Whether it is a specification of that kind. YAML is told by its one line: a parser is too dear for that."""
    try:
        document = json.loads(text)
    except ValueError:
        return bool(re.search(rf"""^kind:\s*["']?{re.escape(kind)}["']?\s*$""", text, re.MULTILINE))
    return isinstance(document, dict) and document.get("kind") == kind
