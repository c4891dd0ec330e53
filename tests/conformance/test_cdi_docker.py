"""The CDI specification in a real Docker engine's hands, which NRI does not reach."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from tests.support import cdi
from tests.support.cri import ContainerId
from tests.support.daemon import UUIDS
from tests.support.docker import Docker, DockerError
from tests.support.driver_root import make_driver_root
from tests.support.glibc import glibc_files
from tests.support.image import Entry, ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.probe import Opened, check_opens, nvidia_nodes, open_paths

pytestmark = pytest.mark.containerd

V: Final = "580.95.05"
SHARED: Final = {(195, 255), (1510, 0), (1510, 1)}  # of config/topologies/four-gpus.toml
CUDA_LIKE: Final = ImageSpec("localhost/nri-gpu/cuda-like:1", env={"NVIDIA_VISIBLE_DEVICES": "all"})
GPUS_BY_CDI: Final = (29, 2)  # the first engine that tries CDI for `--gpus`


class Node(Struct, frozen=True):
    """An engine, and the driver and files that its specification is about."""

    docker: Docker
    base: Path

    @property
    def driver(self) -> Path:
        return self.base / "driver"

    def specification(self) -> AbstractContextManager[Path]:
        return cdi.specification(self.docker.cdi, self.driver, self.base / "stage")

    def run(self, *names: str, options: tuple[str, ...] = (), image: str = CUDA_LIKE.name) -> ContainerId:
        devices = [word for name in names for word in ("--device", f"nvidia.com/gpu={name}")]
        return self.docker.run(*devices, *options, image_name=image)


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    if os.geteuid():
        pytest.fail("these tests boot a real Docker engine and need root: run them with sudo, or deselect containerd")
    with Docker() as running:
        running.load(CUDA_LIKE)
        yield running


@pytest.fixture(scope="module")
def module_node(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(docker, tmp_path_factory.mktemp("node"))
    make_driver_root(made.driver, V, "debian", compiled=True)
    with made.specification():
        yield made


@pytest.fixture
def node(module_node: Node) -> Iterator[Node]:
    yield module_node
    module_node.docker.remove_all()


@pytest.mark.parametrize("user", ["0:0", "1000:1000"])
@pytest.mark.parametrize(
    ("names", "minors"),
    [
        pytest.param(("0",), {0}, id="by index"),
        pytest.param((UUIDS[2],), {2}, id="by UUID"),
        pytest.param(("1", UUIDS[3]), {1, 3}, id="two of them"),
        pytest.param(("0", UUIDS[0]), {0}, id="one by both names"),
        pytest.param(("all",), {0, 1, 2, 3}, id="all"),
        pytest.param((), set(), id="nothing"),
    ],
)
def test_a_container_has_what_it_names_and_no_more(
    node: Node, names: tuple[str, ...], minors: set[int], user: str
) -> None:
    """Of the others it opens none, not even by nodes of its own making."""
    container = node.run(*names, options=("--user", user))
    granted = SHARED | {(195, minor) for minor in minors} if names else set()
    nodes = nvidia_nodes(node.docker, container)
    assert {*nodes.values()} == granted
    assert set(open_paths(node.docker, container, nodes).values()) <= {Opened.NO_DRIVER}
    if user == "0:0":
        check_opens(node.docker, container, granted, {(195, minor) for minor in (*range(4), 254)})
    assert not node.docker.oci(container).get("hooks")


def test_what_is_not_there_is_refused(node: Node) -> None:
    with pytest.raises(DockerError, match=r"unresolvable CDI devices nvidia\.com/gpu=9"):
        node.run("9")


def test_its_programs_environment(node: Node) -> None:
    """What is exec'd into it has the image's own: CDI reaches the first process only, so nothing may rest on it."""
    container = node.run("0")
    first = node.docker.execute(container, "sh", "-c", "tr '\\0' '\\n' < /proc/1/environ").stdout.split()
    assert "NVIDIA_VISIBLE_DEVICES=void" in first
    assert "NVIDIA_VISIBLE_DEVICES=all" not in first
    assert not [pair for pair in first if pair.startswith("LD_LIBRARY_PATH=")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="glibc has hwcaps levels on x86-64 only")
def test_the_loader_finds_it_without_environment_and_hook(node: Node, probe: dict[str, Entry]) -> None:
    smi_needs = glibc_files({"/bin/smi": node.driver / "usr/lib/nvidia/current/nvidia-smi"})
    image = ImageSpec("localhost/nri-gpu/glibc-probe:1", extra=probe | smi_needs)
    node.docker.load(image)
    container = node.run("0", image=image.name)
    done = node.docker.execute(container, "env", "-i", "/bin/probe", "libcuda.so.1", "libnvidia-ml.so.1")
    assert done.stdout.count("/glibc-hwcaps/x86-64-v2/lib") == 2
    smi = node.docker.execute(container, "nvidia-smi")
    assert smi.stdout.startswith(f"nvidia-smi: SIMULATION of driver {V}")


def test_a_restart_takes_the_new_driver(node: Node, tmp_path: Path) -> None:
    container = node.run("0", options=("--stop-timeout", "0"))
    make_driver_root(tmp_path / "driver", "590.1.2")
    kept = (node.docker.cdi / "nri-gpu.json").read_text()
    listing = ("ls", LIBRARIES)
    with Node(node.docker, tmp_path).specification():
        assert f"libcuda.so.{V}" in node.docker.execute(container, *listing).stdout.split(), "it keeps what it has"
        node.docker("restart", container)
        assert "libcuda.so.590.1.2" in node.docker.execute(container, *listing).stdout.split()
    (node.docker.cdi / "nri-gpu.json").write_text(kept)


@pytest.mark.parametrize(
    ("value", "minors"),
    [("all", {0, 1, 2, 3}), ("2", {0, 1}), ('"device=0,3"', {0, 3}), (f"device={UUIDS[1]}", {1})],
)
def test_the_gpus_option(node: Node, value: str, minors: set[int]) -> None:
    """By CDI on engines that try it; older ones only know NVIDIA's hook, and say so where there is none."""
    # Newer engines look for this program before they do, and never run it: our specification names no hook.
    (node.docker.bin / "nvidia-cdi-hook").write_text("#!/bin/sh\nexit 1\n")
    (node.docker.bin / "nvidia-cdi-hook").chmod(0o755)
    if node.docker.version() < GPUS_BY_CDI:
        with pytest.raises(DockerError, match="could not select device driver"):
            node.run(options=("--gpus", value))
        return
    found = nvidia_nodes(node.docker, node.run(options=("--gpus", value)))
    assert {*found.values()} == SHARED | {(195, minor) for minor in minors}
