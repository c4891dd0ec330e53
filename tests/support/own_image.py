"""The checkout's own image, as `make image` builds it, and the same with an earlier program."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Final

from deploy import bundle, image
from tests.support import apt, packages
from tests.support.cache import cache_folder, kept
from tests.support.released import released

PACKAGE: Final = "nri_gpu"
# What it is made of.
SOURCES: Final = ("config", "deploy", "nri_gpu", "share", "systemd")


def own_image() -> Path:
    """The archive, kept in the cache folder until its sources change. Raises: HarnessError."""
    folder, sources = cache_folder() / "image", _digest()
    mark = folder / "sources"

    def make(into: Path) -> None:
        build(into)
        (into / mark.name).write_text(sources)

    return kept(folder, make, lambda: mark.exists() and mark.read_text() == sources) / image.FILE


def build(into: Path) -> Path:
    """Build it anew. Raises: HarnessError."""
    mmdebstrap = ["unshare", "--mount", *packages.command("mmdebstrap")]  # it mounts proc and others
    return image.build(into, mmdebstrap, apt.archives()[0].site)


def _digest() -> str:
    files = sorted(path for name in SOURCES for path in (bundle.ROOT / name).rglob("*") if path.is_file())
    summed = hashlib.sha256((bundle.ROOT / "pyproject.toml").read_bytes())
    for path in files:
        if "__pycache__" not in path.parts:
            summed.update(f"{path.relative_to(bundle.ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return summed.hexdigest()


def earlier_image(commit: str, name: str) -> Path:
    """The same with the program of an earlier commit in it, under another name, kept alike. Raises: HarnessError."""
    folder, sources = cache_folder() / f"image-{commit[:8]}", f"{_digest()} {name}"
    mark = folder / "sources"

    def make(into: Path) -> None:
        layer = _with_program(_layer(own_image()), Path(released(commit)["PYTHONPATH"]) / PACKAGE)
        image.write(into / image.FILE, layer, image.CONFIG, name)
        (into / mark.name).write_text(sources)

    return kept(folder, make, lambda: mark.exists() and mark.read_text() == sources) / image.FILE


def _layer(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest
        blob = tar.extractfile(json.load(manifest)[0]["Layers"][0])
        assert blob
        return blob.read()


def _with_program(layer: bytes, package: Path) -> bytes:
    """The layer with that package in place of its own."""
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(layer)) as old, tarfile.open(fileobj=made, mode="w") as new:
        own = next(each.name for each in old if each.name.endswith(f"/{PACKAGE}/__init__.py")).rpartition("/")[0]
        for each in old:
            if each.name != own and not each.name.startswith(f"{own}/"):
                new.addfile(each, old.extractfile(each) if each.isfile() else None)
        new.add(package, own)
    return made.getvalue()
