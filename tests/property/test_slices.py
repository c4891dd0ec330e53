"""Laws: the writes lead to what is wanted, whatever is there; and the scheduler never takes half of it for the whole.

The scheduler's view (kubernetes: staging/src/k8s.io/dynamic-resource-allocation/structured) is that of the newest
generation of the pool, complete where there are as many slices of it as each says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.dra.questions import Capacity, NodeView, OfferedDevice, Taint
from nri_gpu.dra.slices import (
    Gate,
    ResourceSlice,
    gates_of,
    plan_writes,
    slice_specs,
    without_daemon,
)

NODE: Final = "node1"
BAD: Final = Taint("gpu.nri.io/unhealthy", "bad", "NoSchedule")
COUNTS: Final = st.sampled_from((0, 1, 3, 63, 64, 65, 128, 130))


@st.composite
def views(draw: st.DrawFn) -> NodeView:
    kinds = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    devices = tuple(_device(n, kinds[n % len(kinds)]) for n in range(draw(COUNTS)))
    sets = {each.counter_set: {"slices": 7} for each in devices if each.counter_set}
    return NodeView(
        number=1, driver="gpu.nri.io", dir="", registry_dir="", cdi_dir="", devices=devices, counter_sets=sets
    )


def _device(n: int, kind: int) -> OfferedDevice:
    counted = kind == 3
    return OfferedDevice(
        name=f"gpu-{n}",
        attributes={"kind": kind},
        capacity={"memory": Capacity(80, 20)},
        taints=(BAD,) if kind in (1, 2) else (),
        shared=kind == 4,
        counter_set=f"set-{n // 7}" if counted else "",
        counters={"slices": 1} if counted else {},
    )


Slices = dict[str, ResourceSlice]


def steps(wanted: NodeView, gates: frozenset[Gate], there: Slices) -> Iterator[Slices]:
    """What is on the server after each write."""
    writes = plan_writes(slice_specs(wanted, NODE, gates), there.values())
    there = dict(there)
    for each in writes.delete:
        del there[each.metadata.name]
        yield dict(there)
    for each in (*writes.update, *writes.create):
        there[each.metadata.name] = each
        yield dict(there)


def after(wanted: NodeView, gates: frozenset[Gate], there: Slices) -> Slices:
    return [there, *steps(wanted, gates, there)][-1]


def seen(there: Slices) -> list[object] | None:
    """Devices as the scheduler would use them; None where it waits for the rest of the pool."""
    newest = max((each.spec.pool.generation for each in there.values()), default=0)
    pool = [there[name].spec for name in sorted(there) if there[name].spec.pool.generation == newest]
    if any(spec.pool.resource_slice_count != len(pool) for spec in pool):
        return None
    return [device for spec in pool for device in spec.devices]


GATES: Final = st.frozensets(st.sampled_from(Gate))


@given(st.lists(st.tuples(views(), GATES, st.booleans()), min_size=1, max_size=4), st.data())
def test_the_writes_lead_to_what_is_wanted_and_then_there_are_none(
    history: Sequence[tuple[NodeView, frozenset[Gate], bool]], data: st.DataObject
) -> None:
    there: Slices = {}
    for view, gates, away in history:
        wanted = without_daemon(view) if away and Gate.TAINTS in gates else view
        before = seen(there)
        for step in steps(wanted, gates, there):
            assert seen(step) in (None, [], before, seen(after(wanted, gates, there)))
        there = after(wanted, gates, there)
        assert not plan_writes(slice_specs(wanted, NODE, gates), there.values())
        devices = seen(there)
        assert devices is not None
        shown = [each for each in wanted.devices if Gate.TAINTS in gates or not each.taints]
        assert [each.name for spec in _in_order(there) for each in spec.spec.devices] == [each.name for each in shown]
        assert all(gates_of(each.spec) <= gates for each in there.values())
        # The kubelet, or somebody else, removes some of them.
        gone = data.draw(st.sets(st.sampled_from(sorted(there)))) if there else set()
        there = {name: each for name, each in there.items() if name not in gone}
        assert seen(after(wanted, gates, there)) == devices


@given(views(), st.integers(0, 200))
def test_one_devices_health_is_one_write(view: NodeView, place: int) -> None:
    gates = frozenset(Gate)
    there = after(view, gates, {})
    if view.devices:
        n = place % len(view.devices)
        sick = replace(view.devices[n], taints=(*view.devices[n].taints, replace(BAD, key="gpu.nri.io/held")))
        changed = replace(view, devices=(*view.devices[:n], sick, *view.devices[n + 1 :]))
        writes = plan_writes(slice_specs(changed, NODE, gates), there.values())
        assert (len(writes.update), writes.create, writes.delete) == (1, (), ())


def _in_order(there: Slices) -> list[ResourceSlice]:
    return [there[name] for name in sorted(there)]
