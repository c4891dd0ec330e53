from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.messages import matches, why_not
from nri_gpu.allocation.placement import Asker, place
from nri_gpu.domain.claim import Mode, Strategy
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.gpu import Gpu, PciBusId, Unit, whole
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.request.parse import parse_claim
from tests.support import builders as make
from tests.support.fabrics import KNOWN

ME, OTHER, THIRD = make.container(of="me"), make.container(of="other"), make.container(of="third")
SIDE = make.container(of="me", name="side")
EXCLUSIVE, SHARED = Mode.EXCLUSIVE, Mode.SHARED
FREE = Ledger()
# GPU 1 is lost, GPU 2 cut by MIG.
WORN = (make.gpu(0), make.gpu(1, unavailable="nvmlDeviceGetName: GPU is lost (15)"), make.gpu(2, mig_enabled=True))
MIXED = (make.gpu(0), make.gpu(1, model="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, arch=(9, 0)))
LOST = make.inventory([make.gpu(0)], faults=(GpuFault(1, "nvmlDeviceGetUUID: GPU is lost (15)"),))
MISSED = GpuFault(1, "bad since today", uuid="GPU-1badbad1-0000-4000-8000-000000000001", pci_bus_id="0000:99:00.0")
GONE = make.inventory([make.gpu(0)], faults=(MISSED,))


def asked(
    text: str, found: Sequence[Gpu] | Inventory, ledger: Ledger | None = None, mode: Mode = EXCLUSIVE
) -> tuple[Unit, ...] | Reason:
    claim = parse_claim(make.KEY, text)
    inventory = found if isinstance(found, Inventory) else make.inventory(found)
    return place(claim, Asker(ME.pod.uid, claim.mode or mode), inventory, ledger or Ledger())


def indices(text: str, found: Sequence[Gpu], ledger: Ledger | None = None) -> list[int]:
    chosen = asked(text, found, ledger)
    assert not isinstance(chosen, Reason), chosen
    return [whole(unit).index for unit in chosen]


def refusal(text: str, found: Sequence[Gpu] | Inventory, ledger: Ledger | None = None) -> Reason:
    reason = asked(text, found, ledger)
    assert isinstance(reason, Reason), reason
    assert str(reason).endswith(".")
    assert len(str(reason)) < REFUSAL_MAX
    return reason


CHOSEN: dict[str, tuple[str, Sequence[Gpu], Ledger, list[int]]] = {
    "none": ("none", make.gpus(), Ledger(), []),
    "all": ("all", make.gpus(), Ledger(), [0, 1, 2, 3]),
    "all that can be granted": ("all", WORN, Ledger(), [0]),
    "all that fit": ("all;model=*h100*", MIXED, Ledger(), [1]),
    "count takes the lowest first": ("2", make.gpus(), Ledger(), [0, 1]),
    "count skips what cannot be granted": ("1", (*WORN[1:], make.gpu(3)), Ledger(), [3]),
    "count skips the busy": ("2", make.gpus(), make.ledger(make.entry(0, 2, to=OTHER)), [1, 3]),
    "count skips what others' injectors gave": ("2", make.gpus(), make.ledger(others=[make.foreign(0)]), [1, 2]),
    "a pod's next container gets gpus of its own": ("2", make.gpus(), make.ledger(make.entry(0, 1, to=SIDE)), [2, 3]),
    "and shares the pod's when there are no more": (
        "1",
        make.gpus(2),
        make.ledger(make.entry(0, to=SIDE), make.entry(1, to=OTHER)),
        [0],
    ),
    "shared takes the least loaded": (
        "1;mode=shared",
        make.gpus(3),
        make.ledger(make.entry(0, 1, to=OTHER, mode=SHARED), make.entry(0, 2, to=THIRD, mode=SHARED)),
        [1],
    ),
    "shared counts others' injectors as load": (
        "1;mode=shared",
        make.gpus(2),
        make.ledger(others=[make.foreign(0)]),
        [1],
    ),
    "shared still comes in nvml order": (
        "2;mode=shared",
        make.gpus(3),
        make.ledger(make.entry(0, to=OTHER, mode=SHARED), make.entry(0, 1, to=THIRD, mode=SHARED)),
        [1, 2],
    ),
    "shared prefers what the pod has, among the equally loaded": (
        "1;mode=shared",
        make.gpus(2),
        make.ledger(make.entry(0, to=OTHER, mode=SHARED), make.entry(1, to=SIDE, mode=SHARED)),
        [1],
    ),
    "but not before a less loaded one": (
        "1;mode=shared",
        make.gpus(3),
        make.ledger(make.entry(0, to=SIDE, mode=SHARED)),
        [1],
    ),
    "selectors alone mean one": ("memory>=40Gi", MIXED, Ledger(), [0]),
    "by index": ("device=2,0", make.gpus(), Ledger(), [0, 2]),
    "by uuid": (f"device={make.uuid(3)}", make.gpus(), Ledger(), [3]),
    "by the beginning of one": (f"device={make.uuid(3)[:12]}", make.gpus(), Ledger(), [3]),
    "by uuid in capitals": (f"device=GPU-{make.uuid(3)[4:].upper()}", make.gpus(), Ledger(), [3]),
    "by bus id": ("device=0000:12:00.0", make.gpus(), Ledger(), [2]),
    "by bus id as nvml prints it": ("device=00000000:12:00.0", make.gpus(), Ledger(), [2]),
    "one gpu by two names": (f"device=1,{make.uuid(1)}", make.gpus(), Ledger(), [1]),
    "by name with selectors that fit": ("device=1;arch>=9.0", MIXED, Ledger(), [1]),
    "named and held by the own pod": ("device=1", make.gpus(), make.ledger(make.entry(1, to=SIDE)), [1]),
}


@pytest.mark.parametrize(("text", "found", "ledger", "chosen"), CHOSEN.values(), ids=CHOSEN)
def test_what_a_claim_gets(text: str, found: Sequence[Gpu], ledger: Ledger, chosen: list[int]) -> None:
    assert indices(text, found, ledger) == chosen


PCIE_8 = KNOWN["8 x PCIe"]
LINKED: dict[str, tuple[str, Inventory, Ledger, list[int]]] = {
    "the best linked": ("2", PCIE_8, make.ledger(make.entry(0, 3, to=OTHER)), [4, 5]),
    "one that breaks no switch": ("1", PCIE_8, make.ledger(make.entry(5, to=OTHER)), [4]),
    "lost ones leave no room": (
        "1",
        replace(PCIE_8, gpus=(make.gpu(0, unavailable="lost"), *PCIE_8.gpus[1:])),
        FREE,
        [1],
    ),
    "near what the pod has": ("1", PCIE_8, make.ledger(make.entry(6, to=SIDE), make.entry(0, to=OTHER)), [7]),
    "beside what it must share": (
        "2",
        PCIE_8,
        make.ledger(make.entry(5, to=SIDE), make.entry(0, 1, 2, 3, 4, 6, to=OTHER)),
        [5, 7],
    ),
    "shared, the best linked of the least loaded": (
        "2;mode=shared",
        PCIE_8,
        make.ledger(make.entry(0, 1, 3, 5, to=OTHER, mode=SHARED)),
        [6, 7],
    ),
    "shared, linked to the less loaded": (
        "2;mode=shared",
        PCIE_8,
        make.ledger(make.entry(0, 1, 2, 3, 4, 5, 7, to=OTHER, mode=SHARED)),
        [6, 7],
    ),
    "that fit the selectors": ("2;memory>=40Gi", PCIE_8, make.ledger(make.entry(0, to=OTHER)), [2, 3]),
}


@pytest.mark.parametrize(("text", "found", "ledger", "chosen"), LINKED.values(), ids=LINKED)
def test_which_of_many(text: str, found: Inventory, ledger: Ledger, chosen: list[int]) -> None:
    units = asked(text, found, ledger)
    assert not isinstance(units, Reason), units
    assert [whole(unit).index for unit in units] == chosen


def test_spread_takes_a_switch_of_its_own() -> None:
    asker = Asker(ME.pod.uid, EXCLUSIVE, Strategy.SPREAD)
    units = place(parse_claim(make.KEY, "1"), asker, PCIE_8, make.ledger(make.entry(0, to=OTHER)))
    assert not isinstance(units, Reason)
    assert [whole(unit).index for unit in units] == [4]


HELD = make.ledger(make.entry(0, to=OTHER))
HELD_SHARED = make.ledger(make.entry(0, to=OTHER, mode=SHARED))
HELD_ABROAD = make.ledger(others=[make.foreign(0)])
ALL_HELD = make.ledger(make.entry(0, 1, 2, 3, to=OTHER))
REFUSED: dict[str, tuple[str, Sequence[Gpu] | Inventory, Ledger, Code, tuple[str, ...]]] = {
    "no gpus at all": ("all", (), Ledger(), Code.NO_SUCH_GPU, ("no GPU that can be granted", "another node")),
    "none that works": ("1", WORN[1:], Ledger(), Code.NO_SUCH_GPU, ("GPU 1: nvml", "GPU 2: it is in MIG mode")),
    "all of none that works": ("all", WORN[1:], Ledger(), Code.NO_SUCH_GPU, ("GPU 2: it is in MIG mode",)),
    "too many": ("5", make.gpus(), Ledger(), Code.NO_SUCH_GPU, ("asked for 5 GPUs", "has 4 that can be", "fewer")),
    "too many with selectors": ("2;arch>=9.0", MIXED, Ledger(), Code.NO_SUCH_GPU, ("has 1 that fit the selectors",)),
    "no such model": ("model=B200", MIXED, Ledger(), Code.NO_SUCH_GPU, ("'model=B200'", "A100", "H100", "loosen")),
    "no such index": ("device=9", make.gpus(), Ledger(), Code.NO_SUCH_GPU, ("no GPU '9'; it has GPUs 0, 1, 2, 3.",)),
    "no such uuid": ("device=GPU-ffff", make.gpus(), Ledger(), Code.NO_SUCH_GPU, ("no GPU 'GPU-ffff'",)),
    "no gpus to name": ("device=0", (), Ledger(), Code.NO_SUCH_GPU, ("it has no GPUs",)),
    "beginning of several": ("device=GPU-0000", make.gpus(), Ledger(), Code.BAD_REQUEST, ("4 UUIDs", "write more")),
    "named and lost": ("device=1", WORN, Ledger(), Code.GPU_UNAVAILABLE, ("GPU is lost", "ask for another", "dmesg")),
    "named and gone": ("device=1", LOST, Ledger(), Code.GPU_UNAVAILABLE, ("GPU 1 cannot", "GPU is lost (15);")),
    "missed by its UUID": (f"device={MISSED.uuid}", GONE, Ledger(), Code.GPU_UNAVAILABLE, ("GPU 1", "bad since today")),
    "missed by its beginning": ("device=GPU-1badbad1", GONE, Ledger(), Code.GPU_UNAVAILABLE, ("bad since today",)),
    "missed by its bus id": ("device=0000:99:00.0", GONE, Ledger(), Code.GPU_UNAVAILABLE, ("bad since today",)),
    "named and cut": ("device=2", WORN, Ledger(), Code.GPU_UNAVAILABLE, ("MIG mode",)),
    "named and does not fit": ("device=0;arch>=9.0", MIXED, Ledger(), Code.NO_SUCH_GPU, ("A100", "drop them")),
    "named and busy": ("device=0", make.gpus(), HELD, Code.GPU_BUSY, ("exclusively by ml/other", "shared on both")),
    "named shared and busy": (
        "device=0;mode=shared",
        make.gpus(),
        HELD,
        Code.GPU_BUSY,
        ("exclusively by ml/other", "in shared mode", "set mode=shared on the holder"),
    ),
    "named and shared already": (
        "device=0",
        make.gpus(),
        HELD_SHARED,
        Code.GPU_BUSY,
        ("in shared mode by ml/other", "set mode=shared here"),
    ),
    "named and another injector's": (
        "device=0",
        make.gpus(),
        HELD_ABROAD,
        Code.GPU_BUSY,
        ("held by ml/plugin (not through nri-gpu)", "set mode=shared here"),
    ),
    "all but one is busy": ("all", make.gpus(), HELD, Code.GPU_BUSY, ("GPU 0 ", "held exclusively by ml/other")),
    "own pod in the other mode": (
        "device=0;mode=shared",
        make.gpus(),
        make.ledger(make.entry(0, to=SIDE)),
        Code.GPU_BUSY,
        ("exclusively by ml/me",),
    ),
    "everything is held": (
        "1",
        make.gpus(),
        ALL_HELD,
        Code.GPU_BUSY,
        ("of the 4 that fit none can be granted", "held by ml/other: wait", "or set mode=shared on both."),
    ),
    "everything is shared": (
        "1",
        make.gpus(1),
        HELD_SHARED,
        Code.GPU_BUSY,
        ("in exclusive mode", "or set mode=shared here."),
    ),
    "too many are held": (
        "4",
        make.gpus(),
        HELD,
        Code.GPU_BUSY,
        ("asked for 4 GPUs", "3 can be granted", "ask for fewer"),
    ),
    "too many are another injector's": (
        "4",
        make.gpus(),
        HELD_ABROAD,
        Code.GPU_BUSY,
        ("held by ml/plugin (not through nri-gpu):",),
    ),
}


@pytest.mark.parametrize(("text", "found", "ledger", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_why_a_claim_gets_nothing(
    text: str, found: Sequence[Gpu] | Inventory, ledger: Ledger, code: Code, words: tuple[str, ...]
) -> None:
    reason = refusal(text, found, ledger)
    assert reason.code is code
    assert all(word in str(reason) for word in words), str(reason)


def test_the_holders_of_gpus_that_can_be_had_are_not_blamed() -> None:
    ledger = make.ledger(make.entry(0, to=SIDE), make.entry(1, to=OTHER))
    assert "ml/me" not in refusal("4", make.gpus(), ledger).sentence


LONG = "n" * 63 + "/" + "p" * 253
FULL = make.ledger(
    *(
        make.entry(0, to=make.container(of=make.pod(f"{number}" + "p" * 252, namespace="n" * 63)), mode=SHARED)
        for number in range(30)
    )
)
CROWDED = {
    "many holders of one gpu": ("device=0", make.gpus(), FULL),
    "many holders of all": ("1", make.gpus(1), FULL),
    "a long value": ("model=" + "x" * 64 + " " * 3000, make.gpus(), Ledger()),
    "many models": ("model=x", [make.gpu(n, model=f"{n:096}") for n in range(99)], Ledger()),
    "many gpus": ("device=999", make.gpus(200), Ledger()),
    "many lost": ("1", [make.gpu(n, unavailable="y" * 999) for n in range(99)], Ledger()),
    "a long reason": ("device=0", [make.gpu(0, unavailable="y" * 999)], Ledger()),
}


@pytest.mark.parametrize(("text", "found", "ledger"), CROWDED.values(), ids=CROWDED)
def test_however_much_there_is_to_say_the_end_says_what_to_do(text: str, found: Sequence[Gpu], ledger: Ledger) -> None:
    refusal(text, found, ledger)


def test_equal_holders_are_named_once_and_the_rest_are_counted() -> None:
    entries = [
        make.entry(0, to=make.container(of=pod, name=name), mode=SHARED)
        for pod in ("a", "b", "c", "d", "e")
        for name in ("1", "2")
    ]
    assert "by ml/a, ml/b, ml/c and 2 more," in refusal("device=0", make.gpus(), make.ledger(*entries)).sentence


FITS = {
    "glob": ("model=*A100*", True),
    "glob in another case": ("model=nvidia a100*", True),
    "glob must match whole": ("model=A100", False),
    "glob with a set": ("model=*[ah]100*", True),
    "broken set": ("model=*[z-a]*", False),
    "open set": ("model=[", False),
    "memory just enough": ("memory>=40960Mi", True),
    "memory one more": (f"memory>{40960 * 2**20}", False),
    "memory equal": ("memory=40Gi", True),
    "memory at most": ("memory<=40Gi", True),
    "memory below": ("memory<40Gi", False),
    "arch by number, not by text": ("arch<8.10", True),
    "arch equal": ("arch=8.0", True),
    "several, one wrong": ("model=*A100*;arch>=9.0", False),
}


@pytest.mark.parametrize(("text", "fits"), FITS.values(), ids=FITS)
def test_selectors(text: str, fits: bool) -> None:
    assert matches(make.gpu(), parse_claim(make.KEY, text).selectors) is fits


def test_why_a_gpu_is_for_nobody() -> None:
    assert [why_not(gpu) for gpu in WORN] == ["", "nvmlDeviceGetName: GPU is lost (15)", "it is in MIG mode"]


def test_a_bus_id_is_no_beginning_of_another() -> None:
    found = [make.gpu(0), replace(make.gpu(1), pci_bus_id=PciBusId("00010000:10:00.0"))]
    assert indices("device=0000:10:00.0", found) == [0]
