"""The command blocks of docs/quickstart, run as a reader copies them, and what they print held against the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Final

import pytest

from tests.packages.conftest import debs, laid_out
from tests.support import pages
from tests.support.daemon import ENVIRONMENT, FOUR_GPUS
from tests.support.docker import Docker
from tests.support.driver_root import make_driver_root
from tests.support.image import ImageSpec
from tests.support.own_root import OwnRoot

__all__ = ["debs", "laid_out"]  # fixtures
PROGRAMS: Final = Path("/usr/local/bin")
CDI: Final = Path("/var/run/cdi")
DEBIAN: Final = ImageSpec("docker.io/library/debian:12")
# The engine of the tests has no network, which each container has to say.
DOCKER: Final = """\
#!/bin/sh
[ "$1" = run ] && shift && set -- run --network none "$@"
exec {docker} "$@"
"""
CGROUPS: Final = "k8s.io"  # where containerd puts pods that name no cgroup


@pytest.fixture
def docker_root(tmp_path: Path) -> Iterator[OwnRoot]:
    """A machine with Docker, where `nri-gpu cdi generate` finds four simulated GPUs and a made-up driver."""
    docker = Docker()
    made = OwnRoot(docker.supervisor_pid, docker.base)
    simulated = f"--gpus {quote(str(FOUR_GPUS))} --driver-root {make_driver_root(tmp_path / 'driver')}"
    made.write_program(PROGRAMS / "nri-gpu", _program("nri_gpu", simulated))
    made.write_program(PROGRAMS / "docker", DOCKER.format(docker=docker.client))
    with docker:
        docker.load(ImageSpec("debian:12"))
        assert made.run(f"mkdir -p {CDI} && mount --bind {docker.cdi} {CDI}").returncode == 0
        yield made


def test_docker(docker_root: OwnRoot) -> None:
    pages.follow(pages.FOLDER / "docker.md", lambda script: docker_root.run(script).stdout)


@pytest.mark.parametrize("page", sorted(pages.FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_what_is_not_run_is_little(page: Path) -> None:
    """Most of a page is commands that a test runs."""
    found = pages.blocks(page)
    assert len([each for each in found if not each.not_run]) >= len(found) / 2


def _program(module: str, options: str = "") -> str:
    """A program of this tree's. options: behind those that it is given."""
    path, python = (quote(each) for each in (ENVIRONMENT["PYTHONPATH"], sys.executable))
    return f'#!/bin/sh\nPYTHONPATH={path} exec {python} -m {module} "$@" {options}\n'
