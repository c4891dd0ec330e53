"""The command blocks of docs/quickstart, run as a reader copies them, and what they print held against the page."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import cleanup, packages, pages
from tests.support.containerd import Containerd
from tests.support.daemon import ENVIRONMENT, FOUR_GPUS, Launch, NriGpu
from tests.support.docker import Docker
from tests.support.driver_root import make_driver_root
from tests.support.image import ImageSpec
from tests.support.marks import on_newest
from tests.support.own_root import NRI, OwnRoot

NRI_GPU: Final = Path("/usr/local/bin/nri-gpu")
CDI: Final = Path("/var/run/cdi")
DEBIAN: Final = ImageSpec("docker.io/library/debian:12")
# The engine of the tests has no network, which each container has to say.
DOCKER: Final = """\
#!/bin/sh
[ "$1" = run ] && shift && set -- run --network none "$@"
exec {docker} "$@"
"""
CGROUPS: Final = "k8s.io"  # where containerd puts pods that name no cgroup


class Installed(NriGpu):
    """nri-gpu on the paths of its package, with four simulated GPUs and a made-up driver."""

    def __init__(self, launch: Launch, root: OwnRoot) -> None:
        super().__init__(launch)
        self._root = root

    def program(self) -> list[str]:
        options = ("--gpus", self.launch.topology, "--driver-root", self.launch.driver_root)
        return self._root.words("nri-gpu", "run", *(str(each) for each in options))


@pytest.fixture
def root(runtime: packages.Runtime, tmp_path: Path) -> Iterator[OwnRoot]:
    """A machine as the page wants it: containerd, crictl, and nri-gpu serving."""
    kept = bool(cleanup.cgroups_named(CGROUPS))
    node = Containerd(runtime)
    try:
        made = OwnRoot.of(node)
        made.write_program(NRI_GPU, _program("nri_gpu"))
        made.write_program(NRI_GPU.with_name("crictl"), _crictl())
        with node:
            node.import_image(DEBIAN)
            launch = Launch(tmp_path / "d", NRI / "nri.sock", driver_root=make_driver_root(tmp_path / "driver"))
            with Installed(launch, made) as daemon:
                daemon.wait_staged()
                yield made
    finally:
        if not kept:
            cleanup.remove_cgroups(CGROUPS)


@pytest.fixture
def docker_root(tmp_path: Path) -> Iterator[OwnRoot]:
    """A machine with Docker, where `nri-gpu cdi generate` finds four simulated GPUs and a made-up driver."""
    docker = Docker()
    made = OwnRoot(docker.supervisor_pid, docker.base)
    simulated = f"--gpus {FOUR_GPUS} --driver-root {make_driver_root(tmp_path / 'driver')}"
    made.write_program(NRI_GPU, _program("nri_gpu", simulated))
    made.write_program(NRI_GPU.with_name("docker"), DOCKER.format(docker=docker.client))
    with docker:
        docker.load(ImageSpec("debian:12"))
        assert made.run(f"mkdir -p {CDI} && mount --bind {docker.cdi} {CDI}").returncode == 0
        yield made


def test_docker(docker_root: OwnRoot) -> None:
    pages.follow(pages.FOLDER / "docker.md", lambda script: docker_root.run(script).stdout)


@on_newest
def test_one_machine(root: OwnRoot) -> None:
    pages.follow(pages.FOLDER / "one-machine.md", lambda script: root.run(f"cd $(mktemp -d)\n{script}").stdout)


@pytest.mark.parametrize("page", sorted(pages.FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_what_is_not_run_is_little(page: Path) -> None:
    """Most of a page is commands that a test runs."""
    found = pages.blocks(page)
    assert len([each for each in found if not each.not_run]) >= len(found) / 2


def _program(module: str, options: str = "") -> str:
    """A program of this tree's. options: behind those that it is given."""
    return f'#!/bin/sh\nPYTHONPATH={ENVIRONMENT["PYTHONPATH"]} exec {sys.executable} -m {module} "$@" {options}\n'


def _crictl() -> str:
    """The real one where there is one, else what we have in its place."""
    found = os.environ.get("NRI_GPU_CRICTL") or shutil.which("crictl")
    return f'#!/bin/sh\nexec {found} "$@"\n' if found else _program("tests.support.crictl")
