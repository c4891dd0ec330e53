"""The checkout's own image, as `make image` builds it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from deploy import bundle, image
from tests.support import apt, packages
from tests.support.cache import cache_folder, kept

# What it is made of.
SOURCES: Final = ("config", "deploy", "nri_gpu", "share", "systemd")


def own_image() -> Path:
    """The archive, kept in the cache folder until its sources change. Raises: HarnessError."""
    folder, sources = cache_folder() / "image", _digest()
    mark = folder / "sources"

    def make(into: Path) -> None:
        mmdebstrap = ["unshare", "--mount", *packages.command("mmdebstrap")]  # it mounts proc and others
        image.build(into, mmdebstrap, apt.archives()[0].site)
        (into / mark.name).write_text(sources)

    return kept(folder, make, lambda: mark.exists() and mark.read_text() == sources) / image.FILE


def _digest() -> str:
    files = sorted(path for name in SOURCES for path in (bundle.ROOT / name).rglob("*") if path.is_file())
    summed = hashlib.sha256((bundle.ROOT / "pyproject.toml").read_bytes())
    for path in files:
        if "__pycache__" not in path.parts:
            summed.update(f"{path.relative_to(bundle.ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return summed.hexdigest()
