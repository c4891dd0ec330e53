"""A ConfigMap's folder as the kubelet keeps it: files are links through `..data`, which is renamed over at once.

Source: Kubernetes pkg/volume/util/atomic_writer.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path


class ConfigMapFolder:
    """One mounted ConfigMap."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        self.folder = folder
        self._numbers = count(1)
        folder.mkdir()
        self.swap(files)
        for name in files:
            (folder / name).symlink_to(f"..data/{name}")

    def swap(self, files: Mapping[str, str]) -> None:
        """Another content, all of it in one rename."""
        before = (self.folder / "..data").resolve()
        fresh = self.folder / f"..2026_01_01_{next(self._numbers)}"
        fresh.mkdir()
        for name, text in files.items():
            (fresh / name).write_text(text)
        link = self.folder / "..data_tmp"
        link.symlink_to(fresh.name)
        link.rename(self.folder / "..data")
        if before.name.startswith("..2026"):
            for path in before.iterdir():
                path.unlink()
            before.rmdir()
