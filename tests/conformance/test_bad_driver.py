"""A driver that is missing, half there, open to others or full of links out of its root: no container gets any of it.

On a node that is simulated at the driver's own boundary, for one of ours needs no driver's files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.kernel import NriGpuOnNvidia
from tests.support.marks import on_newest
from tests.support.nvml import FakeGpu, build_fake_nvml
from tests.support.nvml.build import DRIVER, LIB_DIR
from tests.support.waiting import wait_for

pytestmark = on_newest

GPUS: Final = tuple(FakeGpu(minor=n, uuid=f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(2))
SOON_S: Final = 60.0  # a look every second, on a machine that may be busy


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """NVML is in a folder of its own, so that it can be asked whatever becomes of the rest."""
    return build_fake_nvml(make_driver_root(tmp_path / "driver", DRIVER), GPUS)


@pytest.fixture
def daemon(node: Containerd, tmp_path: Path, root: Path) -> Iterator[NriGpu]:
    launch = Launch(tmp_path / "d", node.nri_socket, topology=None, driver_root=root)
    with NriGpuOnNvidia(launch.with_policy("[inventory]\nrefresh_s = 1\n"), DRIVER) as running:
        running.wait_staged()
        running.wait_logged("inventory changed gpus=2")
        yield running


def ask(node: Containerd) -> ContainerId | str:
    """A container that runs, or why there is none."""
    try:
        return node.cri.run_asking("device=1; mode=shared")
    except CriError as error:
        return error.details


def runs(node: Containerd) -> bool:
    found = ask(node)
    return "nri-gpu [" not in found and "error" not in found


def out(root: Path) -> None:
    for folder in (root / "lib64", root / LIB_DIR):
        outside = root.parent / f"outside-{folder.name}"
        folder.rename(outside)
        folder.mkdir()
        for path in outside.iterdir():
            (folder / path.name).symlink_to(path)


def half(root: Path) -> None:
    (root / f"lib64/libcuda.so.{DRIVER}").rename(root / "lib64/libcuda.so.999.1")


def gone(root: Path) -> None:
    shutil.rmtree(root)


BAD: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "missing": (gone, "driver root {root} is not a directory"),
    "half installed": (half, "driver root {root} holds libcuda of 999.1 but libnvidia-ml of {version}"),
    "open to others": (lambda root: root.chmod(0o777), "folder {root} is not safe (owner 0, mode 0777"),
    "a folder open to others": (lambda root: (root / "lib64").chmod(0o777), "folder {root}/lib64 is not safe"),
    "links that lead out": (out, "lib64/libcuda.so.{version} (leads to nothing below the driver root)"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_driver_that_is_bad(node: Containerd, daemon: NriGpu, root: Path, how: str) -> None:
    spoil, words = BAD[how]
    assert runs(node)
    spoil(root)
    daemon.hang_up()
    words = words.format(root=root, version=DRIVER)
    daemon.wait_logged("driver files not found")
    refusal = ask(node)
    assert "nri-gpu [node-not-ready]: this node cannot grant GPUs: " in refusal
    assert words in refusal, refusal
    if how == "open to others":
        root.chmod(0o755)
        wait_for("the driver to be trusted again", lambda: runs(node), SOON_S)


def test_staged_files_that_vanish_come_back(node: Containerd, daemon: NriGpu) -> None:
    """The one container in between fails with the path that is missing; nobody has to do anything."""
    staged = next((daemon.launch.base / "drivers").glob(f"{DRIVER}-*"))
    staged.rename(daemon.launch.base / "away")  # in one step: a look may be under way
    failed = ask(node)
    if "nri-gpu [" not in failed and "error" in failed:  # else a look came before us
        assert re.search(rf"drivers/{re.escape(DRIVER)}-[\w.]+/compute\+utility", failed)
    wait_for("the next look", lambda: any((daemon.launch.base / "drivers").glob(f"{DRIVER}-*")), SOON_S)
    wait_for("the next one to run", lambda: runs(node), SOON_S)
