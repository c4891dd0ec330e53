"""Situations of a node, and the findings and allocations that an observer makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.health.gpu_record import Moment
from nri_gpu.observe.given import Given
from nri_gpu.observe.looks import DeviceRequest, NodeLook
from nri_gpu.observe.observed import FINDINGS_MAX, Observed
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import ForeignSettings, Policy
from nri_gpu.policy.observe_settings import ObserveSettings
from nri_gpu.policy.stray_settings import StraySettings
from nri_gpu.stray.uses import CLOSED_MAX, Extent
from tests.support import builders as make
from tests.support.goldens import FIXTURES
from tests.unit.observe.seen import (
    CTL,
    INVENTORY,
    UVM,
    WALL,
    capability,
    claimed,
    container,
    docker,
    given,
    look,
    nodes,
    observed,
    opened,
    plugin,
    use,
)

GPU = [make.uuid(0), make.uuid(1), make.uuid(2)]
PART = [make.mig_uuid(2, 0), make.mig_uuid(2, 1)]
TRAIN, OTHER = opened("train", *nodes(0)), opened("other", *nodes(0))
WEB = docker("web", nodes=nodes(0), allowed=nodes(0), opens=nodes(0), cdi=("nvidia.com/gpu=0",), hooks=("nvidia-ctk",))
HOOK = ("nvidia-container-runtime-hook",)
BY_HOOK = container("image", asked="all", hooks=HOOK, opens=nodes(0, 1))
AGENT = container("agent", namespace="kube-system", privileged=True, allowed=nodes(0, 1, 2))
PLUGIN = "device plugin nvidia.com/gpu"
CARD = claimed("eth1", driver="dra.net")


class Situation(Struct, frozen=True):
    """A look and the kubelet's list; words: of the finding's message."""

    look: NodeLook
    given: Given = Given()
    words: tuple[str, ...] = ()
    inventory: Inventory = INVENTORY
    xids: dict[GpuUuid, list[tuple[int, float]]] = {}

    def seen(self, policy: Policy | None = None) -> Observed:
        return observed(self.look, self.given, inventory=self.inventory, xids=self.xids, policy=policy)


FOUND: Final = {
    "opened, and given nothing": (
        FindingKind.NOT_GIVEN,
        Situation(
            look(container("thief"), use(container("thief"), (195, 7))),
            words=("ml/thief, container main (pid 7 /bin/train) has /dev/nvidia7 open", "no GPU", "list ml/thief in"),
        ),
    ),
    "opened, and given a network card": (
        FindingKind.NOT_GIVEN,
        Situation(
            look(container("thief"), use(container("thief"), (195, 7))),
            given((container("thief"), [CARD])),
            ("was given no GPU",),
        ),
    ),
    "opened, and given another": (
        FindingKind.NOT_GIVEN,
        Situation(
            look(TRAIN, use(TRAIN, *nodes(0, 1))), given((TRAIN, plugin(GPU[0]))), ("/dev/nvidia6 open", "other GPUs")
        ),
    ),
    "opened by a program of the host": (
        FindingKind.NOT_GIVEN,
        Situation(
            look(*(use("/system.slice/miner.service", (195, 7), pid=pid, program="/opt/\x1bminer") for pid in (8, 9))),
            words=(r"host process pid 8 /opt/\x1bminer, pid 9", "/dev/nvidia7"),
        ),
    ),
    "opened in a container of an unseen runtime": (
        FindingKind.NOT_GIVEN,
        Situation(
            look(use(f"/system.slice/crio-{'ab' * 32}.scope", (195, 7))),
            words=("container abababababab", "runtime", "passed it an open node"),
        ),
    ),
    "opened by privileged pods": (
        FindingKind.PRIVILEGED,
        Situation(
            look(
                AGENT,
                replace(AGENT, id=container("b").id, namespace="lab", pod="beta", pod_uid="b"),
                use(AGENT, (195, 7), (195, 6)),
                use(container("b"), (195, 7), pid=8),
            ),
            words=("kube-system/agent (2 GPUs), lab/beta (1 GPU)", "foreign.monitors"),
        ),
    ),
    "given to one, and in the spec of another": (
        FindingKind.REACHABLE,
        Situation(
            look(TRAIN, OTHER),
            given((TRAIN, plugin(GPU[0]))),
            ("ml/other, container main can open GPU 0", f"given to ml/train ({PLUGIN})", "spec has the nodes"),
        ),
    ),
    "given to a pod, and to Docker's container by CDI": (
        FindingKind.REACHABLE,
        Situation(look(TRAIN, WEB), given((TRAIN, plugin(GPU[0]))), ("Docker container web can open GPU 0",)),
    ),
    "given to one, and opened by an image's variable": (
        FindingKind.REACHABLE,
        Situation(
            look(TRAIN, BY_HOOK),
            given((TRAIN, plugin(GPU[0]))),
            ('NVIDIA_VISIBLE_DEVICES="all"', "accept-nvidia-visible-devices-envvar-when-unprivileged"),
        ),
    ),
    "given to one, and openable by a rule": (
        FindingKind.REACHABLE,
        Situation(
            look(TRAIN, container("wide", allowed=nodes(0))), given((TRAIN, plugin(GPU[0]))), ("device rule of its",)
        ),
    ),
    "given to one, and opened by a rule that no spec has": (
        FindingKind.REACHABLE,
        Situation(look(TRAIN, container("wide", opens=nodes(0))), given((TRAIN, plugin(GPU[0]))), ("were widened",)),
    ),
    "given by Docker, and openable by another": (
        FindingKind.REACHABLE,
        Situation(look(WEB, container("wide", opens=nodes(0))), words=("given to Docker/web (CDI)",)),
    ),
    "a MIG device, openable by the pod of another": (
        FindingKind.REACHABLE,
        Situation(
            look(
                opened("train", *nodes(2), capability(0)),
                opened("other", *nodes(2), capability(1), capability(0)),
            ),
            given((TRAIN, plugin(PART[0])), (OTHER, plugin(PART[1]))),
            ("can open MIG device 2:0",),
        ),
    ),
    "given by two device plugins": (
        FindingKind.TWICE,
        Situation(
            look(TRAIN, OTHER),
            given((TRAIN, plugin(GPU[0])), (OTHER, plugin(GPU[0], resource="example.com/gpu"))),
            (f"GPU 0 ({GPU[0]}) was given to", "ml/train", "ml/other", "device plugin example.com/gpu"),
        ),
    ),
    "given by a device plugin and by a claim": (
        FindingKind.TWICE,
        Situation(
            look(TRAIN, OTHER),
            given((TRAIN, plugin(GPU[0])), (OTHER, [claimed("gpu-7")])),
            ("DRA driver gpu.nvidia.com",),
        ),
    ),
    "driver files of another version than the kernel's": (
        FindingKind.DRIVERS,
        Situation(
            look(container("old", driver_versions=("570.86.15",)), container("new", driver_versions=("580.95.05",))),
            words=("570.86.15 in ml/old, and the kernel's module is 580.95.05",),
        ),
    ),
    "several driver versions, and no module seen": (
        FindingKind.DRIVERS,
        Situation(
            look(container("old", driver_versions=("570.86.15",)), container("new", driver_versions=("580.95.05",))),
            words=("570.86.15 in ml/old; of 580.95.05 in ml/new",),
            inventory=replace(INVENTORY, driver_version=""),
        ),
    ),
    "device rules lost": (
        FindingKind.LOST_RULES,
        Situation(
            look(opened("train", *nodes(0), opens=(CTL,))),
            given((TRAIN, plugin(GPU[0]))),
            ("cannot open /dev/nvidia7, /dev/nvidia-uvm any more", "daemon-reload"),
        ),
    ),
    "device rules lost, and the clock set back": (
        FindingKind.LOST_RULES,
        Situation(
            look(opened("train", *nodes(0), opens=(CTL,), began_s=WALL + 9_000)),
            given((TRAIN, plugin(GPU[0]))),
            ("cannot open /dev/nvidia7",),
        ),
    ),
    "device rules of a hook lost": (
        FindingKind.LOST_RULES,
        Situation(look(container(hooks=HOOK, opens=())), given((TRAIN, plugin(GPU[0]))), ("cannot open /dev/nvidia7",)),
    ),
    "an XID that asks for a reset": (
        FindingKind.XID,
        Situation(
            look(TRAIN, opened("new", *nodes(0), began_s=WALL - 5)),
            given((TRAIN, plugin(GPU[0])), (container("new"), plugin(GPU[0]))),
            ("XID 79, GPU has fallen off the bus, 2 times in a day; it is given to ml/train: move them",),
            xids={GPU[0]: [(79, WALL - 10), (79, WALL - 20), (48, WALL - 90_000)]},
        ),
    ),
    "an XID of a program": (
        FindingKind.XID,
        Situation(look(), words=("XID 31", "nobody that is seen now"), xids={GPU[1]: [(31, WALL - 10)]}),
    ),
}


@pytest.mark.parametrize(("kind", "situation"), FOUND.values(), ids=FOUND)
def test_a_situation_and_its_finding(kind: FindingKind, situation: Situation) -> None:
    (found,) = situation.seen().findings
    assert found.kind == kind
    assert [word for word in situation.words if word not in found.message] == []
    assert found.since_s == WALL


def operator_pods() -> Iterator[object]:
    """Every container of GPU Operator as its manifests have it, and each with all GPUs open."""
    operator = json.loads((FIXTURES / "gpu-operator-pods.json").read_text())
    for pod in operator["pods"]:
        for name, privileged, asked in pod["containers"]:
            every = (*nodes(0, 1, 2), capability(0), capability(1))
            made = container(
                f"{pod['name']}-x7k2p",
                namespace=operator["namespace"],
                name=name,
                privileged=privileged,
                asked=asked,
                nodes=every,
                allowed=every,
                opens=every,
                driver_versions=("570.86.15",),
            )
            yield from (made, use(made, *every))


QUIET: Final = {
    "nothing": Situation(look()),
    "given and opened": Situation(look(TRAIN, use(TRAIN, *nodes(0))), given((TRAIN, plugin(GPU[0])))),
    "GPU Operator beside a pod": Situation(
        look(TRAIN, use(TRAIN, *nodes(0)), *operator_pods()),  # type: ignore[arg-type]
        given((TRAIN, plugin(GPU[0]))),
    ),
    "replicas of one GPU": Situation(
        look(TRAIN, OTHER), given((TRAIN, plugin(f"{GPU[0]}::0")), (OTHER, plugin(f"{GPU[0]}::1")))
    ),
    "replicas that two plugins have": Situation(
        look(TRAIN, OTHER),
        given((TRAIN, plugin(f"{GPU[0]}::0")), (OTHER, plugin(f"{GPU[0]}::1", resource="nvidia.com/gpu.shared"))),
    ),
    "a claim that pods share": Situation(
        look(TRAIN, OTHER), given((TRAIN, [claimed("gpu-7")]), (OTHER, [claimed("gpu-7")]))
    ),
    "a claim for administrators": Situation(
        look(TRAIN, OTHER), given((TRAIN, [claimed("gpu-7")]), (OTHER, [claimed("gpu-7", "mon/admin")]))
    ),
    "two containers of a pod": Situation(
        look(TRAIN, opened("train", *nodes(0), name="side"), use(opened("train", name="side"), *nodes(0))),
        given((TRAIN, plugin(GPU[0]))),
    ),
    "MIG devices of one GPU": Situation(
        look(opened("train", *nodes(2), capability(0)), opened("other", *nodes(2), capability(1))),
        given((TRAIN, plugin(PART[0])), (OTHER, plugin(PART[1]))),
    ),
    "MIG devices without NVML": Situation(
        look(
            *(made := (opened("train", *nodes(2), capability(0)), opened("other", *nodes(2), capability(1)))),
            *(use(each, *nodes(2), capability(0)) for each in made),
        ),
        given((TRAIN, plugin(PART[0])), (OTHER, plugin(PART[1]))),
        inventory=make.inventory([make.gpu(0), make.gpu(1), make.gpu(2)]),
    ),
    "two of Docker's containers on one GPU": Situation(
        look(WEB, replace(WEB, id=docker("two").id, name="two"), use(f"/system.slice/docker-{WEB.id}.scope", *nodes(0)))
    ),
    "a desktop": Situation(
        look(
            use("/user.slice/x", *nodes(0), program="/usr/lib/xorg/Xorg"),
            use("/user.slice/x", *nodes(0), program="/usr/bin/gnome-shell"),
            use("/system.slice/nvidia-persistenced.service", *nodes(0), program="/usr/bin/nvidia-persistenced"),
        )
    ),
    "a rootless container": Situation(
        look(
            use(f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{'ab' * 32}.scope", (195, 7)),
            docker("abab", id="ab" * 32, runtime="Podman", user="1000", fault="it is rootless"),
        )
    ),
    "a privileged pod that opens nothing": Situation(look(AGENT, use(AGENT, CTL))),
    "a compatibility package": Situation(look(container(driver_versions=("580.95.05", "590.10.01")))),
    "an XID that asks for nothing": Situation(look(), xids={GPU[0]: [(63, WALL - 10)]}),
    "a container that starts": Situation(look(opened("train", *nodes(0), opens=(), began_s=WALL - 2))),
    "a pod that is gone": Situation(look(TRAIN), given((OTHER, plugin(GPU[0])), (TRAIN, plugin(GPU[0])))),
    "ids that tell no GPU": Situation(
        look(TRAIN, OTHER, use(TRAIN, *nodes(0))), given((TRAIN, plugin("a1")), (OTHER, plugin("a2")))
    ),
    "a kubelet that does not answer": Situation(
        look(TRAIN, OTHER, use(TRAIN, *nodes(0))), Given(kubelet=True, fault="no answer")
    ),
    "the observer's own container": Situation(
        look(AGENT, use(AGENT, (195, 7)), extent=Extent(99, 0, True, use(AGENT).cgroups))
    ),
}


@pytest.mark.parametrize("situation", QUIET.values(), ids=QUIET)
def test_a_quiet_situation(situation: Situation) -> None:
    assert [each.message for each in situation.seen().findings] == []


def test_what_policy_excepts_is_quiet() -> None:
    policy = Policy(
        foreign=ForeignSettings(monitors=Globs(("kube-system/*",))),
        stray=StraySettings(exceptions=Globs(("ml/thief", "*/crio-*"))),
    )
    for name in ("opened, and given nothing", "opened in a container of an unseen runtime"):
        assert FOUND[name][1].seen(policy).findings == ()
    (found,) = FOUND["opened by privileged pods"][1].seen(policy).findings
    assert found.message.startswith("privileged, with GPUs open that nobody gave them: lab/beta (1 GPU);")


# --- over time --------------------------------------------------------------------------------------------------------


def after(hours: list[float], *, extent: Extent | None = Extent(99, 0, True), opens_at: float = -1) -> Observed:  # noqa: B008
    """Looks at a pod with a GPU at these hours, of which it has its GPU open at one."""
    seen = None
    for hour in hours:
        clock = 5_000.0 + hour * 3600
        uses = [use(TRAIN, *nodes(0))] if hour == opens_at else []
        seen = observed(
            look(TRAIN, *uses, at=clock, extent=extent),
            given((TRAIN, plugin(GPU[0]))),
            memory=seen.memory if seen else None,
            moment=Moment(clock, WALL + hour * 3600),
            policy=Policy(observe=ObserveSettings(unopened_s=3600)),
        )
    assert seen
    return seen


def test_never_opened_for_an_hour() -> None:
    assert after([0, 0.9]).findings == ()
    (found,) = after([0, 0.5, 1.1]).findings
    assert (found.kind, found.pod, found.gpu_uuids) == (FindingKind.UNOPENED, "train", (GPU[0],))
    assert f"was given GPU 0 ({GPU[0]}) by {PLUGIN}" in found.message
    assert found.message.endswith("in 3 looks: ask whose it is, and delete the pod if nobody needs it")


def test_never_opened_without_a_pod_and_without_a_giver() -> None:
    seen = observed(look(WEB, opened("other", *nodes(1)), at=5_000.0))
    for clock in (9_000.0, 9_100.0):
        again = look(WEB, opened("other", *nodes(1)), at=clock)
        seen = observed(again, memory=seen.memory, moment=Moment(clock, WALL))
    said = [each.message for each in seen.findings]
    assert said[0].endswith("delete the container if nobody needs it")
    assert said[1].startswith(f"ml/other, container main has GPU 1 ({GPU[1]}), and none")


def test_what_was_opened_once_is_no_finding() -> None:
    seen = after([0, 0.5, 2], opens_at=0.5)
    (allocation,) = seen.allocations
    assert (seen.findings, allocation.opened) == ((), False)
    assert (allocation.since_s, allocation.last_opened_s) == (WALL, WALL + 1800)


@pytest.mark.parametrize(
    "extent",
    [
        None,
        Extent(99, 3, True, closed_in=("/user.slice", f"/kubepods/pod1/{TRAIN.id}")),
        Extent(99, 999, True, closed_in=tuple(f"/{number}" for number in range(CLOSED_MAX))),
        Extent(99, 0, False),
    ],
)
def test_looks_that_cannot_tell_do_not_count(extent: Extent | None) -> None:
    seen = after([0, 1, 2, 3], extent=extent)
    assert (seen.findings, [each.opened for each in seen.allocations]) == ((), [None])


def test_a_closed_process_elsewhere_does_not_matter() -> None:
    seen = after([0, 0.5, 2], extent=Extent(99, 1, True, closed_in=("/init.scope", f"/kubepods/pod2/{OTHER.id}")))
    assert ([each.kind for each in seen.findings], [each.opened for each in seen.allocations]) == (
        [FindingKind.UNOPENED],
        [False],
    )


def test_processes_that_a_look_left_out_may_be_anybodys() -> None:
    many = Extent(9, 0, True, closed_in=tuple(f"/{number}" for number in range(CLOSED_MAX)))
    seen = observed(replace(look(TRAIN, OTHER), extent=many), given((TRAIN, plugin(GPU[0]))))
    assert [each.opened for each in seen.allocations if each.pod == "train"] == [None]


def test_of_many_drivers_some_are_named() -> None:
    """A pod may mount any file of its own as one of the driver's."""
    pods = [opened(f"pod{number}", driver_versions=(f"9{number:02}.1",)) for number in range(99)]
    [found] = observed(look(*pods)).findings
    assert "; of 903.1 in ml/pod3; and of 95 more versions, and the kernel's module is" in found.message


def test_a_flood_of_one_kind_hides_no_other_finding() -> None:
    """Each program of the host is a finding of its own, and a user may run any number of them."""
    programs = [use("/user.slice", (195, 7), pid=pid, program=f"/home/u/{pid:x}") for pid in range(1, FINDINGS_MAX + 9)]
    thief = container("thief")
    seen = observed(look(TRAIN, OTHER, thief, *programs, use(thief, (195, 6))), given((TRAIN, plugin(GPU[0]))))
    assert (len(seen.findings), seen.more) == (FINDINGS_MAX, 10)
    assert {(each.kind, each.pod) for each in seen.findings} == {
        (FindingKind.NOT_GIVEN, ""),
        (FindingKind.NOT_GIVEN, "thief"),
        (FindingKind.REACHABLE, "other"),
    }


def test_a_look_at_bundles_alone_keeps_what_processes_had_open() -> None:
    first = observed(look(TRAIN, use(TRAIN, (195, 6))), given((TRAIN, plugin(GPU[0]))))
    again = observed(
        look(TRAIN, at=5_001.0, extent=None),
        given((TRAIN, plugin(GPU[0]))),
        memory=first.memory,
        moment=Moment(5_002.0, WALL + 2),
    )
    assert again.findings == first.findings != ()
    assert again.memory.tracked == first.memory.tracked


def test_a_finding_that_went_begins_anew() -> None:
    thief = container("thief")
    first = observed(look(thief, use(thief, (195, 7))))
    gone = observed(look(thief, at=5_001.0), memory=first.memory)
    again = observed(
        look(thief, use(thief, (195, 7)), at=5_002.0), memory=gone.memory, moment=Moment(5_002.0, WALL + 2)
    )
    assert [each.since_s for each in (*first.findings, *again.findings)] == [WALL, WALL + 2]


# --- who was given what -----------------------------------------------------------------------------------------------

ALLOTTED: Final = {
    "a device plugin": (Situation(look(TRAIN), given((TRAIN, plugin(GPU[0])))), [(GPU[0], "", PLUGIN)]),
    "a claim": (
        Situation(look(TRAIN), given((TRAIN, [claimed("gpu-7")]))),
        [(GPU[0], "", "DRA driver gpu.nvidia.com")],
    ),
    "ids that tell nothing, and its nodes": (
        Situation(look(TRAIN), given((TRAIN, plugin("a1")))),
        [(GPU[0], "", PLUGIN)],
    ),
    "ids that tell nothing, and no nodes": (
        Situation(look(container()), given((TRAIN, plugin("a1")))),
        [("", "a1", PLUGIN)],
    ),
    "a MIG device without NVML": (
        Situation(
            look(opened("train", *nodes(2), capability(0))),
            given((TRAIN, plugin(PART[0]))),
            inventory=make.inventory([make.gpu(2)]),
        ),
        [("", PART[0], PLUGIN)],
    ),
    "a MIG device of NVIDIA's DRA driver without NVML": (
        Situation(
            look(container()),
            given((TRAIN, [claimed("gpu-5-mig-1g5gb-19-0")])),
            inventory=make.inventory([make.gpu(2)]),
        ),
        [("", "gpu-5-mig-1g5gb-19-0", "DRA driver gpu.nvidia.com")],
    ),
    "a pod that no container is seen of": (Situation(look(), given((TRAIN, plugin(GPU[0])))), [(GPU[0], "", PLUGIN)]),
    "the annotation of CDI": (
        Situation(look(opened("train", *nodes(1), cdi=("nvidia.com/gpu=1",))), given()),
        [(GPU[1], "", "CDI")],
    ),
    "a claim of any driver, by its nodes": (
        Situation(look(TRAIN), given((TRAIN, [claimed("a1", driver="gpu.example.com")]))),
        [(GPU[0], "", "DRA driver gpu.example.com")],
    ),
    "a network card beside a GPU": (
        Situation(look(TRAIN), given((TRAIN, [*plugin(GPU[0]), CARD]))),
        [(GPU[0], "", PLUGIN)],
    ),
    "a network card beside CDI": (
        Situation(look(opened("train", *nodes(1), cdi=("nvidia.com/gpu=1",))), given((TRAIN, [CARD]))),
        [(GPU[1], "", "CDI")],
    ),
    "network cards alone": (Situation(look(container()), given((TRAIN, [CARD]), (OTHER, [CARD]))), []),
    "nodes that nobody names": (Situation(look(TRAIN), given()), [(GPU[0], "", "not known")]),
    "beside the kubelet's": (
        Situation(look(opened("train", *nodes(0, 1), cdi=("x",))), given((TRAIN, plugin(GPU[0])))),
        [(GPU[0], "", PLUGIN), (GPU[1], "", "CDI")],
    ),
    "Docker by CDI": (Situation(look(WEB)), [(GPU[0], "", "CDI")]),
    "Docker's --device": (Situation(look(docker("web", nodes=nodes(1)))), [(GPU[1], "", "Docker")]),
    "Podman by CDI, with the driver's files": (
        Situation(look(docker("web", runtime="Podman", nodes=nodes(1), driver_versions=("580.95.05",)))),
        [(GPU[1], "", "CDI")],
    ),
    "Docker's --gpus all, privileged": (
        Situation(look(docker("web", privileged=True, requests=(DeviceRequest(driver="nvidia", count=-1),)))),
        [(GPU[0], "", "Docker"), (GPU[1], "", "Docker"), (PART[0], "", "Docker"), (PART[1], "", "Docker")],
    ),
    "Docker's --gpus device=1": (
        Situation(look(docker("web", requests=(DeviceRequest(ids=("1",)),), hooks=HOOK))),
        [(GPU[1], "", "Docker")],
    ),
    "Docker's --gpus 1, by what the hook opened": (
        Situation(look(docker("web", requests=(DeviceRequest(count=1),), hooks=HOOK, opens=nodes(1)))),
        [(GPU[1], "", "Docker")],
    ),
    "Docker's CDI request": (
        Situation(look(docker("web", requests=(DeviceRequest(driver="cdi", ids=("nvidia.com/gpu=0",)),)))),
        [(GPU[0], "", "CDI")],
    ),
    "the hook, seen by the kernel": (
        Situation(look(BY_HOOK)),
        [(GPU[0], "", "NVIDIA's hook"), (GPU[1], "", "NVIDIA's hook")],
    ),
    "the hook, seen by processes": (
        Situation(look(hooked := replace(BY_HOOK, opens=None), use(hooked, *nodes(1)))),
        [(GPU[1], "", "NVIDIA's hook")],
    ),
    "the hook, not seen": (Situation(look(replace(BY_HOOK, opens=None))), [("", "", "NVIDIA's hook")]),
    "the hook, asked for nothing": (Situation(look(replace(BY_HOOK, opens=None, asked="void"))), []),
    "a variable alone": (Situation(look(container(asked="all"))), []),
    "a privileged container": (Situation(look(AGENT, use(AGENT, (195, 6), UVM))), [(GPU[1], "", "privileged")]),
    "a rootless container": (QUIET["a rootless container"], [(GPU[0], "", "rootless, user 1000")]),
}


@pytest.mark.parametrize(("situation", "rows"), ALLOTTED.values(), ids=ALLOTTED)
def test_who_was_given_what(situation: Situation, rows: list[tuple[str, str, str]]) -> None:
    seen = situation.seen()
    known = [(each.gpu_uuid, "" if each.gpu_uuid else each.device, each.by) for each in seen.allocations]
    assert known == rows
    assert {uuid for each in seen.ledger.external.values() for uuid in each.uuids} == {uuid for uuid, *_ in rows} - {""}
    assert {each.by for each in seen.ledger.external.values()} <= {
        ", ".join(dict.fromkeys(by for *_, by in rows)),
        *(by for *_, by in rows),
    }


def test_a_device_of_no_known_gpu_has_its_nodes_by_number() -> None:
    situation, _ = ALLOTTED["a MIG device without NVML"]
    (row,) = situation.seen().allocations
    cap = f"/dev/nvidia-caps/nvidia-cap{capability(0)[1]}"
    assert row.unseen == f"which GPU it is a part of is not known here; its container has /dev/nvidia5, {cap}"


def test_replicas_are_counted_and_open_by_processes() -> None:
    one, two = (
        given((TRAIN, plugin(f"{GPU[0]}::0")), (OTHER, plugin(f"{GPU[0]}::1"))),
        look(TRAIN, OTHER, use(TRAIN, *nodes(0))),
    )
    rows = observed(two, one).allocations
    assert [(each.pod, each.shared, each.opened) for each in rows] == [("other", 2, False), ("train", 2, True)]


def test_monitors_hold_nothing() -> None:
    seen = QUIET["GPU Operator beside a pod"].seen()
    assert [(each.pod, each.gpu_uuid) for each in seen.allocations] == [("train", GPU[0])]
    held = {each.pod: each.held for each in seen.ledger.external.values() if each.held}
    assert held == {"ml/train": frozenset({GPU[0]})}
    assert sum(bool(each.watched) for each in seen.ledger.external.values()) == len([*operator_pods()]) // 2 == 30
    assert seen.ledger.usage()[GPU[0]].pods == {}


@pytest.mark.parametrize("situation", [each for _, each in FOUND.values()], ids=FOUND)
def test_the_order_of_what_was_seen_does_not_matter(situation: Situation) -> None:
    turned = replace(situation.look, containers=situation.look.containers[::-1], uses=situation.look.uses[::-1])
    one, two = situation.seen(), replace(situation, look=turned).seen()
    assert replace(two, memory=one.memory) == one
