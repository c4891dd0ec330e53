"""What the kubelet allocates anew replaces what is reserved for a pod whose sandbox is gone, by whatever device id."""

from __future__ import annotations

from typing import Final

import pytest

from nri_gpu.domain.allocation import REPLICA, Allocated, AllocatedDevice, ClaimUid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.apply import cleared_for
from nri_gpu.ledger.events import (
    DevicesAllocated,
    LedgerEvent,
    ListedDevice,
    PodGone,
    Reconciled,
    SandboxForgotten,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.ledger import Ledger, Live
from nri_gpu.ledger.reservations import OPEN_S, reservation_of
from tests.support import builders as make
from tests.support.builders import uuid
from tests.support.ledgers import after

OLD: Final = AllocatedDevice("nvidia.com/gpu", uuid(0))
NEW: Final = AllocatedDevice("example.com/gpu", uuid(0))
REPLICAS: Final = tuple(AllocatedDevice("nvidia.com/gpu", f"{uuid(0)}{REPLICA}{number}") for number in (0, 1))
OTHER: Final = AllocatedDevice("example.com/gpu", uuid(1))
POD: Final = make.pod("old")
LISTED: Final = ListedDevice(NEW, "ml", "new", "main", shared=False, pod=make.pod("new"))
GONE: Final[list[LedgerEvent]] = [PodGone(1.0, POD.id), SandboxForgotten(1.0, POD.id)]


def reserved(device: AllocatedDevice = OLD, mode: Mode = Mode.EXCLUSIVE) -> Ledger:
    """A ledger with a device reserved for the old pod."""
    grant = make.grant(0, to=make.container(of=POD))
    return Ledger().with_reservation(reservation_of(device, grant, mode, 0.0, None))


@pytest.mark.parametrize("gone", GONE, ids=["told", "forgotten"])
@pytest.mark.parametrize(
    "newer",
    [
        DevicesAllocated(2.0, (NEW,)),
        DevicesAllocated(2.0, REPLICAS[:1], shared=True),
        Reconciled(2.0, (LISTED,), frozenset()),
    ],
    ids=["allocated", "allocated as a replica", "listed"],
)
def test_a_newer_allocation_replaces_one_whose_sandbox_is_gone(gone: LedgerEvent, newer: LedgerEvent) -> None:
    assert OLD in after(reserved(), newer).reservations  # its pod may come again for it
    replaced = after(reserved(), gone, newer)
    assert len(replaced.reservations) == 1
    assert OLD not in replaced.reservations


@pytest.mark.parametrize("gone", GONE, ids=["told", "forgotten"])
def test_it_stays_until_then(gone: LedgerEvent) -> None:
    assert OLD in after(reserved(), gone, DevicesAllocated(2.0, (OTHER,)), Ticked(OPEN_S)).reservations


def test_replicas_go_with_each_other() -> None:
    first, second = REPLICAS
    gone = after(reserved(first, Mode.SHARED), GONE[0], DevicesAllocated(2.0, (second,), shared=True))
    assert gone.reservations.keys() == {first, second}


def test_one_that_is_listed_for_its_pod_again_is_nobody_elses() -> None:
    anew = ListedDevice(OLD, "ml", "old", "main", shared=False, pod=make.pod("old", id="anew"))
    listed = after(reserved(), GONE[0], Reconciled(2.0, (anew, LISTED), frozenset()))
    assert listed.reservations.keys() == {OLD, NEW}
    assert OLD in after(listed, DevicesAllocated(3.0, (NEW,))).reservations


def test_a_container_that_another_device_plugin_gave_the_gpu_finds_it() -> None:
    """PodResources has told of its pod, and will list all pods only later."""
    asking = make.container(of="new", kubelet=Allocated((NEW,)))
    assert OLD in cleared_for(reserved(), asking, 2.0).reservations
    assert not cleared_for(after(reserved(), GONE[0]), asking, 2.0).reservations


def test_a_claim_that_only_monitors_a_gpu_ends_no_reservation() -> None:
    monitors = Allocated((NEW,), key="claim ml/watch", claims=(ClaimUid("watch"),), admin=True)
    asking = make.container(of="new", kubelet=monitors)
    assert OLD in cleared_for(after(reserved(), GONE[0]), asking, 2.0).reservations


def test_none_lapses_while_a_container_of_its_pod_runs_that_another_plugin_served() -> None:
    """The kubelet's socket may be silent for long, and the GPU would count twice from then on."""
    numbers = frozenset({(195, make.gpu(0).minor_number)})
    has = Live(make.container(of=POD).id, "main", POD.id, POD.full_name, numbers)
    running = after(reserved(), Synchronized(0.0, frozenset({has.container_id}), lives=(has,)))
    assert running.external
    assert OLD in after(running, Ticked(2 * OPEN_S)).reservations
    assert not after(running, PodGone(1.0, POD.id), Ticked(2 * OPEN_S)).reservations
