"""Laws of what an observer concludes: total, in no order, of this node's GPUs alone, and quiet where all is well."""

from __future__ import annotations

from hypothesis import given as drawn
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.daemon.view import status_of
from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.observe.given import Given, GivenDevice
from nri_gpu.observe.looks import DeviceRequest, NodeLook, SeenContainer
from nri_gpu.observe.observed import Memory, Observed, observed_after
from nri_gpu.policy.model import Policy
from nri_gpu.stray.uses import Extent, Use
from tests.support import builders as make
from tests.support.views import view
from tests.unit.observe.seen import INVENTORY, MOMENT, WALL, capability, container, nodes, plugin

NAMES = st.sampled_from(["train", "other", "gpu-operator", "nvidia-dcgm-exporter-x", "", "\x1b[2J\n", "a/b", "\udcff"])
IDS = st.sampled_from([character * 64 for character in "abcd"]).map(ContainerId)
NUMBERS = st.lists(
    st.sampled_from([*nodes(0, 1, 2), capability(0), capability(1), (510, 9), (195, 254), (1, 3)]), max_size=6
).map(tuple)
UUIDS = [unit.uuid for unit in INVENTORY.units]
TEXTS = st.one_of(st.sampled_from([*UUIDS, f"{UUIDS[0]}::1", "0", "MIG-9", "gpu-7", "all", ""]), st.text(max_size=9))
WORDS = st.lists(TEXTS, max_size=2).map(tuple)
REQUESTS = st.builds(DeviceRequest, driver=TEXTS, count=st.integers(-1, 2), ids=WORDS)
CONTAINERS = st.builds(
    SeenContainer,
    id=IDS,
    runtime=st.sampled_from(["containerd", "Docker"]),
    namespace=NAMES,
    pod=NAMES,
    pod_uid=st.sampled_from(["", "u1", "u2"]),
    name=NAMES,
    user=st.sampled_from(["", "", "1000"]),
    sandbox=st.booleans(),
    privileged=st.booleans(),
    began_s=st.none() | st.floats(WALL - 100, WALL),
    nodes=NUMBERS,
    allowed=NUMBERS,
    opens=st.none() | NUMBERS,
    asked=TEXTS,
    requests=st.lists(st.builds(DeviceRequest, driver=TEXTS, count=st.integers(-1, 2), ids=WORDS), max_size=2).map(
        tuple
    ),
    cdi=WORDS,
    hooks=st.sampled_from([(), ("nvidia-ctk",), ("nvidia-container-runtime-hook",)]),
    driver_versions=st.lists(st.sampled_from(["570.1", "580.95.05"]), max_size=2).map(tuple),
    fault=st.sampled_from(["", "it cannot be read"]),
)
CGROUPS = st.one_of(
    IDS.map(lambda each: f"/kubepods/{each}"),
    IDS.map(lambda each: f"/user.slice/user-1000.slice/user@1000.service/libpod-{each}.scope"),
    st.sampled_from(["/", "/system.slice/\x1bx.service", ""]),
)
USES = st.builds(
    Use,
    pid=st.integers(1, 9),
    started=st.integers(0, 3),
    program=st.sampled_from(["/bin/x", "/usr/bin/Xorg", "\x07"]),
    cgroups=st.lists(CGROUPS, max_size=2).map(tuple),
    numbers=NUMBERS.filter(bool),
)
DEVICES = st.builds(
    GivenDevice,
    resource=TEXTS,
    id=TEXTS,
    driver=st.sampled_from(["", "gpu.nvidia.com"]),
    device=TEXTS,
    claim=TEXTS,
    cdi=WORDS,
)
LISTS = st.dictionaries(st.tuples(NAMES, NAMES, NAMES), st.lists(DEVICES, max_size=3).map(tuple), max_size=3)
EXTENTS = st.none() | st.builds(Extent, processes=st.integers(0, 9), closed=st.integers(0, 1), whole=st.booleans())
LOOKS = st.builds(
    NodeLook,
    at=st.floats(0, 100),
    containers=st.lists(CONTAINERS, max_size=4, unique_by=lambda each: each.id).map(tuple),
    uses=st.lists(USES, max_size=5, unique_by=lambda each: (each.pid, each.started)).map(tuple),
    extent=EXTENTS,
)


def concluded(look: NodeLook, listed: Given, memory: Memory | None = None) -> Observed:
    xids = {UUIDS[0]: [(79, WALL - 5), (63, WALL)]}
    return observed_after(memory or Memory(), look, listed, INVENTORY, Policy(), MOMENT, xids)


@drawn(st.lists(LOOKS, min_size=1, max_size=3), LISTS)
def test_it_is_total_and_speaks_of_this_node_in_plain_text(
    looks: list[NodeLook], devices: dict[object, object]
) -> None:
    listed, found = Given(at=1.0, kubelet=True, devices=devices), Observed()  # type: ignore[arg-type]
    for look in looks:
        found = concluded(look, listed, found.memory)
    told = [(each.message, each.gpu_uuids) for each in found.findings]
    for message, uuids in told + [(each.message, each.gpu_uuids) for each in found.strays]:
        assert set(uuids) <= {*UUIDS}
        assert message.isascii()
        assert message.isprintable()
    assert {each.gpu_uuid for each in found.allocations} <= {*UUIDS, ""}
    assert {uuid for each in found.ledger.external.values() for uuid in each.uuids} <= {*UUIDS}
    assert len({(each.kind, each.message) for each in found.findings}) == len(found.findings)
    assert status_of(view(found.ledger)).overlaps == ()


@drawn(LOOKS, LISTS, st.randoms())
def test_no_order_matters(look: NodeLook, devices: dict[object, object], random: object) -> None:
    listed = Given(at=1.0, kubelet=True, devices=devices)  # type: ignore[arg-type]
    containers, uses = list(look.containers), list(look.uses)
    random.shuffle(containers)  # type: ignore[attr-defined]
    random.shuffle(uses)  # type: ignore[attr-defined]
    one, two = concluded(look, listed), concluded(replace(look, containers=tuple(containers), uses=tuple(uses)), listed)
    assert replace(two, memory=one.memory) == one


UNITS: list[tuple[str, tuple[DeviceNumber, ...]]] = [
    (make.uuid(0), nodes(0)),
    (make.uuid(1), nodes(1)),
    (make.mig_uuid(2, 0), (*nodes(2), capability(0))),
    (make.mig_uuid(2, 1), (*nodes(2), capability(1))),
]


@drawn(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4, unique_by=lambda each: each[0]), st.booleans())
def test_pods_that_use_what_they_were_given_are_quiet(wanted: list[tuple[int, bool]], seen: bool) -> None:
    containers, uses, devices = list[SeenContainer](), list[Use](), {}
    for at, opens in wanted:
        uuid, numbers = UNITS[at]
        made = container(f"pod{at}", nodes=numbers, allowed=numbers, opens=numbers if seen else None)
        containers.append(made)
        uses += [Use(at + 1, 1, "/bin/x", (f"/kubepods/{made.id}",), numbers)] * opens
        devices["ml", f"pod{at}", "main"] = plugin(uuid)
    look = NodeLook(at=1.0, containers=tuple(containers), uses=tuple(uses), extent=Extent(9, 0, True))
    found = observed_after(Memory(), look, Given(at=1.0, kubelet=True, devices=devices), INVENTORY, Policy(), MOMENT)
    assert (found.findings, found.strays) == ((), ())
    assert [(each.gpu_uuid, each.opened) for each in found.allocations] == [
        (UNITS[at][0], opens) for at, opens in sorted(wanted)
    ]
