"""Which resources a node has, of which devices: NVIDIA's table of MIG strategies, but for what has a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.node import GpuFault
from nri_gpu.policy.kubelet import KubeletSettings, MigStrategy
from tests.support.builders import gpu, mig_gpu, mig_uuid, uuid
from tests.unit.kubelet.station import GPU, Halves

NONE, SINGLE, MIXED = MigStrategy.NONE, MigStrategy.SINGLE, MigStrategy.MIXED
SMALL, MEDIA, LARGE = (f"nvidia.com/mig-{profile}" for profile in ("1g.5gb", "1g.5gb.me", "3g.20gb"))

Table = dict[str, list[tuple[str, bool]]]


def up(*ids: str) -> list[tuple[str, bool]]:
    return [(id_, True) for id_ in ids]


def down(*ids: str) -> list[tuple[str, bool]]:
    return [(id_, False) for id_ in ids]


WHOLE: Final = (gpu(0), gpu(1))
ALIKE: Final = (mig_gpu(0), mig_gpu(1))
UNLIKE: Final = (mig_gpu(0, ["1g.5gb", "3g.20gb"]), mig_gpu(1))
ONE_EMPTY: Final = (mig_gpu(0), mig_gpu(1, []))
ALL_EMPTY: Final = (mig_gpu(0, []), mig_gpu(1, []))
PART: Final = (mig_gpu(0, ["1g.5gb+me", "1g.5gb"]), gpu(1))
SLICES: Final = (mig_gpu(0, ["1c.3g.20gb", "3g.20gb"]), gpu(1))

# What differs from their table is in docs/kubernetes.md, "Differences from NVIDIA's device plugin".
TABLE: Final[dict[str, tuple[MigStrategy, Sequence[Gpu], Table]]] = {
    "none, no MIG": (NONE, WHOLE, {GPU: up(uuid(0), uuid(1))}),
    # Theirs offers a GPU in MIG mode whole, and no program finds a device on it.
    "none, all MIG": (NONE, ALIKE, {GPU: down(uuid(0), uuid(1))}),
    "none, part MIG": (NONE, PART, {GPU: down(uuid(0)) + up(uuid(1))}),
    "none, empty MIG": (NONE, ONE_EMPTY, {GPU: down(uuid(0), uuid(1))}),
    "single, no MIG": (SINGLE, WHOLE, {GPU: up(uuid(0), uuid(1))}),
    "single, all alike": (SINGLE, ALIKE, {GPU: up(mig_uuid(0, 0), mig_uuid(0, 1), mig_uuid(1, 0), mig_uuid(1, 1))}),
    # Theirs ends with an error in these four; ours offers none of them and goes on.
    "single, two profiles": (SINGLE, UNLIKE, {GPU: []}),
    "single, an empty one": (SINGLE, ONE_EMPTY, {GPU: []}),
    "single, part MIG": (SINGLE, PART, {GPU: []}),
    "single, all empty": (SINGLE, ALL_EMPTY, {GPU: []}),
    "mixed, no MIG": (MIXED, WHOLE, {GPU: up(uuid(0), uuid(1))}),
    "mixed, all alike": (
        MIXED,
        ALIKE,
        {GPU: [], SMALL: up(mig_uuid(0, 0), mig_uuid(0, 1), mig_uuid(1, 0), mig_uuid(1, 1))},
    ),
    "mixed, two profiles": (
        MIXED,
        UNLIKE,
        {GPU: [], SMALL: up(mig_uuid(0, 0), mig_uuid(1, 0), mig_uuid(1, 1)), LARGE: up(mig_uuid(0, 1))},
    ),
    "mixed, part MIG": (MIXED, PART, {GPU: up(uuid(1)), MEDIA: up(mig_uuid(0, 0)), SMALL: up(mig_uuid(0, 1))}),
    "mixed, an empty one": (MIXED, ONE_EMPTY, {GPU: [], SMALL: up(mig_uuid(0, 0), mig_uuid(0, 1))}),
    "mixed, all empty": (MIXED, ALL_EMPTY, {GPU: []}),
    "mixed, a compute instance within": (MIXED, SLICES, {GPU: up(uuid(1)), LARGE: up(mig_uuid(0, 1))}),
}


@pytest.mark.parametrize(("strategy", "gpus", "expected"), TABLE.values(), ids=TABLE)
def test_what_each_strategy_offers(strategy: MigStrategy, gpus: Sequence[Gpu], expected: Table) -> None:
    assert offered(KubeletSettings(mig_strategy=strategy), gpus) == expected


def offered(settings: KubeletSettings, gpus: Sequence[Gpu]) -> Table:
    halves = Halves(settings=settings)
    halves.put_gpus(gpus)
    return {
        name: [(device.id, not device.why) for device in halves.offers.devices(name)]
        for name in halves.offers.resources()
    }


def test_replicas_of_mig_devices_by_another_name() -> None:
    settings = KubeletSettings(mig_strategy=MIXED, replicas=2, rename=True)
    assert offered(settings, (mig_gpu(0, ["1g.5gb+me"]), gpu(1))) == {
        "nvidia.com/gpu.shared": up(f"{uuid(1)}::0", f"{uuid(1)}::1"),
        "nvidia.com/mig-1g.5gb.me.shared": up(f"{mig_uuid(0)}::0", f"{mig_uuid(0)}::1"),
    }
    assert offered(KubeletSettings(mig_strategy=SINGLE, replicas=2), (mig_gpu(0, ["1g.5gb"]),)) == {
        GPU: up(f"{mig_uuid(0)}::0", f"{mig_uuid(0)}::1")
    }


def test_names_keep_to_what_a_resource_may_be_called() -> None:
    """NVIDIA's plugin refuses longer ones than 63."""
    settings = KubeletSettings(resource=f"{'x' * 33}.io/gpu", mig_strategy=MIXED, replicas=2, rename=True)
    names = offered(settings, (mig_gpu(0, ["7g.80gb+me"]),))
    assert max(map(len, names)) == 58


def test_another_prefix_is_that_of_profiles_too() -> None:
    settings = KubeletSettings(resource="example.com/accelerator", mig_strategy=MIXED)
    assert list(offered(settings, PART)) == [
        "example.com/accelerator",
        "example.com/mig-1g.5gb.me",
        "example.com/mig-1g.5gb",
    ]


def test_a_profile_that_is_cut_away_keeps_its_resource_without_devices() -> None:
    """The kubelet forgets only what it is told; and a driver that stammers has not removed anything."""
    halves = Halves(settings=KubeletSettings(mig_strategy=MIXED))
    halves.put_gpus([mig_gpu(0), gpu(1)])
    assert [len(halves.offers.devices(name)) for name in halves.offers.resources()] == [1, 2]
    halves.put_gpus([gpu(1)], faults=(GpuFault(0, "GPU is lost"),))
    assert [bool(device.why) for device in halves.offers.devices(SMALL)] == [True, True]
    halves.put_gpus([gpu(0), gpu(1)], faults=())
    assert [len(halves.offers.devices(name)) for name in halves.offers.resources()] == [2, 0]


def test_two_containers_in_one_question() -> None:
    """A kubelet sends one, the messages hold many."""
    halves = Halves()
    first, second = halves.offers.allocate(GPU, [[uuid(3), uuid(1)], [uuid(0)]])
    ((key, one),), ((_, two),) = first.annotations.items(), second.annotations.items()
    assert key == "gpu.nri.io/kubelet.nvidia.com_gpu"
    assert f"ids={uuid(1)},{uuid(3)};" in one
    assert f"ids={uuid(0)};" in two
    assert {device.uuid for device in halves.plugin.ledger.reservations} == {uuid(0), uuid(1), uuid(3)}
