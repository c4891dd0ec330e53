"""Law: placement takes what was asked, always the same, and never worse linked than go-gpuallocator's best effort.

On any node of up to eight GPUs with any links, whoever holds what: those of the pod, of others, nobody's.
"""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.placement import BestEffort
from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.topology import Topology, topology_of
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.gpu import Unit
from nri_gpu.domain.gpu_request import Mode, Strategy
from nri_gpu.domain.node import Inventory, Link
from nri_gpu.ledger.ledger import Entry, Ledger
from nri_gpu.request.annotation import parse_claim
from tests.support import builders as make

MANY = settings(max_examples=100)
ME, SIDE, OTHER = make.container(of="me"), make.container(of="me", name="side"), make.container(of="other")


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    size = draw(st.integers(1, 8))
    node = st.one_of(st.none(), st.integers(0, 1))
    gpus = [replace(make.gpu(index), numa_node=draw(node)) for index in range(size)]
    pcie, nvlinks = st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS", ""]), st.integers(0, 4)
    links = [Link(a, b, draw(pcie), draw(nvlinks)) for a, b in combinations(range(size), 2) if draw(st.booleans())]
    return make.inventory(gpus, links=tuple(draw(st.permutations(links))))


@st.composite
def ledgers(draw: st.DrawFn, size: int) -> Ledger:
    """Exclusive and shared holders, of the pod and of others; every GPU in one mode."""
    entries: list[Entry] = []
    mode_of = [draw(st.sampled_from(list(Mode))) for _ in range(size)]
    for holder in (SIDE, OTHER):
        for mode in Mode:
            of_mode = [index for index in range(size) if mode_of[index] is mode]
            held = draw(st.lists(st.sampled_from(of_mode), unique=True)) if of_mode else []
            if mode is Mode.EXCLUSIVE:
                taken = {uuid for each in entries if each.grant.mode is mode for uuid in each.grant.uuids}
                held = [index for index in held if make.uuid(index) not in taken]
            to = replace(holder, id=ContainerId(f"{holder.id}-{mode}"))
            entries += [make.entry(*held, to=to, mode=mode)] if held else []
    return make.ledger(*entries)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Inventory, Ledger, Asker, int]:
    inventory = draw(inventories())
    size = len(inventory.gpus)
    asker = Asker(ME.pod.uid, draw(st.sampled_from(Mode)), draw(st.sampled_from(Strategy)))
    return inventory, draw(ledgers(size)), asker, draw(st.integers(1, size))


def placed(inventory: Inventory, ledger: Ledger, asker: Asker, number: int) -> tuple[Unit, ...] | Reason:
    return place(parse_claim(make.KEY, str(number)), asker, inventory, ledger.usage())


def score(fabric: Topology, units: tuple[Unit, ...]) -> int:
    return fabric.score(fabric.places[unit.uuid] for unit in units)


def what_is_taken_satisfies_the_claim(question: tuple[Inventory, Ledger, Asker, int]) -> None:
    inventory, ledger, asker, number = question
    usage = ledger.usage()
    open_ones = [
        gpu for gpu in inventory.gpus if gpu.uuid not in usage or not usage[gpu.uuid].blocks(asker.mode, asker.pod_uid)
    ]
    units = placed(*question)
    assert isinstance(units, Reason) == (len(open_ones) < number)
    if isinstance(units, Reason):
        return
    assert len({unit.uuid for unit in units}) == number
    assert set(units) <= set(open_ones)
    loads = sorted(usage[gpu.uuid].load if gpu.uuid in usage else 0 for gpu in open_ones)
    assert sorted(usage[unit.uuid].load if unit.uuid in usage else 0 for unit in units) == loads[:number]


def the_order_of_anything_told_is_no_matter(question: tuple[Inventory, Ledger, Asker, int]) -> None:
    inventory, ledger, asker, number = question
    shuffled = Ledger(dict(reversed([*ledger.entries.items()])), ledger.external)
    again = replace(inventory, links=tuple(reversed(inventory.links)))
    one, other = placed(inventory, ledger, asker, number), placed(again, shuffled, asker, number)
    assert one == other or (isinstance(one, Reason) and isinstance(other, Reason) and one.code is other.code)


def a_single_shared_one_is_the_least_loaded_then_ones_own_then_the_lowest(
    question: tuple[Inventory, Ledger, Asker, int],
) -> None:
    inventory, ledger, asker, _ = question
    asker = replace(asker, mode=Mode.SHARED)
    units = placed(inventory, ledger, asker, 1)
    if isinstance(units, Reason):
        return
    usage = ledger.usage()

    def rank(unit: Unit) -> tuple[int, bool, str]:
        use = usage.get(unit.uuid)
        return (use.load if use else 0, use is None or asker.pod_uid not in use.pods, unit.uuid)

    assert units[0] == min(
        (gpu for gpu in inventory.gpus if gpu.uuid not in usage or usage[gpu.uuid].mode is Mode.SHARED), key=rank
    )


LAWS = (
    what_is_taken_satisfies_the_claim,
    the_order_of_anything_told_is_no_matter,
    a_single_shared_one_is_the_least_loaded_then_ones_own_then_the_lowest,
)


@MANY
@given(questions())
def test_every_law(question: tuple[Inventory, Ledger, Asker, int]) -> None:
    for law in LAWS:
        law(question)


@MANY
@given(inventories(), st.data())
def test_never_worse_linked_than_best_effort(inventory: Inventory, data: st.DataObject) -> None:
    size = len(inventory.gpus)
    held = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1), label="held by others")
    free = tuple(index for index in range(size) if index not in held)
    number = data.draw(st.integers(1, len(free)), label="asked for")
    strategy = data.draw(st.sampled_from(Strategy))
    ledger = make.ledger(make.entry(*sorted(held), to=OTHER)) if held else Ledger()
    units = placed(inventory, ledger, Asker(ME.pod.uid, Mode.EXCLUSIVE, strategy), number)
    assert not isinstance(units, Reason)
    fabric = topology_of(inventory)
    best = max(fabric.score(some) for some in combinations(free, number))
    assert score(fabric, units) == best >= fabric.score(BestEffort(fabric)(free, number))
