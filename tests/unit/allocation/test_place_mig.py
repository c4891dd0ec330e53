"""MIG devices by name and by profile, each in the ledger by its own UUID."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.messages import why_not
from nri_gpu.allocation.placement import Asker, place
from nri_gpu.domain.claim import Mode, Strategy
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart, Unit
from nri_gpu.request.parse import parse_claim
from tests.support import builders as make

ME, OTHER = make.container(of="me"), make.container(of="other")
SMALL, BIG = "1g.5gb", "3g.20gb"
# GPU 0 is whole, GPU 1 cut in three, GPU 2 in two; GPU 3 is in MIG mode and not cut.
NODE = (make.gpu(0), make.mig_gpu(1, [SMALL, BIG, SMALL]), make.mig_gpu(2, [SMALL, SMALL]), make.mig_gpu(3, []))
LOST = make.mig_gpu(1, unavailable="nvmlDeviceGetName: GPU is lost (15)")
VAGUE = make.mig_gpu(1, mig=(make.mig(1, 0, compute_instance_minor=None), make.mig(1, 1)))


def asked(text: str, found: Sequence[Gpu], ledger: Ledger | None = None) -> tuple[Unit, ...] | Reason:
    claim = parse_claim(make.KEY, text)
    mode = claim.mode or Mode.EXCLUSIVE
    return place(claim, Asker(ME.pod.uid, mode), make.inventory(found), ledger or Ledger())


def holding(*uuids: GpuUuid, mode: Mode = Mode.EXCLUSIVE) -> Ledger:
    return make.ledger(make.entry_of(*uuids, to=OTHER, mode=mode))


def part(gpu: int, at: int) -> GpuUuid:
    return make.mig_uuid(gpu, at)


FREE = Ledger()
CHOSEN: dict[str, tuple[str, Ledger, list[str]]] = {
    "one of a profile": (f"mig={SMALL}", FREE, ["1:0"]),
    "several": (f"mig={SMALL}:3", FREE, ["1:0", "1:2", "2:0"]),
    "of several profiles, in nvml order": (f"mig={BIG},{SMALL}:2", FREE, ["1:0", "1:1", "1:2"]),
    "not those that others hold": (f"mig={SMALL}:2", holding(part(1, 0), part(2, 0)), ["1:2", "2:1"]),
    "the least loaded": (f"mig={SMALL};mode=shared", holding(part(1, 0), part(1, 2), mode=Mode.SHARED), ["2:0"]),
    "of enough memory": (f"mig={SMALL};memory>=4Gi", FREE, ["1:0"]),
    "of a model": (f"mig={BIG};model=*a100*", FREE, ["1:1"]),
    "by both indices": ("device=2:1", FREE, ["2:1"]),
    "by uuid": (f"device={part(1, 2)}", FREE, ["1:2"]),
    "by the beginning of one": (f"device={part(1, 2)[:12]}", FREE, ["1:2"]),
    "one by two names": (f"device=1:1,{part(1, 1)}", FREE, ["1:1"]),
    "beside a whole gpu": ("device=2:0,0", FREE, ["0", "2:0"]),
    "beside one that is held": ("device=1:1", holding(part(1, 0)), ["1:1"]),
    "all is whole gpus": ("all", FREE, ["0"]),
    "a number is whole gpus": ("1", FREE, ["0"]),
}


@pytest.mark.parametrize(("text", "ledger", "chosen"), CHOSEN.values(), ids=CHOSEN)
def test_what_a_claim_gets(text: str, ledger: Ledger, chosen: list[str]) -> None:
    units = asked(text, NODE, ledger)
    assert not isinstance(units, Reason), units
    assert [unit.place if isinstance(unit, MigPart) else str(unit.index) for unit in units] == chosen


def test_packing_leaves_gpus_whole_and_spreading_does_not() -> None:
    chosen = {}
    for strategy in Strategy:
        asker = Asker(ME.pod.uid, Mode.EXCLUSIVE, strategy)
        for text in (f"mig={SMALL}", f"mig={SMALL}:2"):
            units = place(parse_claim(make.KEY, text), asker, make.inventory(NODE), holding(part(2, 0)))
            assert not isinstance(units, Reason)
            chosen[strategy, text] = [unit.place for unit in units if isinstance(unit, MigPart)]
    assert chosen == {
        (Strategy.PACK, "mig=1g.5gb"): ["2:1"],
        (Strategy.PACK, "mig=1g.5gb:2"): ["1:0", "2:1"],
        (Strategy.SPREAD, "mig=1g.5gb"): ["1:0"],
        (Strategy.SPREAD, "mig=1g.5gb:2"): ["1:0", "1:2"],
    }


ALL_SMALL = holding(part(1, 0), part(1, 2), part(2, 0), part(2, 1))
REFUSED: dict[str, tuple[str, Sequence[Gpu], Ledger, Code, tuple[str, ...]]] = {
    "the whole gpu": ("device=1", NODE, FREE, Code.GPU_UNAVAILABLE, ("GPU 1 ", "it is in MIG mode")),
    "more whole gpus than there are": ("2", NODE, FREE, Code.NO_SUCH_GPU, ("GPU 1: it is in MIG mode",)),
    "no such profile": ("mig=7g.40gb", NODE, FREE, Code.NO_SUCH_GPU, ("no MIG device", "4 of 1g.5gb, 1 of 3g.20gb")),
    "none at all": ("mig=1g.5gb", NODE[:1], FREE, Code.NO_SUCH_GPU, ("has no MIG devices of profile 1g.5gb",)),
    "too many": (f"mig={SMALL}:5", NODE, FREE, Code.NO_SUCH_GPU, ("asked for 5", "has 4 MIG devices of profile")),
    "too little memory": (f"mig={SMALL};memory>9Gi", NODE, FREE, Code.NO_SUCH_GPU, ("no MIG device", "selectors")),
    "all taken": (f"mig={SMALL}", NODE, ALL_SMALL, Code.GPU_BUSY, ("1 1g.5gb MIG device in", "held by ml/other")),
    "too many taken": (f"mig={SMALL}:4", NODE, holding(part(1, 0)), Code.GPU_BUSY, ("of the 4 that fit 3 can",)),
    "the second profile taken": (f"mig={SMALL},{BIG}", NODE, holding(part(1, 1)), Code.GPU_BUSY, ("1 3g.20gb MIG",)),
    "named and taken": (
        "device=1:0",
        NODE,
        holding(part(1, 0)),
        Code.GPU_BUSY,
        ("MIG device 1:0 (MIG-", "exclusively"),
    ),
    "no such index": ("device=1:7", NODE, FREE, Code.NO_SUCH_GPU, ("no MIG device '1:7'", "1:0, 1:1, 1:2, 2:0, 2:1")),
    "not cut": ("device=0:0", NODE[:1], FREE, Code.NO_SUCH_GPU, ("no MIG device '0:0'", "it has none")),
    "no such uuid": ("device=MIG-ffff", NODE, FREE, Code.NO_SUCH_GPU, ("no MIG device 'MIG-ffff'",)),
    "uuid of several": ("device=MIG-0001", NODE, FREE, Code.BAD_REQUEST, ("beginning of 3 UUIDs",)),
    "of a lost gpu": ("device=1:0", [LOST], FREE, Code.GPU_UNAVAILABLE, ("MIG device 1:0", "GPU is lost")),
    "without capability": ("device=1:0", [VAGUE], FREE, Code.GPU_UNAVAILABLE, ("capability nodes are not known",)),
    "counts only sound ones": ("mig=1g.5gb:2", [VAGUE], FREE, Code.NO_SUCH_GPU, ("has 1 MIG device", "1:0: the min")),
    "named, of another model": ("device=1:0;model=B200", NODE, FREE, Code.NO_SUCH_GPU, ("does not fit",)),
}


@pytest.mark.parametrize(("text", "found", "ledger", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_why_a_claim_gets_nothing(
    text: str, found: Sequence[Gpu], ledger: Ledger, code: Code, words: tuple[str, ...]
) -> None:
    reason = asked(text, found, ledger)
    assert isinstance(reason, Reason), reason
    assert reason.code is code
    assert all(word in reason.sentence for word in words), reason.sentence
    assert reason.sentence.endswith(".")
    assert len(str(reason)) < REFUSAL_MAX


def test_a_part_of_a_gpu_that_is_not_in_mig_mode_is_none() -> None:
    assert why_not(make.gpu(1, mig=(make.mig(1),)).parts[0]) == "its GPU is not in MIG mode"
