"""The CDI specification in the hands of Debian's Podmans, each with runc and with crun, which NRI does not reach."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.support import cdi
from tests.support.cri import ContainerId
from tests.support.driver_root import make_driver_root
from tests.support.errors import HarnessError
from tests.support.image import Entry, ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.podman import Podman
from tests.support.probe import Opened, nvidia_nodes, open_numbers

pytestmark = pytest.mark.containerd

V: Final = "580.95.05"
SHARED: Final = {(195, 255), (1510, 0), (1510, 1)}  # of config/topologies/four-gpus.toml
OWN, LATER = "", "trixie"  # suites: this Debian's own (4.3 on Debian 12), and 5.4


@contextmanager
def serving(runtime: str, suite: str, folder: Path, image: ImageSpec) -> Iterator[Podman]:
    """A Podman that has this image, and a specification of four GPUs."""
    if os.geteuid():
        pytest.fail("Podman as root is tried, which needs root: run this with sudo, or deselect containerd")
    driver = make_driver_root(folder / "driver", V, "debian", compiled=True)
    with Podman(runtime, suite) as podman, cdi.specification(podman.cdi, driver, folder / "stage"):
        assert suite == OWN or "version 5.4." in podman("--version")
        podman.load(image)
        yield podman


@pytest.mark.parametrize("suite", [OWN, LATER], ids=["own", LATER])
@pytest.mark.parametrize("program", ["runc", "crun"])
def test_a_container_has_what_it_names_and_no_more(
    program: str, suite: str, tmp_path: Path, probe: dict[str, Entry]
) -> None:
    """Its nodes, what the kernel lets it open, its libraries as a loader finds them, and its environment."""
    image = ImageSpec("localhost/nri-gpu/cuda-like:1", env={"NVIDIA_VISIBLE_DEVICES": "all"}, extra=probe)
    with serving(program, suite, tmp_path, image) as podman:

        def run(*names: str) -> ContainerId:
            devices = (f"--device=nvidia.com/gpu={name}" for name in names)
            return podman.run("--cap-add=MKNOD", *devices, image_name=image.name)  # Podman 5 gives no such right

        given = {run("2"): {2}, run("0", "3"): {0, 3}, run("all"): {0, 1, 2, 3}, run(): set()}
        for container, minors in given.items():
            granted = SHARED | {(195, minor) for minor in minors} if minors else set()
            assert {*nvidia_nodes(podman, container).values()} == granted
            opened = open_numbers(podman, container, SHARED | {(195, minor) for minor in range(5)})
            assert {number for number, answer in opened.items() if answer is not Opened.DENIED} == granted
            assert podman.inspect(container)["OCIRuntime"] == program
        one, plain = next(iter(given)), list(given)[-1]
        assert f"libcuda.so.{V}" in podman.execute(one, "ls", LIBRARIES).stdout.split()
        assert podman.execute(plain, "ls", LIBRARIES).code
        first = podman.execute(one, "sh", "-c", "tr '\\0' '\\n' < /proc/1/environ").stdout.split()
        assert "NVIDIA_VISIBLE_DEVICES=void" in first
        if platform.machine() == "x86_64":  # glibc has hwcaps levels there only
            said = podman.execute(one, "env", "-i", "/bin/probe", "libcuda.so.1", "libnvidia-ml.so.1").stdout
            assert said.count("/glibc-hwcaps/x86-64-v2/lib") == 2
        with pytest.raises(HarnessError, match=r"unresolvable CDI devices nvidia\.com/gpu=9"):
            run("9")
