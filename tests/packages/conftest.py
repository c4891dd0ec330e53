"""What the packages are made of, built once for all workers; the Debian packages, also under another version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from deploy import bundle
from deploy.debian import build
from nri_gpu import __version__
from tests.support.cache import once
from tests.support.debian_root import DebianRoot
from tests.support.released import BEFORE_CORDONS, unpacked

NEWER = f"{__version__}+b1"
AT = "/packages"  # where a root has them
DAEMONS: Final = (bundle.COMMON, bundle.DAEMON)
OBSERVERS: Final = (bundle.COMMON, bundle.OBSERVER)
# The package when it was one; without the bill of materials, which needs the versions of that day installed.
BUILD_WHOLE: Final = """
import sys
from pathlib import Path
from deploy import bundle
from deploy.debian import build
build.sbom.write = lambda folder: None
tree = Path(sys.argv[1]) / "tree"
tree.mkdir()
bundle.lay_out(tree, pythons=("3.11",))
build.pack(tree, Path(sys.argv[1]), "none")
"""


class Debs(Struct, frozen=True):
    """Two versions of the three packages, in one folder."""

    folder: Path

    def files(self, packages: Sequence[str] = DAEMONS, version: str = __version__) -> list[Path]:
        return [path for name in packages for path in self.folder.glob(f"{name}_{version}-*.deb")]

    def seen(self, packages: Sequence[str] = DAEMONS, version: str = __version__) -> list[str]:
        """Where a root has them."""
        return [f"{AT}/{path.name}" for path in self.files(packages, version)]

    @property
    def this(self) -> list[str]:
        return self.seen()

    @property
    def newer(self) -> list[str]:
        return self.seen(version=NEWER)


@pytest.fixture(scope="session")
def laid_out(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The files of all packages. Not to be changed."""
    return once(tmp_path_factory, worker_id, "laid-out", bundle.lay_out)


@pytest.fixture(scope="session")
def debs(tmp_path_factory: pytest.TempPathFactory, worker_id: str, laid_out: Path) -> Debs:
    def make(folder: Path) -> None:
        tree = folder / "tree"
        shutil.copytree(laid_out, tree, symlinks=True)
        for package in build.pack(tree, folder, "none"):
            repack(package, folder)
        shutil.rmtree(tree)

    return Debs(once(tmp_path_factory, worker_id, "debs", make))


def repack(package: Path, folder: Path) -> None:
    """The same package under a newer version, which the program names, too."""
    tree = folder / "newer"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    said = tree / "usr/lib/nri-gpu/bundle/common/nri_gpu/__init__.py"
    for path in (*(tree / "DEBIAN" / name for name in ("control", "preinst", "postinst")), said):
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            older = ("Breaks:", "Replaces:")  # what they name stays as old as it is
            path.write_text(
                "".join(each if each.startswith(older) else each.replace(__version__, NEWER) for each in lines)
            )
    newer = folder / package.name.replace(__version__, NEWER)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", tree, newer], check=True, capture_output=True)
    subprocess.run(["rm", "-r", tree], check=True)


@pytest.fixture(scope="session")
def whole_deb(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder with the last package that had all in it."""

    def make(folder: Path) -> None:
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
        command = [sys.executable, "-c", BUILD_WHOLE, str(folder)]
        subprocess.run(command, cwd=unpacked(BEFORE_CORDONS), env=environment, check=True, capture_output=True)

    return once(tmp_path_factory, worker_id, "whole-deb", make)


@pytest.fixture
def bookworm(debs: Debs) -> Iterator[DebianRoot]:
    """A clean Debian 12 that sees the packages."""
    with DebianRoot("bookworm", {debs.folder: AT}) as root:
        yield root


@pytest.fixture(scope="session")
def with_package(tmp_path_factory: pytest.TempPathFactory, worker_id: str, debs: Debs) -> Path:
    """The layer of a Debian 12 on which daemon and guard are installed."""
    return once(tmp_path_factory, worker_id, "with-package", lambda folder: install(folder, debs.folder, debs.this))


@pytest.fixture(scope="session")
def with_observer(tmp_path_factory: pytest.TempPathFactory, worker_id: str, debs: Debs) -> Path:
    """The same with the observer instead."""
    packages = debs.seen(OBSERVERS)
    return once(tmp_path_factory, worker_id, "with-observer", lambda folder: install(folder, debs.folder, packages))


def install(layer: Path, folder: Path, packages: Sequence[str], *then: str) -> None:
    """Keep in a layer what installing these makes of a Debian 12. then: lines of the shell after that."""
    with DebianRoot("bookworm", {folder: AT}, changed=layer) as root:
        root.run("dpkg", "-i", *packages)
        for line in then:
            root.run("sh", "-c", line)


@pytest.fixture
def installed(debs: Debs, with_package: Path) -> Iterator[DebianRoot]:
    """A Debian 12 on which the package is installed."""
    with DebianRoot("bookworm", {debs.folder: AT}, over=with_package) as root:
        yield root
