"""Uses against the ledger: who is a finding, of which kind, what it says, and whether it may be stopped."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.ledger import Entry, Ledger
from nri_gpu.ledger.opened import live
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.stray_settings import StraySettings
from nri_gpu.stray.judge import Kind, Known, StrayUse, container_of, judge
from nri_gpu.stray.uses import Use
from tests.support import builders as make
from tests.unit.stray.known import CTL, ID, INVENTORY, OTHER_ID, TRAIN, UVM, capability, listed, number, use


def known(*entries: Entry, **fields: Any) -> Known:  # noqa: ANN401 - of a Known
    ledger = {"entries": {each.grant.container_id: each for each in entries}, "containers": listed()}
    return Known(**{"inventory": INVENTORY, **ledger, **fields})


def found(uses: list[Use], knowing: Known, *exceptions: str) -> list[StrayUse]:
    return list(judge(uses, knowing, Globs(exceptions)))


def granted(*uuids: GpuUuid) -> Entry:
    return make.entry_of(*uuids, to=TRAIN)


# --- containers -------------------------------------------------------------------------------------------------------

INNOCENT = {
    "what was granted": ([number(0), CTL, UVM], known(granted(make.uuid(0)))),
    "a MIG device through its GPU": ([number(2), capability(1)], known(granted(make.mig_uuid(2, 1)))),
    "what the kubelet allocated": (
        [number(1), CTL],
        known(allocated={("ml", "train"): frozenset({make.uuid(1)})}),
    ),
    "a MIG device that the kubelet allocated": (
        [number(2), capability(0)],
        known(allocated={("ml", "train"): frozenset({make.mig_uuid(2, 0)})}),
    ),
    "what another component gave it": (
        [number(1)],
        known(live={ID: live(replace(TRAIN, devices=(make.held_node(INVENTORY.gpus[1]),)))}),
    ),
    "beside its grant, what another component gave it": (
        [number(0), number(1)],
        known(
            granted(make.uuid(0)),
            live={ID: live(replace(TRAIN, devices=(make.held_node(INVENTORY.gpus[1]),)))},
        ),
    ),
}


@pytest.mark.parametrize(("numbers", "knowing"), INNOCENT.values(), ids=INNOCENT.keys())
def test_no_finding(numbers: list[DeviceNumber], knowing: Known) -> None:
    assert found([use(*numbers)], knowing) == []


GUILTY = {
    "it was granted no GPU": ([number(1), CTL], known(), Kind.UNGRANTED, [1], True),
    "not even the driver's control node": ([CTL], known(), Kind.UNGRANTED, [], False),
    "it was granted another GPU": ([number(0), number(1)], known(granted(make.uuid(0))), Kind.OTHER_GPU, [1], True),
    "it asked for none": ([number(1), CTL], known(granted()), Kind.OTHER_GPU, [1], True),
    "the kubelet allocated another": (
        [number(1)],
        known(allocated={("ml", "train"): frozenset({make.uuid(0)})}),
        Kind.OTHER_GPU,
        [1],
        True,
    ),
    "it is privileged": ([number(1)], known(containers=listed(privileged=True)), Kind.PRIVILEGED, [1], False),
    "another container of its pod is": (
        [number(1)],
        known(containers=listed() | listed(replace(TRAIN, id=OTHER_ID, name="side"), privileged=True)),
        Kind.PRIVILEGED,
        [1],
        False,
    ),
    "the runtime has not listed it": ([number(1)], known(containers={}), Kind.UNKNOWN, [1], False),
    "its pod is not listed": (
        [number(1)],
        known(containers=listed(replace(TRAIN, pod=make.pod("?", namespace="?")))),
        Kind.UNGRANTED,
        [1],
        False,
    ),
    "granted, and not listed": ([number(1)], known(granted(make.uuid(0)), containers={}), Kind.OTHER_GPU, [1], False),
}


@pytest.mark.parametrize(("numbers", "knowing", "kind", "gpus", "stoppable"), GUILTY.values(), ids=GUILTY.keys())
def test_a_finding(numbers: list[DeviceNumber], knowing: Known, kind: Kind, gpus: list[int], stoppable: bool) -> None:
    (said,) = found([use(*numbers)], knowing)
    assert (said.kind, said.gpu_uuids, said.stoppable) == (kind, tuple(map(make.uuid, gpus)), stoppable)
    assert (said.container_id, said.processes[0].pid, said.processes[0].started) == (ID, 7, 700)
    name = "ml/train, container main" if said.pod else f"container {ID} (cgroup /kubepods/pod1/{ID})"
    assert said.message.startswith(f"{name} (pid 7 /bin/train) has /dev/nvidia")
    assert bool(said.pod) is (
        kind is not Kind.UNKNOWN and "?" not in {each.pod for each in knowing.containers.values()}
    )


def test_another_mig_device_is_another_gpu() -> None:
    (said,) = found([use(number(2), capability(0))], known(granted(make.mig_uuid(2, 1))))
    assert (said.gpu_uuids, said.nodes) == (
        (make.mig_uuid(2, 0),),
        (f"/dev/nvidia-caps/nvidia-cap{capability(0)[1]}",),
    )


def test_a_container_is_one_finding_with_all_its_processes() -> None:
    uses = [use(number(1), pid=pid) for pid in range(10, 16)]
    (said,) = found([*uses, use(number(0), pid=20)], known(granted(make.uuid(0))))
    assert [each.pid for each in said.processes] == [*range(10, 16)]
    assert "pid 13 /bin/train and 2 more) has /dev/nvidia6 open" in said.message


def test_containers_that_come_or_go_during_a_look_are_known() -> None:
    before = (Ledger({ID: granted(make.uuid(0))}), listed())
    for known_then in (Known.of(INVENTORY, before, (Ledger(), {})), Known.of(INVENTORY, (Ledger(), {}), before)):
        assert found([use(number(0))], known_then) == []


# --- the host's processes, and exceptions -----------------------------------------------------------------------------


def test_a_process_of_the_host_is_named_by_what_it_runs() -> None:
    uses = [use(number(0), CTL, cgroup="/user.slice", program="/home/me/a b\n"), use(UVM, cgroup="/", pid=8)]
    one, other = found(uses, known())
    assert (one.kind, one.cgroup, one.stoppable) == (Kind.HOST, "/user.slice", False)
    assert one.message.startswith("host process pid 7 /home/me/a b\\n has /dev/nvidia7, /dev/nvidiactl open: ")
    assert other.message.startswith("host process pid 8 /bin/train has /dev/nvidia-uvm open: ")


EXCEPTIONS = {
    "a pod": (use(number(0)), "ml/tr*"),
    "a program of the host": (use(number(0), cgroup="/a.slice"), "/bin/train"),
    "a service of the host": (use(number(0), cgroup="/system.slice/dcgm.service"), "/system.slice/dcgm.*"),
    "another runtime's container": (use(number(0), cgroup=f"/docker/{OTHER_ID}"), "/docker/*"),
}


@pytest.mark.parametrize(("each", "pattern"), EXCEPTIONS.values(), ids=EXCEPTIONS.keys())
def test_an_exception_is_no_finding(each: Use, pattern: str) -> None:
    assert len(found([each], known(), "other/*", "/bin/other")) == 1
    assert found([each], known(), pattern) == []


def test_a_container_is_not_excepted_by_what_it_calls_its_program() -> None:
    daemon = StraySettings().exceptions.patterns[0]
    assert found([use(number(0), cgroup="/a.slice", program=daemon)], known(), daemon) == []
    assert len(found([use(number(0), program=daemon)], known(), daemon)) == 1


# --- from cgroup to container -----------------------------------------------------------------------------------------

CGROUPS = {
    "containerd, cgroupfs": f"/kubepods/burstable/pod0f3a/{ID}",
    "containerd, systemd": f"/kubepods.slice/kubepods-pod0f3a.slice/cri-containerd-{ID}.scope",
    "containerd, systemd's names on cgroupfs": f"/system.slice/kubepods-burstable-pod0f3a.slice:cri-containerd:{ID}",
    "CRI-O, cgroupfs": f"/kubepods/besteffort/pod0f3a/crio-{ID}",
    "CRI-O, systemd": f"/kubepods.slice/kubepods-pod0f3a.slice/crio-{ID}.scope",
    "CRI-O with a container cgroup below": f"/kubepods.slice/kubepods-pod0f3a.slice/crio-{ID}.scope/container",
    "Docker, cgroupfs": f"/docker/{ID}",
    "Docker, systemd": f"/system.slice/docker-{ID}.scope",
    "systemd inside a container": f"/kubepods.slice/cri-containerd-{ID}.scope/system.slice/train.service",
    "seen from a pod's own cgroup namespace": f"/../../kubepods-podaa.slice/cri-containerd-{ID}.scope",
}


@pytest.mark.parametrize("cgroup", CGROUPS.values(), ids=CGROUPS.keys())
def test_the_container_of_a_cgroup(cgroup: str) -> None:
    assert container_of(("/", "/init.scope", cgroup), known(containers={})) == ID


@pytest.mark.parametrize(
    "cgroup",
    [
        "/",
        "/user.slice/user-0.slice/session-1.scope",
        f"/kubepods.slice/crio-conmon-{ID}.scope",
        f"/system.slice/{ID}.service",
        f"/{ID[:-1]}",
    ],
)
def test_what_is_no_container(cgroup: str) -> None:
    assert container_of((cgroup,), known()) is None


def test_a_cgroup_below_a_container_names_no_other_one() -> None:
    """Who may make cgroups below its own may call them after a container that holds a GPU."""
    cgroup = f"/kubepods/pod1/{OTHER_ID}/{ID}"
    victim = known(granted(make.uuid(0)))
    attacker = listed(make.container(of="attacker", id=OTHER_ID))
    assert container_of((cgroup,), replace(victim, containers={**victim.containers, **attacker})) == OTHER_ID
    assert container_of((cgroup,), victim) == ID  # of a node inside a container: that is of no runtime known here


def test_a_user_of_the_host_is_no_container_that_is_known() -> None:
    """Systemd lets users make cgroups of their own, which they may call after a container."""
    users = "/user.slice/user-1000.slice/user@1000.service"
    (said,) = found([use(number(1), cgroup=f"{users}/kubepods/{ID}")], known())
    assert (said.kind, said.container_id, said.stoppable) == (Kind.HOST, "", False)
    assert container_of((f"{users}/user.slice/libpod-{OTHER_ID}.scope/container",), known()) == OTHER_ID
    assert container_of((f"/kubepods/pod1/{ID}{users}/{OTHER_ID}",), known()) == ID  # systemd inside a container
