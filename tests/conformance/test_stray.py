"""Who uses GPUs that nobody granted, on a real containerd: each is named, and exactly those.

The simulated GPUs have numbers that a driver of this machine serves, so that they can be held open.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.conformance.conftest import launch_on
from tests.conformance.test_verify import bpftool
from tests.support.cgroup import Cgroup, device_programs
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import FOUR_GPUS, UUIDS, NriGpu, staged
from tests.support.holding import cgroup_of, holding, into, path_in_proc
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Number
from tests.support.waiting import wait_for

pytestmark = on_newest

MAJOR: Final = 10  # misc
FUSE, LOOP_CONTROL = 229, 237  # its minors; opening them does nothing
GRANTED, OTHER = (MAJOR, FUSE), (MAJOR, LOOP_CONTROL)  # GPUs 0 and 1
TOPOLOGY: Final = (
    FOUR_GPUS.read_text()
    .replace("nvidia = 195", f"nvidia = {MAJOR}")
    .replace("minor = 0 ", f"minor = {FUSE} ")
    .replace("minor = 1\n", f"minor = {LOOP_CONTROL}\n")
)
HOLDS: Final = "mknod /tmp/n c {} {}; until (: </tmp/n) 2>/dev/null; do sleep 0.05; done; exec sleep 3600 </tmp/n"
FOUND: Final = "stray GPU use namespace=default pod_name="


@contextmanager
def auditing(node: Containerd, base: Path, **stray: object) -> Iterator[NriGpu]:
    """A daemon that looks each second."""
    settings = {"enabled": True, "every_s": 1, **stray}
    policy = ["[stray]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    policy += [f'[guard]\ncri_socket = "{node.cri_socket}"\nstop_grace_s = 0']
    policy += [f'[kubelet]\npodresources = "{base}/pod-resources/kubelet.sock"\n']
    topology = base / "node.toml"
    topology.write_text(TOPOLOGY)
    with staged(replace(launch_on(node, base).with_policy("\n".join(policy)), topology=topology)) as daemon:
        yield daemon


def holder(number: Number, **fields: Any) -> ContainerSpec:  # noqa: ANN401 - of a ContainerSpec
    """A container that opens a node of that number as soon as the kernel lets it."""
    return ContainerSpec(command=("/bin/sh", "-c", HOLDS.format(*number)), **fields)


def widened(node: Containerd, name: str, claim: str = "") -> ContainerId:
    """A container that has GPU 1 open, since its device rules were widened behind its runtime's back."""
    container = node.cri.run(node.cri.asking(claim, name), holder(OTHER))
    cgroup = node.container_cgroup(container)
    if node.cgroup is Cgroup.V1:
        (cgroup / "devices.allow").write_text("c {}:{} rwm".format(*OTHER))
    else:
        [own] = device_programs(cgroup)
        bpftool(cgroup, "detach", own)
    return container


def privileged(node: Containerd, name: str) -> ContainerId:
    pod = node.cri.run_pod(PodSpec(name=name, privileged=True))
    return node.cri.run(pod, holder(OTHER, privileged=True))


def findings(daemon: NriGpu) -> dict[str, Any]:
    """By container id, of the host's by pid."""
    found = daemon.status()["stray"]["findings"]
    return {each["container_id"] or str(each["processes"][0]["pid"]): each for each in found}


def wait_found(daemon: NriGpu, *whose: str) -> dict[str, Any]:
    """Until these are findings; others may be."""
    wait_for("the findings", lambda: {*whose} <= findings(daemon).keys(), 20, lambda: str(daemon.status()["stray"]))
    return findings(daemon)


@pytest.mark.short
def test_each_is_named(cgroup_node: Containerd, tmp_path: Path) -> None:
    docker = token_hex(32)  # of another runtime; no other run of this test has one of its name
    with (
        auditing(cgroup_node, tmp_path) as daemon,
        holding(tmp_path, OTHER) as process,
        cgroup_of(docker) as cgroup,
        holding(tmp_path, OTHER, before=into(cgroup)),
    ):
        granted = cgroup_node.cri.run(cgroup_node.cri.asking("device=0", "granted"), holder(GRANTED))
        ungranted = widened(cgroup_node, "ungranted")
        other = widened(cgroup_node, "other", claim="device=2")
        agent = privileged(cgroup_node, "agent")
        kinds = {
            ungranted: "ungranted-container",
            other: "other-gpu",
            agent: "privileged-pod",
            docker: "unknown-container",
            str(process.pid): "host-process",
        }
        found = wait_found(daemon, *kinds)
        assert {each: found[each]["kind"] for each in kinds} == kinds
        assert granted not in found
        for each in kinds:
            assert (found[each]["gpu_uuids"], found[each]["nodes"]) == ([UUIDS[1]], [f"/dev/nvidia{LOOP_CONTROL}"])
        said = daemon.verb("status")
        # Another run of these tests may be on this machine, and its holders are findings, too.
        assert (said.returncode, said.stdout.count("stray use for ") >= len(kinds)) == (0, True)
        assert "default/ungranted, container main (pid " in said.stdout
        assert f"container {docker} (cgroup {path_in_proc(cgroup)}) (pid " in said.stdout
        cgroup_node.cri.remove(ungranted)
        wait_for("its end", lambda: ungranted not in findings(daemon), 20)
        for name in ("ungranted", "other", "agent"):
            assert daemon.log().count(f"{FOUND}{name}") == 1


def test_what_was_there_before_the_daemon_is_named_too(node: Containerd, tmp_path: Path) -> None:
    """The runtime's own list says who is privileged."""
    ungranted, agent = widened(node, "ungranted"), privileged(node, "agent")
    with auditing(node, tmp_path) as daemon:
        found = wait_found(daemon, ungranted, agent)
    assert [found[each]["kind"] for each in (ungranted, agent)] == ["ungranted-container", "privileged-pod"]
    assert [found[each]["stoppable"] for each in (ungranted, agent)] == [True, False]
