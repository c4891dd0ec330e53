"""A recorded node, loaded, is the node: whatever NVML can say of one, a topology file can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.edits import DeviceNode, Mount
from nri_gpu.domain.extras import Channels, Extra, Offer
from nri_gpu.domain.gpu import (
    DrmNode,
    Gpu,
    GpuFault,
    GpuUuid,
    Inventory,
    Link,
    Majors,
    MigDevice,
    NumaNode,
    PciBusId,
)
from nri_gpu.inventory.offer_table import OF_GPUS
from nri_gpu.inventory.record import scrubbed, topology_text
from nri_gpu.inventory.topology import PCIE_WORDS, load_topology, parse_topology
from nri_gpu.requirements.facts import BRANDS

ROOT = Path(__file__).parents[2]
TOPOLOGIES = sorted([*(ROOT / "config/topologies").glob("*.toml"), *(ROOT / "tests/fixtures/gpus").glob("*.toml")])

# What NVML may say of a failure: anything that UTF-8 can hold.
sentences = st.text(st.characters(codec="utf-8"), max_size=20)
versions = st.sampled_from(["", "580.95.05", "13.0"])
majors = st.none() | st.integers(1, 4095)
maybe_minor = st.none() | st.integers(0, 8191)


@st.composite
def gpus(draw: st.DrawFn, index: int) -> Gpu:
    slots = draw(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 7)), unique=True, max_size=3))
    places = sorted(draw(st.sets(st.integers(0, 119), min_size=len(slots), max_size=len(slots))))
    parts = tuple(
        MigDevice(
            index=place,
            uuid=GpuUuid(f"MIG-0000{index:02x}{place:02x}-0000-4000-8000-000000000000"),
            gpu_instance_id=slot[0],
            compute_instance_id=slot[1],
            profile=draw(st.sampled_from(["1c.3g.40gb", "1g.10gb+me", "unknown"])),
            memory_bytes=draw(st.integers(0, 2**33)),
            gpu_instance_minor=draw(maybe_minor),
            compute_instance_minor=draw(maybe_minor),
            unavailable=draw(sentences),
        )
        for place, slot in zip(places, slots, strict=True)
    )
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
        drm=tuple(
            DrmNode(f"{kind}{index}", 226, index) for kind in draw(st.sets(st.sampled_from(["card", "renderD"])))
        ),
    )


offers = st.builds(
    Offer,
    st.lists(st.builds(DeviceNode, st.just("/dev/x"), st.integers(1, 9), st.integers(0, 9)), max_size=2).map(tuple),
    st.sampled_from([(), (Mount("/etc/a", "/etc/b"),)]),
    lacking=st.text("abc ", max_size=5).map(str.strip),
).filter(lambda offer: bool(offer.nodes or offer.mounts or offer.lacking))


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    count = draw(st.integers(0, 4))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if draw(st.booleans())]
    extras: dict[Extra, Offer] = draw(
        st.dictionaries(
            st.sampled_from([each for each in Extra if each not in {*OF_GPUS, Extra.IMEX}]), SAFE, max_size=2
        )
    )
    if draw(st.booleans()):
        extras[Extra.IMEX] = Offer(channels=Channels(240, draw(st.integers(1, 2048))))
    return Inventory(
        taken_at=3.0,
        gpus=tuple(draw(gpus(index)) for index in range(count)),
        faults=tuple(GpuFault(count + at, text) for at, text in enumerate(draw(st.lists(sentences, max_size=2)))),
        links=tuple(Link(a, b, draw(st.sampled_from(PCIE_WORDS)), draw(st.integers(0, 36))) for a, b in pairs),
        numa=tuple(NumaNode(at, "0-3,8", memory=draw(st.booleans())) for at in range(draw(st.integers(0, 2)))),
        majors=Majors(draw(majors), draw(majors), draw(majors), draw(st.none() | st.booleans())),
        driver_version=draw(versions),
        cuda_version=draw(versions),
        extras=extras,
    )


# Mounts of sockets have options of their own, which only those of sockets can have.
SAFE: Any = offers.map(lambda offer: replace(offer, mounts=()) if offer.nodes or offer.lacking else Offer(lacking="x"))


def reloaded(inventory: Inventory) -> Inventory:
    return parse_topology(topology_text(inventory, "a comment\nof two lines"), "recorded", inventory.taken_at)


@settings(max_examples=40)
@given(inventories())
def test_it_comes_back_whole(inventory: Inventory) -> None:
    assert reloaded(inventory) == replace(inventory, simulated=True)


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_every_shipped_node_comes_back(path: Path) -> None:
    # What a file scripts is nothing that is known of a node.
    inventory = replace(load_topology(path, wall=lambda: 3.0), script=())
    assert reloaded(inventory) == inventory


@settings(max_examples=40)
@given(inventories())
def test_a_scrubbed_node_is_the_same_but_for_its_names(inventory: Inventory) -> None:
    other = reloaded(scrubbed(inventory))
    names = {unit.uuid for unit in other.units}
    assert len(names) == len(other.units)
    assert not names & {unit.uuid for unit in inventory.units if not unit.uuid.endswith("-000000000000")}
    unnamed = [replace(gpu, uuid=GpuUuid(""), mig=()) for gpu in other.gpus]
    assert unnamed == [replace(gpu, uuid=GpuUuid(""), mig=()) for gpu in inventory.gpus]
    assert replace(other, gpus=()) == replace(inventory, gpus=(), simulated=True)
