"""However a host lays out its driver, containers get the same trees, name by name, whatever capability they have.

So what is proven in real containers with one layout (tests/conformance/test_capabilities.py) holds for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct, field

from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability, closure
from nri_gpu.driver.elf import read_elf
from nri_gpu.driver.scan import scan
from nri_gpu.driver.stage import stage
from tests.support.driver_root import CONFIGS, make_driver_root

V: Final = "580.95.05"
SETS: Final = (
    *(closure(frozenset({each})) for each in Capability if each is not Capability.COMPAT32),
    DEFAULT_CAPABILITIES,
    frozenset(Capability),
)
# Staged trees of one driver: capabilities -> path in the tree -> what is there.
Trees = Mapping[Capabilities, Mapping[str, str]]


class Host(Struct, frozen=True):
    """A driver root, and what policy says of it."""

    root: Path
    library_dirs: Sequence[str] = field(default=())


def flat(base: Path) -> Host:
    """As `/usr/local/nvidia` on hosts that are images themselves."""
    return Host(make_driver_root(base / "nvidia", V, machine="x86_64", everything=True))


def ubuntu(base: Path) -> Host:
    return Host(make_driver_root(base / "host", V, "ubuntu", machine="x86_64", everything=True))


def debian(base: Path) -> Host:
    return Host(make_driver_root(base / "host", V, "debian", machine="x86_64", everything=True))


def rhel(base: Path) -> Host:
    return Host(make_driver_root(base / "host", V, "rhel", machine="x86_64", everything=True))


def driver_container(base: Path) -> Host:
    """As `/run/nvidia/driver`: a distribution's root below a folder, its links absolute as if in a chroot."""
    root = make_driver_root(base / "run/nvidia/driver", V, "ubuntu", machine="x86_64", everything=True)
    for link in [path for path in root.rglob("*") if path.is_symlink() and not path.is_dir()]:
        target = f"/{link.resolve().relative_to(root)}"
        link.unlink()
        link.symlink_to(target)
    return Host(root)


def nixos(base: Path) -> Host:
    """A link into a store where every folder has a name of its own; 32-bit libraries in another of them."""
    made = make_driver_root(base / "nix/store/abc-nvidia-x11", V, machine="x86_64", everything=True)
    other = base / "nix/store/def-nvidia-x11-lib32"
    other.mkdir()
    (made / "lib").rename(other / "lib")
    (made / "lib64").rename(made / "lib")
    (base / "run").mkdir()
    (base / "run/opengl-driver").symlink_to("/nix/store/abc-nvidia-x11")
    (base / "run/opengl-driver-32").symlink_to("/nix/store/def-nvidia-x11-lib32")
    return Host(base, ("/run/opengl-driver/lib", "/run/opengl-driver-32/lib"))


def talos(base: Path) -> Host:
    """A system without glibc of its own: the driver beside a glibc that came with it."""
    made = make_driver_root(base / "made", V, machine="x86_64", everything=True)
    target = base / "root/usr/local/glibc/usr"
    target.mkdir(parents=True)
    (made / "lib64").rename(target / "lib")
    (made / "lib").rename(target / "lib32")
    for folder in ("bin", "share", "etc"):
        (made / folder).rename(target / folder)
    return Host(base / "root", ("/usr/local/glibc/usr/lib", "/usr/local/glibc/usr/lib32/"))


LAYOUTS: Final[tuple[Callable[[Path], Host], ...]] = (ubuntu, debian, rhel, driver_container, nixos, talos)


def staged(base: Path, layout: Callable[[Path], Host]) -> Trees:
    folder = base / layout.__name__
    folder.mkdir()
    host = layout(folder)
    found = scan(host.root, "x86_64", host.library_dirs)
    assert (found.version, found.left_out) == (V, ())
    files = stage(found, folder / "drivers")
    read = Reader({})
    return {some: read.tree(Path(files.trees[some].path)) | dict(files.trees[some].files) for some in SETS}


class Reader(Struct, frozen=True):
    """What is behind each name; a file that many trees share is read once."""

    known: dict[int, str]

    def tree(self, tree: Path) -> dict[str, str]:
        return {str(path.relative_to(tree)): self.what(path) for path in tree.rglob("*") if not path.is_dir()}

    def what(self, path: Path) -> str:
        if path.is_symlink():
            return os.fspath(path.readlink())
        inode = path.stat().st_ino
        if inode not in self.known:
            elf = read_elf(path)
            self.known[inode] = f"{elf.bits} {elf.soname}" if elf else path.read_text()
        return self.known[inode]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return staged(tmp_path_factory.mktemp("flat"), flat)


def test_the_layout_that_the_others_are_compared_with_has_everything(expected: Trees) -> None:
    whole = expected[frozenset(Capability)]
    assert len([name for name in whole if name.startswith("lib64/lib32/")]) > len(CONFIGS)
    assert {"extra/etc/OpenCL/vendors/nvidia.icd", "lib64/bin/nvidia-smi", "lib64/libcuda.so.1"} <= set(whole)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.__name__)
def test_every_layout_gives_the_same_trees(tmp_path: Path, expected: Trees, layout: Callable[[Path], Host]) -> None:
    for some, tree in staged(tmp_path, layout).items():
        assert tree == expected[some], sorted(some)
