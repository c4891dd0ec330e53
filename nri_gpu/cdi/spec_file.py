"""A CDI specification on disk, and other specifications that name the same devices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from nri_gpu.cdi.specification import KIND
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.system.storage import text_of, write_whole

SUFFIXES: Final = (".json", ".yaml")  # runtimes read no others (cncf-tags/container-device-interface: pkg/cdi/cache.go)
# Where runtimes look by default. If two files name a device, the one in the later folder wins.
STANDARD: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))
FILE_MODE: Final = 0o644  # rootless runtimes read it too
READ_MAX: Final = 1 << 20  # bytes


class SpecFileError(NriGpuError):
    """A failure to write or remove the specification. Says which and why."""


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
            raise SpecFileError(f"{self.path} cannot be written: {error.strerror}") from error
        return True

    def remove(self) -> bool:
        """Remove the file if it describes that kind. Return whether it did. Raises: SpecFileError."""
        try:
            if not _describes(self._kind, self.path):
                return False
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecFileError(f"{self.path} cannot be removed: {error.strerror}") from error
        return True

    def conflicts(self, folders: Iterable[Path]) -> Iterator[str]:
        """Yield a sentence for each other specification of our kind, in its own folder and in `folders`."""
        own = self.path.parent.resolve()
        for folder in sorted({own, *(folder.resolve() for folder in folders)}):
            for path in spec_files(folder):
                if path == own / self.path.name or not (text := _describes(self._kind, path)):
                    continue
                what = f"{path} describes {self._kind} too" + (", with hooks" if "hookName" in text else "")
                if folder == own:
                    yield f"{what}: runtimes refuse a device that two files of one folder name; remove one of them"
                else:
                    yield f"{what}: if both name a device, the file in the later folder of the runtime's list wins"


def spec_files(folder: Path) -> list[Path]:
    """Return the files of a folder that runtimes read."""
    return sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))


def _describes(kind: str, path: Path) -> str:
    """Return the text of a specification of that kind; empty where the file is none, or cannot be read.

    Of YAML only the line with the kind is looked for.
    """
    text = text_of(path, READ_MAX, "utf-8") or ""
    try:
        document = json.loads(text)
        found = isinstance(document, dict) and document.get("kind") == kind
    except (ValueError, RecursionError):
        found = bool(re.search(rf"""^kind:\s*["']?{re.escape(kind)}["']?\s*$""", text, re.MULTILINE))
    return text if found else ""
