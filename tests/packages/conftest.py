"""The Debian package of this tree, built once for all workers, and the same again under a newer version."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from deploy.debian.build import build
from nri_gpu import __version__
from tests.support import packages
from tests.support.debian_root import DebianRoot

NEWER = f"{__version__}+b1"
AT = "/packages"  # where a root has them


class Debs(Struct, frozen=True):
    """Two versions of the package, in one folder."""

    folder: Path
    this: str
    newer: str


@pytest.fixture(scope="session")
def debs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Debs:
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "debs"
    with packages.one_at_a_time(folder.with_suffix(".lock")):
        if not folder.exists():
            unfinished = own / "debs.unfinished"
            repack(build(unfinished, "none"), unfinished)
            unfinished.rename(folder)
    newer, this = sorted(path.name for path in folder.glob("*.deb"))
    return Debs(folder, this, newer)


def repack(package: Path, folder: Path) -> None:
    """The same package under a newer version, which the program names, too."""
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    said = tree / "usr/lib/nri-gpu/bundle/common/nri_gpu/__init__.py"
    for path in (tree / "DEBIAN/control", tree / "DEBIAN/preinst", tree / "DEBIAN/postinst", said):
        text = path.read_text()
        assert __version__ in text, path
        path.write_text(text.replace(__version__, NEWER))
    newer = folder / package.name.replace(__version__, NEWER)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", tree, newer], check=True, capture_output=True)
    subprocess.run(["rm", "-r", tree], check=True)


@pytest.fixture
def bookworm(debs: Debs) -> Iterator[DebianRoot]:
    """A clean Debian 12 that sees the packages."""
    with DebianRoot("bookworm", {debs.folder: AT}) as root:
        yield root
