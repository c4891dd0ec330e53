"""The verdicts of `nri-gpu verify` beside an observer."""

from __future__ import annotations

import re
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.cli.page import plain
from nri_gpu.cli.verify_command import code_of, verify_page
from nri_gpu.daemon.answers import ObserverStatus
from nri_gpu.domain.errors import Exit
from nri_gpu.observe.allocation_report import allocation_report
from nri_gpu.observe.given import Given
from nri_gpu.observe.looks import SeenContainer, Unseen
from nri_gpu.verify.container_report import ContainerReport, Report, Verdict
from tests.support import builders as make
from tests.unit.observe.seen import (
    CTL,
    INVENTORY,
    WALL,
    capability,
    claimed,
    container,
    docker,
    given,
    look,
    nodes,
    observed,
    opened,
    plugin,
)

GPU, PART = make.uuid(0), make.mig_uuid(2, 0)
TRAIN = opened("train", *nodes(0))
HOOK = ("nvidia-container-runtime-hook",)


def report(seen: SeenContainer, listed: Given | None = None, **fields: object) -> Report:
    """Of a node with that container alone."""
    found = observed(look(seen), listed)
    known = ObserverStatus(looked_s=WALL, kubelet_s=WALL - 5, kubelet=True, allocations=found.allocations)
    return allocation_report(look(seen), replace(known, **fields), INVENTORY)


def verified(seen: SeenContainer, listed: Given | None = None, **fields: object) -> ContainerReport:
    (found,) = report(seen, listed, **fields).containers
    return found


VERDICTS: Final = {
    "what the kubelet allocated": (TRAIN, given((TRAIN, plugin(GPU))), Verdict.ALLOCATED),
    "what a claim has": (TRAIN, given((TRAIN, [claimed("gpu-7")])), Verdict.ALLOCATED),
    "what CDI names": (opened("train", *nodes(0), cdi=("nvidia.com/gpu=0",)), None, Verdict.ALLOCATED),
    "what Docker was asked for": (docker("web", nodes=nodes(0), opens=nodes(0)), None, Verdict.ALLOCATED),
    "a MIG device": (opened("train", *nodes(2), capability(0)), given((TRAIN, plugin(PART))), Verdict.ALLOCATED),
    "another beside it": (opened("train", *nodes(0, 1)), given((TRAIN, plugin(GPU))), Verdict.WIDENED),
    "another MIG device beside it": (
        opened("train", *nodes(2), capability(0), capability(1)),
        given((TRAIN, plugin(PART))),
        Verdict.WIDENED,
    ),
    "nodes that nobody names": (TRAIN, given(), Verdict.NOT_ALLOCATED),
    "what its image asked for": (container(asked="all", hooks=HOOK, opens=nodes(0)), given(), Verdict.NOT_ALLOCATED),
    "what only the kernel shows": (container(opens=nodes(0)), given(), Verdict.NOT_ALLOCATED),
    "no GPU": (container(opens=(CTL,)), given(), Verdict.NO_GPU),
    "privileged": (container(privileged=True, opens=nodes(0)), given(), Verdict.PRIVILEGED),
    "rules that were lost": (
        opened("train", *nodes(0), opens=()),
        given((TRAIN, plugin(GPU))),
        Verdict.DIFFERS,
    ),
    "rules that are not seen": (opened("train", *nodes(0), opens=None), given((TRAIN, plugin(GPU))), Verdict.UNSEEN),
    "a GPU that is not known": (opened("train", CTL), given((TRAIN, plugin("MIG-7"))), Verdict.UNSEEN),
    "newer than the kubelet's list": (opened("new", *nodes(0), began_s=WALL - 4), given(), Verdict.UNSEEN),
}


@pytest.mark.parametrize(("seen", "listed", "verdict"), VERDICTS.values(), ids=VERDICTS)
def test_a_verdict(seen: SeenContainer, listed: Given | None, verdict: Verdict) -> None:
    found = verified(seen, listed)
    assert found.verdict is verdict
    finding = verdict in (Verdict.WIDENED, Verdict.NOT_ALLOCATED, Verdict.DIFFERS)
    assert bool(found.differences) is finding
    assert bool(found.unseen) is (verdict is Verdict.UNSEEN)
    code = Exit.FINDING if finding else Exit.UNAVAILABLE if found.unseen else Exit.OK
    assert code_of(report(seen, listed)) is code


def test_a_difference_says_what_and_by_which_way() -> None:
    (clause,) = verified(opened("train", *nodes(0, 1)), given((TRAIN, plugin(GPU)))).differences
    assert f"can open GPU 1 ({make.uuid(1)})" in clause
    assert "its spec has the nodes" in clause
    (lost,) = verified(opened("train", *nodes(0), opens=(CTL,)), given((TRAIN, plugin(GPU)))).differences
    assert lost == "cannot open /dev/nvidia7, /dev/nvidia-uvm any more, which it was given: create it again"


def test_without_a_kubelet_its_list_is_not_waited_for() -> None:
    new = opened("new", *nodes(0), began_s=WALL - 4)
    assert verified(new, kubelet=False, kubelet_s=None).verdict is Verdict.NOT_ALLOCATED


def test_the_page_says_who_answers_and_what_is_not_seen() -> None:
    seen = replace(look(TRAIN, container("pause", sandbox=True)), unseen=(Unseen("rules", "no bpf(2)"),))
    known = ObserverStatus(looked_s=WALL, allocations=observed(seen, given((TRAIN, plugin(GPU)))).allocations)
    found = allocation_report(seen, known, INVENTORY)
    printed = plain(verify_page(found, INVENTORY)).splitlines()
    assert printed[0].startswith("node1: 1 container: 1 allocated; an observer answers: held against what the kubelet")
    assert re.split(" {2,}", printed[1]) == ["POD", "CONTAINER", "GPUS", "BY", "VERDICT"]
    assert (printed[-1], code_of(found)) == ("not seen: no bpf(2)", Exit.UNAVAILABLE)
    assert [(each.pod, each.by, each.gpu_uuids) for each in found.containers] == [
        ("ml/train", "device plugin nvidia.com/gpu", (GPU,))
    ]
