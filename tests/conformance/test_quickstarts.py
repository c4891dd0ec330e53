"""The command blocks of docs/quickstart, run as a reader copies them, and what they print held against the page."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Final

import pytest

from tests import ground
from tests.packages.conftest import Debs, debs, laid_out
from tests.support import cleanup, packages, pages
from tests.support.containerd import Containerd
from tests.support.daemon import ENVIRONMENT, FOUR_GPUS
from tests.support.docker import Docker
from tests.support.driver_root import make_driver_root
from tests.support.image import ImageSpec
from tests.support.marks import on_newest
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


# The daemon and the guard as their units start them, with four simulated GPUs and a made-up driver.
STARTED: Final = """\
for unit in nri-gpu nri-gpu-guard; do
    command=$(sed -n 's/^ExecStart=//p' /usr/lib/systemd/system/$unit.service)
    set -- $command
    if [ $unit = nri-gpu ]; then set -- "$@" --gpus {gpus} --socket /var/run/nri/nri.sock --driver-root {driver}; fi
    setpriv --pdeathsig KILL "$@" >/var/log/$unit.log 2>&1 &
done
trap 'kill $(jobs -p); wait' EXIT
log=/var/log/nri-gpu.log
timeout 30 sh -c "until grep -q 'driver files staged' $log; do sleep 0.1; done" || cat $log
"""


@pytest.fixture
def root(runtime: packages.Runtime) -> Iterator[OwnRoot]:
    """A machine as the page wants it: containerd and crictl."""
    kept = bool(cleanup.cgroups_named(CGROUPS))
    crictl = ground.need("crictl") / "crictl"
    node = Containerd(runtime)
    try:
        made = OwnRoot.of(node)
        made.write_program(PROGRAMS / "crictl", f'#!/bin/sh\nexec {crictl} "$@"\n')
        with node:
            node.import_image(DEBIAN)
            yield made
    finally:
        if not kept:
            cleanup.remove_cgroups(CGROUPS)


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


@on_newest
def test_one_machine(root: OwnRoot, debs: Debs, tmp_path: Path) -> None:
    for package in debs.files():
        shutil.copy(package, tmp_path)
    started = STARTED.format(gpus=quote(str(FOUR_GPUS)), driver=make_driver_root(tmp_path / "driver"))
    pages.follow(
        pages.FOLDER / "one-machine.md",
        lambda script: root.run(f"cd {tmp_path}\n{script}").stdout,
        systemd=started,
    )


@pytest.mark.parametrize("page", sorted(pages.FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_what_is_not_run_is_little(page: Path) -> None:
    """Most of a page is commands that a test runs."""
    found = pages.blocks(page)
    assert len([each for each in found if not each.not_run]) >= len(found) / 2


def _program(module: str, options: str = "") -> str:
    """A program of this tree's. options: behind those that it is given."""
    path, python = (quote(each) for each in (ENVIRONMENT["PYTHONPATH"], sys.executable))
    return f'#!/bin/sh\nPYTHONPATH={path} exec {python} -m {module} "$@" {options}\n'
