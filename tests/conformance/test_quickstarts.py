"""The command blocks of docs/quickstart, run as a reader copies them, and what they print held against the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Final

import pytest
import yaml

from tests.support import pages
from tests.support.containerd import Containerd
from tests.support.daemon import ENVIRONMENT, FOUR_GPUS
from tests.support.docker import Docker
from tests.support.driver_root import make_driver_root
from tests.support.helm import Helm
from tests.support.image import ImageSpec
from tests.support.marks import on_newest
from tests.support.own_image import own_image
from tests.support.own_root import OwnRoot
from tests.support.waiting import wait_for

ROOT: Final = pages.FOLDER.parents[1]
PROGRAMS: Final = Path("/usr/local/bin")
CDI: Final = Path("/var/run/cdi")
# The engine of the tests has no network, which each container has to say.
DOCKER: Final = """\
#!/bin/sh
[ "$1" = run ] && shift && set -- run --network none "$@"
exec {docker} "$@"
"""


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
def test_k3s(node: Containerd, tmp_path: Path) -> None:
    """With K3s's programs stood in for: the image that the page brings in is the one that the chart asks for."""
    helm = Helm("helm4", tmp_path)
    rendered = tmp_path / "rendered.yaml"
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    programs = {
        "make": f'[ "$*" = image ] && mkdir dist && cp {own_image()} dist',
        "k3s": f'[ "$1" = ctr ] && exec {node.runtime.ctr} --address {node.cri_socket} "${{@:2}}"',
        "kubectl": f'{quote(sys.executable)} -m tests.support.kubectl_check "$@"',
        "helm": f'[ "$1" = install ] && {helm.path} template --skip-tests {helm.kube_version} "${{@:2}}" | '
        f"tee {rendered} | kubectl apply -f -",
    }
    environment = {**helm.environment, "PYTHONPATH": str(ROOT)}
    pages.follow(pages.FOLDER / "k3s.md", pages.shell(tmp_path, programs, environment))
    daemons = [each for each in yaml.safe_load_all(rendered.read_text()) if each and each["kind"] == "DaemonSet"]
    assert {each["metadata"]["name"] for each in daemons} == {"nri-gpu", "nri-gpu-guard"}
    for container in (each for daemon in daemons for each in daemon["spec"]["template"]["spec"]["containers"]):
        assert container["imagePullPolicy"] == "IfNotPresent"
        wait_for(container["image"], lambda name=container["image"]: node.cri.has_image(name), 30.0)  # type: ignore[misc]


@pytest.mark.parametrize("page", sorted(pages.FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_what_is_not_run_is_little(page: Path) -> None:
    """Most of a page is commands that a test runs."""
    found = pages.blocks(page)
    assert len([each for each in found if not each.not_run]) >= len(found) / 2


def _program(module: str, options: str = "") -> str:
    """A program of this tree's. options: behind those that it is given."""
    path, python = (quote(each) for each in (ENVIRONMENT["PYTHONPATH"], sys.executable))
    return f'#!/bin/sh\nPYTHONPATH={path} exec {python} -m {module} "$@" {options}\n'
