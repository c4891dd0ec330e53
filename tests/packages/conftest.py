"""What the packages are made of, built once for all workers; the Debian package, also under a newer version."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from deploy import bundle
from deploy.debian import build
from nri_gpu import __version__
from tests.support.cache import kept
from tests.support.debian_root import DebianRoot

NEWER = f"{__version__}+b1"
AT = "/packages"  # where a root has them


class Debs(Struct, frozen=True):
    """Two versions of the package, in one folder."""

    folder: Path
    this: str
    newer: str


def once(factory: pytest.TempPathFactory, worker_id: str, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first worker to want it makes, for all of them."""
    own = factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / name
    return kept(folder, make)


@pytest.fixture(scope="session")
def laid_out(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The files of all packages. Not to be changed."""
    return once(tmp_path_factory, worker_id, "laid-out", bundle.lay_out)


@pytest.fixture(scope="session")
def debs(tmp_path_factory: pytest.TempPathFactory, worker_id: str, laid_out: Path) -> Debs:
    def make(folder: Path) -> None:
        tree = folder / "tree"
        shutil.copytree(laid_out, tree, symlinks=True)
        package = build.pack(tree, folder, "none")
        shutil.rmtree(tree)
        repack(package, folder)

    folder = once(tmp_path_factory, worker_id, "debs", make)
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


@pytest.fixture(scope="session")
def with_package(tmp_path_factory: pytest.TempPathFactory, worker_id: str, debs: Debs) -> Path:
    """The layer of a Debian 12 on which the package is installed."""

    def make(folder: Path) -> None:
        with DebianRoot("bookworm", {debs.folder: AT}, changed=folder) as root:
            root.run("dpkg", "-i", f"{AT}/{debs.this}")

    return once(tmp_path_factory, worker_id, "with-package", make)


@pytest.fixture
def installed(debs: Debs, with_package: Path) -> Iterator[DebianRoot]:
    """A Debian 12 on which the package is installed."""
    with DebianRoot("bookworm", {debs.folder: AT}, over=with_package) as root:
        yield root
