"""Who was given what by real runtimes, as an observer concludes it, and what `verify` says of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.daemon.answers import ObserverStatus
from nri_gpu.domain.node import Majors
from nri_gpu.health.gpu_record import Moment
from nri_gpu.observe.allocation_report import allocation_report
from nri_gpu.observe.given import Given
from nri_gpu.observe.looker import look_at_node
from nri_gpu.observe.looks import NodeLook
from nri_gpu.observe.observed import Memory, observed_after
from nri_gpu.policy.model import Policy
from nri_gpu.verify.container_report import Verdict
from tests.support import builders as make
from tests.support import cdi
from tests.support.docker import Docker
from tests.support.driver_root import make_driver_root
from tests.support.podman import Podman

pytestmark = pytest.mark.containerd

# The GPUs of config/topologies/four-gpus.toml, by their nodes.
NODE: Final = make.inventory(
    [make.gpu(index, minor_number=index) for index in range(4)],
    majors=Majors(nvidia=195, nvidia_uvm=1510),
    driver_version="580.95.05",
)


def look(root: Path) -> NodeLook:
    return asyncio.run(look_at_node(NODE, root=root))


def check(seen: NodeLook, names: dict[str, str], agent: str) -> None:
    """Three containers were given a GPU each by CDI, the privileged one none, and nothing is amiss."""
    found = observed_after(Memory(), seen, Given(), NODE, Policy(), Moment(time.monotonic(), time.time()))
    assert [each.message for each in found.findings if each.pod or each.container] == []
    assert {each.container_id: (each.gpu_uuid, each.container, each.by) for each in found.allocations} == {
        id_: (make.uuid(index), name, "CDI") for index, (id_, name) in enumerate(names.items())
    }
    report = allocation_report(seen, ObserverStatus(looked_s=time.time(), allocations=found.allocations), NODE)
    verdicts = {each.id: each.verdict for each in report.containers}
    assert verdicts == {**dict.fromkeys(names, Verdict.ALLOCATED), agent: Verdict.PRIVILEGED}


@contextmanager
def host_of(docker: Docker, folder: Path) -> Iterator[Path]:
    """A root folder whose usual places are Docker's own, which has mounts of its own."""
    for usual, own in (("run/docker", docker.base / "exec"), ("var/lib/docker", docker.layout.root)):
        (folder / usual).parent.mkdir(parents=True)
        (folder / usual).symlink_to(f"/proc/{docker.supervisor_pid}/root{own}")
    yield folder


def test_docker(tmp_path: Path) -> None:
    driver = make_driver_root(tmp_path / "driver")
    with (
        Docker() as docker,
        cdi.specification(docker.cdi, driver, tmp_path / "stage"),
        host_of(docker, tmp_path / "host") as root,
    ):
        docker.load()
        names = {
            str(docker.run("--name", f"job{index}", "--device", f"nvidia.com/gpu={index}")): f"job{index}"
            for index in range(3)
        }
        agent = docker.run("--privileged")
        check(look(root), names, agent)


def test_podman(tmp_path: Path) -> None:
    driver = make_driver_root(tmp_path / "driver")
    with Podman() as podman, cdi.specification(podman.cdi, driver, tmp_path / "stage"):
        podman.load()
        ids = [podman.run("--device", f"nvidia.com/gpu={index}") for index in range(3)]
        agent = podman.run("--privileged")
        check(look(podman.base), {id_: id_[:12] for id_ in ids}, agent)


def test_podman_names_no_pod() -> None:
    """A container that claims to be CRI-O's, of a pod that may use all GPUs, is Podman's."""
    claims = {
        "io.container.manager": "cri-o",
        "io.kubernetes.pod.namespace": "gpu-operator",
        "io.kubernetes.pod.name": "nvidia-dcgm-exporter-x",
    }
    with Podman() as podman:
        podman.load()
        words = (f"--annotation={key}={value}" for key, value in claims.items())
        id_ = podman.run("--privileged", *words)
        [seen] = look(podman.base).containers
    assert (str(seen.id), seen.runtime, seen.namespace, seen.pod) == (str(id_), "Podman", "", "")
