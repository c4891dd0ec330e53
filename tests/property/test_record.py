"""A recorded node, loaded, is the node: whatever NVML can say of one, a topology file can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.bounds import PCIE_PATHS
from nri_gpu.domain.edits import Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.gpu import ComputeMode, DrmNode, Gpu, GpuUuid, MigDevice, MigEngines, PciBusId
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import GpuFault, Inventory, Link, Majors, NumaNode
from nri_gpu.host.modules import MODULES
from nri_gpu.inventory.record import topology_text
from nri_gpu.inventory.topology_file import load_topology, parse_topology
from nri_gpu.inventory.topology_tables import EXTRAS
from nri_gpu.request.image_requirements import BRANDS
from tests.property import strategies

ROOT = Path(__file__).parents[2]
TOPOLOGIES = sorted([*(ROOT / "config/topologies").glob("*.toml"), *(ROOT / "tests/fixtures/gpus").glob("*.toml")])

# What NVML may say of a failure: anything that UTF-8 can hold.
sentences = st.text(st.characters(codec="utf-8"), max_size=20)
versions = st.sampled_from(["", "580.95.05", "13.0"])
majors = st.lists(st.integers(1, 4095), unique=True, min_size=3, max_size=3)


facts = strategies.facts().filter(lambda drawn: drawn["compute_mode"] is not ComputeMode.PROHIBITED)
modules = st.dictionaries(st.sampled_from(MODULES), st.sampled_from(["", "580.95.05", "1.0-0"]))


SLICES = {"1c.3g.40gb": 3, "1g.10gb+me": 1, "unknown": 0, "2g.20gb": 2}


@st.composite
def gpus(draw: st.DrawFn, index: int) -> Gpu:
    slots = draw(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 7)), unique=True, max_size=3))
    places = sorted(draw(st.sets(st.integers(0, 119), min_size=len(slots), max_size=len(slots))))
    # GPU instances share nothing, their compute instances their profile's slices; a GPU has seven of these.
    profiles = {gi: draw(st.sampled_from([*SLICES])) for gi, _ in slots}
    cut = {gi: "1c.3g.40gb" if sum(gi == other for other, _ in slots) > 1 else profiles[gi] for gi, _ in slots}
    if sum(SLICES[profile] for profile in cut.values()) > 7:
        cut = dict.fromkeys(cut, "2g.20gb")
    few = st.lists(st.integers(2000 * index, 2000 * index + 1999), unique=True, min_size=6, max_size=6)
    minors = iter(draw(few))
    of_instance = {gi: draw(st.none() | st.just(next(minors))) for gi in cut}
    parts = tuple(
        MigDevice(
            index=place,
            uuid=GpuUuid(f"MIG-0000{index:02x}{place:02x}-0000-4000-8000-000000000000"),
            gpu_instance_id=slot[0],
            compute_instance_id=slot[1],
            profile=cut[slot[0]],
            memory_bytes=draw(st.integers(0, 2**33)),
            gpu_instance_minor=of_instance[slot[0]],
            compute_instance_minor=draw(st.none() | st.just(next(minors))),
            unavailable=draw(sentences),
            engines=MigEngines(*draw(st.tuples(*[st.integers(0, 65535)] * 6))),
        )
        for place, slot in zip(places, slots, strict=True)
    )
    card, render = DrmNode(f"card{index}", 226, index), DrmNode(f"renderD{128 + index}", 226, 128 + index)
    return Gpu(
        index=index,
        minor_number=draw(st.sampled_from([index, 40 + index])),
        uuid=GpuUuid(f"GPU-000000{index:02x}-0000-4000-8000-000000000000"),
        pci_bus_id=PciBusId(f"0000:{index:02x}:00.0"),
        model=draw(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)),
        memory_bytes=draw(st.sampled_from([0, 2**37])),
        arch=draw(st.tuples(st.integers(0, 12), st.integers(0, 9))),
        numa_node=draw(st.none() | st.integers(0, 3)),
        mig_enabled=bool(parts) or draw(st.booleans()),
        brand=draw(st.sampled_from(["", *(brand for brand in BRANDS if brand)])),
        unavailable=draw(sentences),
        mig=parts,
        drm=draw(st.sampled_from([(), (card,), (card, render)])),
        signs=tuple(draw(st.lists(st.sampled_from(Sign), unique=True, max_size=3))),
        **draw(facts),
    )


offers = st.builds(
    NodeExtra,
    st.lists(st.builds(DeviceNode, st.just("/dev/x"), st.integers(1, 9), st.integers(0, 9)), max_size=2).map(tuple),
    st.sampled_from([(), (Mount("/etc/a", "/etc/b"),)]),
    lacking=st.text("abc ", max_size=5).map(str.strip),
).filter(lambda offer: bool(offer.nodes or offer.mounts or offer.lacking))


def faults(index: int) -> st.SearchStrategy[GpuFault]:
    return st.builds(
        GpuFault,
        st.just(index),
        sentences,
        st.sampled_from([0, 15, 999]),
        st.none() | st.sampled_from(Sign),
        st.sampled_from(["", f"GPU-{index:08x}-ffff-4000-8000-000000000000"]),
        st.sampled_from(["", f"0000:f{index}:00.0"]),
    )


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    count = draw(st.integers(0, 4))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if draw(st.booleans())]
    extras: dict[Extra, NodeExtra] = draw(
        st.dictionaries(st.sampled_from([each for each in EXTRAS if each is not Extra.IMEX]), SAFE, max_size=2)
    )
    if draw(st.booleans()):
        extras[Extra.IMEX] = NodeExtra(channels=Channels(240, draw(st.integers(1, 2048))))
    nvidia, uvm, caps = (draw(st.none() | st.just(each)) for each in draw(majors))
    return Inventory(
        taken_at=3.0,
        gpus=tuple(draw(gpus(index)) for index in range(count)),
        faults=tuple(draw(faults(count + at)) for at in range(draw(st.integers(0, 2)))),
        links=tuple(Link(a, b, draw(st.sampled_from(PCIE_PATHS)), draw(st.integers(0, 12))) for a, b in pairs),
        numa=tuple(NumaNode(at, "0-3,8", memory=draw(st.booleans())) for at in range(draw(st.integers(0, 2)))),
        majors=Majors(nvidia, uvm, caps, draw(st.none() | st.booleans())),
        driver_version=draw(versions),
        cuda_version=draw(versions),
        extras=extras,
        modules=draw(modules),
    )


# Mounts of sockets have options of their own, which only those of sockets can have.
SAFE: Any = offers.map(
    lambda offer: replace(offer, mounts=()) if offer.nodes or offer.lacking else NodeExtra(lacking="x")
)


def reloaded(inventory: Inventory) -> Inventory:
    return parse_topology(topology_text(inventory, "a comment\nof two lines"), "recorded", inventory.taken_at)


@settings(max_examples=40)
@given(inventories())
def test_it_comes_back_whole(inventory: Inventory) -> None:
    again = reloaded(inventory)
    assert again == replace(inventory, simulated=True)
    assert [gpu.compute_mode for gpu in again.gpus] == [gpu.compute_mode for gpu in inventory.gpus]
    masks = [[gpu.fabric and gpu.fabric.health_mask for gpu in each.gpus] for each in (again, inventory)]
    assert masks[0] == masks[1]


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_every_shipped_node_comes_back(path: Path) -> None:
    # What a file scripts is nothing that is known of a node.
    inventory = replace(load_topology(path, boot_clock=lambda: 3.0), script=())
    assert reloaded(inventory) == inventory
