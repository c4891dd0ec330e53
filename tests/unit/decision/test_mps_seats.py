"""Mode mps, by whole decisions: who gets a seat at which daemon, what comes with it, and why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from nri_gpu.decision.mps_seats import start_fault
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Inject
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.mps import MpsFolders, Seat
from nri_gpu.domain.node import Node
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.mps.mps_folders import mount_fault
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from tests.support import builders as make
from tests.support.ledgers import decided
from tests.unit.decision.deciding import NODE, injected, played, reason_of

ONE = make.node(make.gpus(1))
OLD = make.node([make.gpu(0, arch=(6, 1))])
CUT = make.node([make.mig_gpu(0)])


def policy(**mps: object) -> Policy:
    return parse_policy({"mps": {"enabled": True, **mps}}, "/etc/p.toml")


def asks(claim: str, pod: str = "a", **fields: Any) -> Container:  # noqa: ANN401
    return make.container(claim, of=pod, **fields)


def test_a_seat_brings_the_daemons_folders_and_the_limits() -> None:
    decision = injected(asks("device=1;mode=mps;sharing=memory:10Gi,threads:50"), policy=policy())
    folder = f"/run/nri-gpu/mps/clients/{make.uuid(1)}.0"
    assert (decision.grant.mode, decision.grant.seat) == (Mode.MPS, Seat(10240, 50, folder=folder))
    for place, source, right in (("/tmp/nvidia-mps", f"{folder}/pipe", "ro"), ("/dev/shm", f"{folder}/shm", "rw")):
        mount = decision.edits.mounts[place]
        assert mount.source == source
        assert {right, "nosuid", "nodev", "noexec"} <= set(mount.options)
    assert {name: value for name, value in decision.edits.env.items() if name.startswith("CUDA_")} == {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=10240M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
    }


def test_policy_fills_in_and_caps() -> None:
    using = policy(default_memory_mib=4096, most_memory_mib=2048, default_threads_percent=80, most_threads_percent=30)
    decision = injected(asks("1;mode=mps"), policy=using)
    assert decision.grant.seat == Seat(2048, 30, folder=NODE.mps.folder(decision.grant.uuids[0]))


def test_each_start_of_a_daemon_has_its_own_folder() -> None:
    later = replace(NODE, mps=MpsFolders("/m", "a", {make.uuid(0): "b"}))
    for claim, folder in ((MPS, f"/m/{make.uuid(0)}.b"), ("device=1;mode=mps", f"/m/{make.uuid(1)}.a")):
        decision = injected(asks(claim), later, policy=policy())
        assert decision.edits.mounts["/dev/shm"].source == f"{folder}/shm"


def test_a_gpu_without_its_folder_is_left_for_another_one() -> None:
    assert injected(asks("1;mode=mps"), UNMADE, policy=policy()).grant.uuids == (make.uuid(1),)


MPS = "device=0;mode=mps"
DARK = make.node([make.gpu(0, memory_bytes=None)])


def test_a_gpu_whose_memory_is_unknown_is_shared_without_a_share_of_it() -> None:
    assert injected(asks(MPS), DARK, policy=policy()).grant.uuids == (make.uuid(0),)
    beside = make.node([make.gpu(0, memory_bytes=None), make.gpu(1)])
    assert injected(asks("1;mode=mps;sharing=memory:1Gi"), beside, policy=policy()).grant.uuids == (make.uuid(1),)


class Refused(NamedTuple):
    """The last of a row. node: with one GPU, where all of the row meet."""

    row: list[Container]
    code: Code
    words: str
    using: Policy = policy()
    node: Node = ONE


SHM = asks(MPS, mounts=frozenset({"/dev/shm"}))
UNBOUND = replace(NODE, mps=MpsFolders(fault=mount_fault(Path("/run/nri-gpu/mps/clients"))))
UNMADE = replace(NODE, mps=MpsFolders(unmade={make.uuid(0): "No space left on device"}))
BOUND = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"}
USERS = [asks(MPS, uid=1000), asks("1;mode=mps", "b", uid=1001)]
MEMORY = [asks("1;mode=mps;sharing=memory:30Gi"), asks("1;mode=mps;sharing=memory:11Gi", "b")]
REFUSED = {
    "switched off": Refused([asks(MPS)], Code.NOT_ALLOWED, "set mps.enabled = true", Policy()),
    "nothing bounds what they write": Refused(
        [asks(MPS)],
        Code.NODE_NOT_READY,
        "no file system of its own is mounted at /run/nri-gpu/mps/clients, where containers in mode=mps write",
        node=UNBOUND,
    ),
    "no folder to meet it in": Refused(
        [asks(MPS)],
        Code.NODE_NOT_READY,
        "has no folder for its next MPS daemon (No space left on device): make room",
        node=UNMADE,
    ),
    "two gpus": Refused([asks("2;mode=mps")], Code.BAD_REQUEST, "gives a container one GPU", node=NODE),
    "mig": Refused(
        [asks("device=0:0;mode=mps")],
        Code.GPU_UNAVAILABLE,
        "cannot be shared by MPS here",
        node=make.node([make.mig_gpu(0)]),
    ),
    "shared is there": Refused(
        [asks("1;mode=shared"), asks("1;mode=mps", "b")], Code.GPU_BUSY, "set the same mode on both"
    ),
    "even of its own pod": Refused([asks(MPS), asks("device=0", name="side")], Code.GPU_BUSY, "in mps mode by ml/a"),
    "memory together": Refused(
        MEMORY,
        Code.OVER_LIMIT,
        "has 40960 Mi of memory, of which 30720 Mi are shares of other containers already, and 11264 Mi are asked for",
    ),
    "memory is unknown": Refused(
        [asks("1;mode=mps;sharing=memory:1Gi")],
        Code.NO_SUCH_GPU,
        "cannot be shared by memory, since its memory is unknown: ask without sharing=memory",
        node=DARK,
    ),
    "clients": Refused(
        [asks(MPS), asks("1;mode=mps", "b")],
        Code.OVER_LIMIT,
        "has 1 MPS clients, the most allowed",
        policy(containers_per_gpu=1),
    ),
    "clients of an old gpu": Refused(
        [asks(MPS, f"p{number}") for number in range(17)],
        Code.OVER_LIMIT,
        "has 16 MPS clients",
        node=OLD,
    ),
    "another user": Refused(USERS, Code.GPU_BUSY, "serves user id 1000 now, and this container runs as 1001"),
    "more than anybody may have": Refused(
        [asks("1;mode=mps;sharing=memory:2Gi")],
        Code.NOT_ALLOWED,
        "is more than the 1024 Mi of mps.most_memory_mib in /etc/p.toml",
        policy(most_memory_mib=1024),
    ),
    "more threads than anybody may have": Refused(
        [asks("1;mode=mps;sharing=threads:50")],
        Code.NOT_ALLOWED,
        "mps.most_threads_percent",
        policy(most_threads_percent=20),
    ),
    "a volume for memory": Refused([SHM], Code.VOLUME_IN_THE_WAY, "mounts the daemon's own /dev/shm"),
    "a variable of its own": Refused(
        [asks(MPS, env=BOUND)],
        Code.BAD_REQUEST,
        "sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, which the image or the pod sets too",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case: Refused) -> None:
    *before, last = played(case.row, case.using, case.node)
    assert all(isinstance(decision, Inject) for decision in before)
    assert case.words in reason_of(last, case.code).sentence


def test_a_gpu_that_has_no_seat_left_is_passed_over() -> None:
    row = [asks("device=0;mode=mps;sharing=memory:40Gi"), asks("1;mode=mps;sharing=memory:1Gi", "b")]
    _, second = played(row, policy(), make.node(make.gpus(2)))
    assert isinstance(second, Inject)
    assert second.grant.uuids == (make.uuid(1),)


def test_a_second_user_is_found_at_the_start_where_nobody_told_before() -> None:
    ledger = Ledger()
    for decision in played([asks(MPS, uid=1000), asks(MPS, "b")], policy(), ONE):
        ledger = decided(ledger, decision, 0.0)
    second = ledger.entries[asks(MPS, "b").id].grant
    assert start_fault(second, 1000, ledger, ONE.inventory) is None
    fault = start_fault(second, 1001, ledger, ONE.inventory)
    assert fault is not None
    assert fault.code is Code.GPU_BUSY
