"""Which GPUs and MIG devices a claim gets on a node, and the sentence where it gets none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from nri_gpu.decision.eligible import node_fault
from nri_gpu.decision.placement import Asker, place
from nri_gpu.decision.refusals import busy, matches, why_not
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart, PciBusId, Unit
from nri_gpu.domain.gpu_request import Mode, Strategy
from nri_gpu.domain.node import GpuFault, Inventory, KernelGpu
from nri_gpu.ledger.holders import Releasing, Usage
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.request.annotation import parse_claim
from tests.support import builders as make
from tests.support.fabrics import KNOWN

Found = Sequence[Gpu] | Inventory
ME, SIDE, OTHER = make.container(of="me"), make.container(of="me", name="side"), make.container(of="other")
SHARED, PACK = Mode.SHARED, Strategy.PACK
FREE, FOUR = Ledger(), make.gpus()
# GPU 1 is lost, GPU 2 cut by MIG.
WORN = (make.gpu(0), make.gpu(1, unavailable="nvmlDeviceGetName: GPU is lost (15)"), make.gpu(2, mig_enabled=True))
# As GB10, which shares the host's memory: its own is unknown, and so is what the file leaves out.
UNKNOWN = make.gpu(1, memory_bytes=None, arch=None)
FAR = make.gpu(1, pci_bus_id=PciBusId("10000:3b:00.0"))  # as on Hyper-V
DARK_PART = (make.mig_gpu(2, mig=(make.mig(2, 0, memory_bytes=None),)),)
MIXED = (make.gpu(0), make.gpu(1, model="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, arch=(9, 0)))
LOST = make.inventory([make.gpu(0)], faults=(GpuFault(1, "nvmlDeviceGetUUID: GPU is lost (15)"),))
MISSED = GpuFault(1, "bad since today", uuid="GPU-1badbad1-0000-4000-8000-000000000001", pci_bus_id="0000:99:00.0")
GONE = make.inventory([make.gpu(0)], faults=(MISSED,))
PCIE_8 = KNOWN["8 x PCIe"]
SMALL, BIG = "1g.5gb", "3g.20gb"
# GPU 0 is whole, GPU 1 cut in three, GPU 2 in two; GPU 3 is in MIG mode and not cut.
CUT = (make.gpu(0), make.mig_gpu(1, [SMALL, BIG, SMALL]), make.mig_gpu(2, [SMALL, SMALL]), make.mig_gpu(3, []))
LOST_CUT = (make.mig_gpu(1, unavailable="nvmlDeviceGetName: GPU is lost (15)"),)
VAGUE = (make.mig_gpu(1, mig=(make.mig(1, 0, compute_instance_minor=None), make.mig(1, 1))),)
# What the kernel shows and NVML does not list: named in refusals, granted to nobody.
AWAY_UUID = "GPU-77777777-0000-4000-8000-000000000000"
AWAY = KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="bound to vfio-pci, for a virtual machine", uuid=AWAY_UUID)
ALONE, BESIDE = (make.inventory(found, unlisted=(AWAY,)) for found in ([], [make.gpu(0)]))


def placed(text: str, found: Found, ledger: Ledger, strategy: Strategy = PACK) -> tuple[Unit, ...] | Reason:
    claim = parse_claim(make.KEY, text)
    inventory = found if isinstance(found, Inventory) else make.inventory(found)
    return place(claim, Asker(ME.pod.uid, claim.mode or Mode.EXCLUSIVE, strategy), inventory, ledger.usage())


def chosen(text: str, found: Found, ledger: Ledger, strategy: Strategy = PACK) -> str:
    """A GPU by its index, a MIG device by both, as in `0 2:1`."""
    units = placed(text, found, ledger, strategy)
    assert not isinstance(units, Reason), units
    return " ".join(unit.place if isinstance(unit, MigPart) else str(unit.index) for unit in units)


def refusal(text: str, found: Found, ledger: Ledger = FREE) -> Reason:
    reason = placed(text, found, ledger)
    assert isinstance(reason, Reason), reason
    assert str(reason).endswith(".")
    assert len(str(reason)) < REFUSAL_MAX
    return reason


def held(*indices: int, mode: Mode = Mode.EXCLUSIVE) -> Ledger:
    """By another pod."""
    return make.ledger(make.entry(*indices, to=OTHER, mode=mode))


def cut(*uuids: GpuUuid, mode: Mode = Mode.EXCLUSIVE) -> Ledger:
    """MIG devices held by another pod."""
    return make.ledger(make.entry_of(*uuids, to=OTHER, mode=mode))


part = make.mig_uuid
HELD, HELD_SHARED, ALL_HELD = held(0), held(0, mode=SHARED), held(0, 1, 2, 3)
HELD_ABROAD = make.ledger(others=[make.foreign(0)])
OWN_AND_OTHERS = make.ledger(make.entry(5, to=SIDE), make.entry(0, 1, 2, 3, 4, 6, to=OTHER))
PCIE_LOST = replace(PCIE_8, gpus=(make.gpu(0, unavailable="lost"), *PCIE_8.gpus[1:]))
CHOSEN: dict[str, tuple[str, Found, Ledger, str]] = {
    "none": ("none", FOUR, FREE, ""),
    "all": ("all", FOUR, FREE, "0 1 2 3"),
    "all that can be granted": ("all", WORN, FREE, "0"),
    "all that fit": ("all;model=*h100*", MIXED, FREE, "1"),
    "all that NVML lists": ("all", BESIDE, FREE, "0"),
    "count takes the lowest first": ("2", FOUR, FREE, "0 1"),
    "count skips what cannot be granted": ("1", (*WORN[1:], make.gpu(3)), FREE, "3"),
    "count skips what others' injectors gave": ("2", FOUR, HELD_ABROAD, "1 2"),
    "a pod's next container gets gpus of its own": ("2", FOUR, make.ledger(make.entry(0, 1, to=SIDE)), "2 3"),
    "shared counts others' injectors as load": ("1;mode=shared", make.gpus(2), HELD_ABROAD, "1"),
    "selectors alone mean one": ("memory>=40Gi", MIXED, FREE, "0"),
    "by the bus id of a long domain": ("device=00010000:3B:00.0", [make.gpu(0), FAR], FREE, "1"),
    "an unknown number fits nothing, and others do": ("memory<=80Gi", [UNKNOWN, make.gpu(2)], FREE, "2"),
    "an unknown arch fits nothing, and others do": ("all;arch>=0.1", [UNKNOWN, make.gpu(2)], FREE, "2"),
    "by index": ("device=2,0", FOUR, FREE, "0 2"),
    "by the beginning of one": (f"device={make.uuid(3)[:12]}", FOUR, FREE, "3"),
    "by uuid in capitals": (f"device=GPU-{make.uuid(3)[4:].upper()}", FOUR, FREE, "3"),
    "by bus id": ("device=0000:12:00.0", FOUR, FREE, "2"),
    "by bus id as nvml prints it": ("device=00000000:12:00.0", FOUR, FREE, "2"),
    "by a bus id that another ends in": (
        "device=0000:10:00.0",
        (make.gpu(0), make.gpu(1, pci_bus_id=PciBusId("00010000:10:00.0"))),
        FREE,
        "0",
    ),
    "one gpu by two names": (f"device=1,{make.uuid(1)}", FOUR, FREE, "1"),
    "the best linked": ("2", PCIE_8, held(0, 3), "4 5"),
    "one that breaks no switch": ("1", PCIE_8, held(5), "4"),
    "lost ones leave no room": ("1", PCIE_LOST, FREE, "1"),
    "near what the pod has": ("1", PCIE_8, make.ledger(make.entry(6, to=SIDE), make.entry(0, to=OTHER)), "7"),
    "beside what it must share": ("2", PCIE_8, OWN_AND_OTHERS, "5 7"),
    "a MIG device of a profile": (f"mig={SMALL}", CUT, FREE, "1:0"),
    "of several profiles, in nvml order": (f"mig={BIG},{SMALL}:2", CUT, FREE, "1:0 1:1 1:2"),
    "not those that others hold": (f"mig={SMALL}:2", CUT, cut(part(1, 0), part(2, 0)), "1:2 2:1"),
    "the least loaded": (f"mig={SMALL};mode=shared", CUT, cut(part(1, 0), part(1, 2), mode=SHARED), "2:0"),
    "a MIG device by both indices": ("device=2:1", CUT, FREE, "2:1"),
    "a MIG device by uuid": (f"device={part(1, 2)}", CUT, FREE, "1:2"),
    "beside a whole gpu": ("device=2:0,0", CUT, FREE, "0 2:0"),
    "all is whole gpus": ("all", CUT, FREE, "0"),
    "a number is whole gpus": ("1", CUT, FREE, "0"),
}


@pytest.mark.parametrize(("text", "found", "ledger", "expected"), CHOSEN.values(), ids=CHOSEN)
def test_what_a_claim_gets(text: str, found: Found, ledger: Ledger, expected: str) -> None:
    assert chosen(text, found, ledger) == expected


PACKED = {
    "packing breaks no GPU": ("1", PCIE_8, HELD, PACK, "1"),
    "spreading takes a switch of its own": ("1", PCIE_8, HELD, Strategy.SPREAD, "4"),
    "packing leaves GPUs whole": (f"mig={SMALL}", CUT, cut(part(2, 0)), PACK, "2:1"),
    "two of them too": (f"mig={SMALL}:2", CUT, cut(part(2, 0)), PACK, "1:0 2:1"),
    "spreading does not": (f"mig={SMALL}:2", CUT, cut(part(2, 0)), Strategy.SPREAD, "1:0 1:2"),
}


@pytest.mark.parametrize(("text", "found", "ledger", "strategy", "expected"), PACKED.values(), ids=PACKED)
def test_strategies(text: str, found: Found, ledger: Ledger, strategy: Strategy, expected: str) -> None:
    assert chosen(text, found, ledger, strategy) == expected


ALL_SMALL = cut(part(1, 0), part(1, 2), part(2, 0), part(2, 1))
NONE, BUSY, UNAVAILABLE = Code.NO_SUCH_GPU, Code.GPU_BUSY, Code.GPU_UNAVAILABLE
IN_PASSING = ("GPU 0000:70:00.0: bound to vfio-pci",)
BY_NAME = ("GPU 0000:70:00.0 cannot be granted: bound to vfio-pci",)
REFUSED: dict[str, tuple[str, Found, Ledger, Code, tuple[str, ...]]] = {
    "no gpus at all": ("all", (), FREE, NONE, ("no GPU that can be granted", "another node")),
    "none that works": ("1", WORN[1:], FREE, NONE, ("GPU 1: nvml", "GPU 2: it is in MIG mode")),
    "too many": ("5", FOUR, FREE, NONE, ("asked for 5 GPUs", "has 4 that can be", "fewer")),
    "no such model": ("model=B200", MIXED, FREE, NONE, ("'model=B200'", "A100", "H100", "loosen")),
    "no such index": ("device=9", FOUR, FREE, NONE, ("no GPU '9'; it has GPUs 0, 1, 2, 3.",)),
    "no gpus to name": ("device=0", (), FREE, NONE, ("it has no GPUs",)),
    "beginning of several": ("device=GPU-0000", FOUR, FREE, Code.BAD_REQUEST, ("4 UUIDs", "write more")),
    "named and lost": ("device=1", WORN, FREE, UNAVAILABLE, ("GPU is lost", "ask for another", "dmesg")),
    "named and gone": ("device=1", LOST, FREE, UNAVAILABLE, ("GPU 1 cannot", "GPU is lost (15);")),
    "missed by its UUID": (f"device={MISSED.uuid}", GONE, FREE, UNAVAILABLE, ("GPU 1", "bad since today")),
    "named and cut": ("device=2", WORN, FREE, UNAVAILABLE, ("MIG mode",)),
    "named and does not fit": ("device=0;arch>=9.0", MIXED, FREE, NONE, ("A100", "drop the selectors")),
    "memory is unknown": ("memory>=64Gi", [UNKNOWN], FREE, NONE, ("GPU 1: its memory is unknown", "loosen")),
    "memory is unknown, at most": ("memory<=8Gi", [UNKNOWN], FREE, NONE, ("GPU 1: its memory is unknown",)),
    "memory of one is unknown": (
        "2;memory>1Gi",
        [make.gpu(0), UNKNOWN],
        FREE,
        NONE,
        ("has 1 that", "memory is unknown"),
    ),
    "named, and memory is unknown": (
        "device=1;memory<=1Gi",
        [UNKNOWN],
        FREE,
        NONE,
        ("since its memory is unknown: drop",),
    ),
    "arch is unknown": ("arch<9.0", [UNKNOWN], FREE, NONE, ("its compute capability is unknown",)),
    "memory of a MIG device is unknown": (
        f"mig={SMALL};memory<=8Gi",
        DARK_PART,
        FREE,
        NONE,
        ("no MIG devices of profile 1g.5gb", "2:0: its memory is unknown"),
    ),
    "named and busy": ("device=0", FOUR, HELD, BUSY, ("exclusively by ml/other", "shared on both")),
    "named shared and busy": (
        "device=0;mode=shared",
        FOUR,
        HELD,
        BUSY,
        ("exclusively by ml/other", "in shared mode", "set mode=shared on the holder"),
    ),
    "named and shared already": (
        "device=0",
        FOUR,
        HELD_SHARED,
        BUSY,
        ("in shared mode by ml/other", "set mode=shared here"),
    ),
    "named and another injector's": (
        "device=0",
        FOUR,
        HELD_ABROAD,
        BUSY,
        ("held by ml/plugin (not through nri-gpu)", "set mode=shared here"),
    ),
    "all but one is busy": ("all", FOUR, HELD, BUSY, ("GPU 0 ", "held exclusively by ml/other")),
    "everything is held": (
        "1",
        FOUR,
        ALL_HELD,
        BUSY,
        ("of the 4 that fit none can be granted", "held by ml/other: wait", "or set mode=shared on both."),
    ),
    "everything is shared": ("1", FOUR[:1], HELD_SHARED, BUSY, ("in exclusive mode", "or set mode=shared here.")),
    "too many are held": ("4", FOUR, HELD, BUSY, ("asked for 4 GPUs", "3 can be granted", "ask for fewer")),
    "a whole gpu that is cut": ("device=1", CUT, FREE, UNAVAILABLE, ("GPU 1 ", "it is in MIG mode")),
    "more whole gpus than there are": ("2", CUT, FREE, NONE, ("GPU 1: it is in MIG mode",)),
    "no such profile": ("mig=7g.40gb", CUT, FREE, NONE, ("no MIG device", "4 of 1g.5gb, 1 of 3g.20gb")),
    "no MIG devices": ("mig=1g.5gb", CUT[:1], FREE, NONE, ("has no MIG devices of profile 1g.5gb",)),
    "too many MIG devices": (f"mig={SMALL}:5", CUT, FREE, NONE, ("asked for 5", "has 4 MIG devices of profile")),
    "all MIG devices taken": (f"mig={SMALL}", CUT, ALL_SMALL, BUSY, ("1 1g.5gb MIG device in", "held by ml/other")),
    "too many taken": (f"mig={SMALL}:4", CUT, cut(part(1, 0)), BUSY, ("of the 4 that fit 3 can",)),
    "named and taken": ("device=1:0", CUT, cut(part(1, 0)), BUSY, ("MIG device 1:0 (MIG-", "exclusively")),
    "no such MIG device": ("device=1:7", CUT, FREE, NONE, ("no MIG device '1:7'", "1:0, 1:1, 1:2, 2:0, 2:1")),
    "not cut": ("device=0:0", CUT[:1], FREE, NONE, ("no MIG device '0:0'", "it has none")),
    "uuid of several": ("device=MIG-0001", CUT, FREE, Code.BAD_REQUEST, ("beginning of 3 UUIDs",)),
    "of a lost gpu": ("device=1:0", LOST_CUT, FREE, UNAVAILABLE, ("MIG device 1:0", "GPU is lost")),
    "without capability": ("device=1:0", VAGUE, FREE, UNAVAILABLE, ("capability nodes are not known",)),
    "counts only sound ones": ("mig=1g.5gb:2", VAGUE, FREE, NONE, ("has 1 MIG device", "1:0: the min")),
    "unlisted, by its bus id": (f"device={AWAY.pci_bus_id}", ALONE, FREE, UNAVAILABLE, BY_NAME),
    "unlisted, by its UUID": (f"device={AWAY_UUID}", BESIDE, FREE, UNAVAILABLE, BY_NAME),
    "unlisted, by its UUID's beginning": ("device=GPU-7777", BESIDE, FREE, UNAVAILABLE, BY_NAME),
    "unlisted, for a number": ("1", ALONE, FREE, NONE, IN_PASSING),
    "unlisted, for all": ("all", ALONE, FREE, NONE, IN_PASSING),
    "unlisted, for one more": ("2", BESIDE, FREE, NONE, IN_PASSING),
    "unlisted, for another model": ("model=h100", BESIDE, FREE, NONE, IN_PASSING),
    "unlisted, for an index": ("device=0", ALONE, FREE, NONE, IN_PASSING),
    "no beginning of what has no UUID": (
        "device=GPU-7777",
        make.inventory([], unlisted=(replace(AWAY, uuid=""),)),
        FREE,
        NONE,
        (),
    ),
}


@pytest.mark.parametrize(("text", "found", "ledger", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_why_a_claim_gets_nothing(text: str, found: Found, ledger: Ledger, code: Code, words: tuple[str, ...]) -> None:
    reason = refusal(text, found, ledger)
    assert reason.code is code
    assert all(word in str(reason) for word in words), str(reason)


@pytest.mark.parametrize(
    ("kubelet", "cure"), [(False, "ask for other GPUs."), (True, "delete the pod, or all pods that")]
)
def test_what_helps_against_a_release_depends_on_who_chose_the_gpu(kubelet: bool, cure: str) -> None:
    use = Usage(releasing=Releasing(PodUid("left"), "ml/left", 0.0, 30.0))
    reason = busy(FOUR[0], PodUid("next"), Mode.EXCLUSIVE, use, kubelet=kubelet)
    assert f"wait until then, or {cure}" in reason.sentence


def test_the_holders_of_gpus_that_can_be_had_are_not_blamed() -> None:
    ledger = make.ledger(make.entry(0, to=SIDE), make.entry(1, to=OTHER))
    assert "ml/me" not in refusal("4", FOUR, ledger).sentence


LONG_NAMES = [make.pod(f"{number}" + "p" * 252, namespace="n" * 63) for number in range(30)]
FULL = make.ledger(*(make.entry(0, to=make.container(of=pod), mode=SHARED) for pod in LONG_NAMES))
MANY_AWAY = tuple(KernelGpu(pci_bus_id=PciBusId(f"0000:{n:02x}:00.0"), reason="x" * 400) for n in range(16))
CROWDED: dict[str, tuple[str, Found, Ledger]] = {
    "many holders of one gpu": ("device=0", FOUR, FULL),
    "a long value": ("model=" + "x" * 64 + " " * 3000, FOUR, FREE),
    "many models": ("model=x", [make.gpu(n, model=f"{n:096}") for n in range(99)], FREE),
    "many gpus": ("device=999", make.gpus(200), FREE),
    "a long reason": ("device=0", [make.gpu(0, unavailable="y" * 999)], FREE),
    "many unlisted": ("1", make.inventory([], unlisted=MANY_AWAY), FREE),
}


@pytest.mark.parametrize(("text", "found", "ledger"), CROWDED.values(), ids=CROWDED)
def test_however_much_there_is_to_say_the_end_says_what_to_do(text: str, found: Found, ledger: Ledger) -> None:
    refusal(text, found, ledger)


def test_equal_holders_are_named_once_and_the_rest_are_counted() -> None:
    holders = [make.container(of=pod, name=name) for pod in "abcde" for name in ("1", "2")]
    ledger = make.ledger(*(make.entry(0, to=each, mode=SHARED) for each in holders))
    assert "by ml/a, ml/b, ml/c and 2 more," in refusal("device=0", FOUR, ledger).sentence


FITS = {
    "glob": ("model=*A100*", True),
    "glob must match whole": ("model=A100", False),
    "glob with a set": ("model=*[ah]100*", True),
    "broken set": ("model=*[z-a]*", False),
    "open set": ("model=[", False),
    "memory just enough": ("memory>=40960Mi", True),
    "memory one more": (f"memory>{40960 * 2**20}", False),
    "memory equal": ("memory=40Gi", True),
    "memory below": ("memory<40Gi", False),
    "arch by number, not by text": ("arch<8.10", True),
}


@pytest.mark.parametrize(("text", "fits"), FITS.values(), ids=FITS)
def test_selectors(text: str, fits: bool) -> None:
    assert matches(make.gpu(), parse_claim(make.KEY, text).selectors) is fits


def test_a_part_of_a_gpu_that_is_not_in_mig_mode_is_none() -> None:
    assert why_not(make.gpu(1, mig=(make.mig(1),)).parts[0]) == "its GPU is not in MIG mode"


def test_a_node_whose_driver_cannot_be_asked_says_which_gpus_it_has() -> None:
    fault = "nvmlInit: Driver Not Loaded (9): the nvidia kernel module is not loaded: run `modprobe nvidia`"
    named = KernelGpu(pci_bus_id=PciBusId("0000:71:00.0"), reason=fault, model="NVIDIA L4")
    reason = node_fault(frozenset(), make.node([], fault=fault, unlisted=(AWAY, named)))
    assert reason
    assert reason.sentence == (
        f"this node cannot grant GPUs: {fault} (the kernel shows GPU 0000:70:00.0, {AWAY.reason}; "
        "0000:71:00.0 NVIDIA L4)."
    )
    many = str(node_fault(frozenset(), make.node([], fault="no driver", unlisted=MANY_AWAY)))
    assert len(many) < REFUSAL_MAX
    assert "; and 13 more)." in many
