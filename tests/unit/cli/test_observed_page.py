"""`nri-gpu status` as it shows an observer's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from nri_gpu.cli.page import plain
from nri_gpu.cli.render import Times
from nri_gpu.cli.status_page import status_page
from nri_gpu.cli.status_table import of_namespace
from nri_gpu.cli.watch import moments
from nri_gpu.daemon.answers import AllocationStatus, DaemonStatus, GpuUsage, ObservedFinding, ObserverStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.finding_kind import FindingKind
from tests.support import builders as make
from tests.support.views import NOW, view
from tests.unit.cli.conftest import Done, NriGpuCall, daemon
from tests.unit.cli.printed import observed_node


def status(*allocations: AllocationStatus, findings: tuple[ObservedFinding, ...] = ()) -> DaemonStatus:
    node = make.node([make.gpu(0), make.mig_gpu(1)])
    return status_of(view(node=node, observer=ObserverStatus(allocations=allocations, findings=findings)))


def rows(*allocations: AllocationStatus) -> list[list[str]]:
    """The cells of the table's rows."""
    page = plain(status_page(status(*allocations), Times(NOW))).splitlines()
    return [re.split(" {2,}", line.strip()) for line in page[2:] if line.startswith(("0", "1", " ", "?"))]


def given(**fields: object) -> AllocationStatus:
    known = {"gpu_uuid": make.uuid(0), "namespace": "ml", "pod": "train", "container": "main", "by": "CDI"}
    return AllocationStatus(**{**known, "since_s": NOW - 60, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allocation", "cells"),
    [
        (given(opened=True), ["ml/train", "CDI", "yes", "1m"]),
        (given(opened=False), ["ml/train", "CDI", "no", "1m"]),
        (given(opened=False, last_opened_s=NOW - 30), ["ml/train", "CDI", "no, last 30s ago", "1m"]),
        (given(began_s=NOW - 600), ["ml/train", "CDI", "-", "10m"]),
        (given(since_s=None), ["ml/train", "CDI", "-", "-"]),
        (given(shared=3), ["ml/train", "CDI, 1 of 3 replicas", "-", "1m"]),
        (given(namespace="", pod="", runtime="Docker", container="web"), ["Docker/web", "CDI", "-", "1m"]),
    ],
)
def test_a_row(allocation: AllocationStatus, cells: list[str]) -> None:
    assert rows(allocation)[0][-len(cells) :] == cells


def test_a_sample_of_gpus_has_columns_of_its_own() -> None:
    whole = status(given())
    used = replace(whole.gpus[0], usage=GpuUsage(sampled_s=NOW, memory_used_bytes=2**30, memory_total_bytes=2**31))
    page = plain(status_page(replace(whole, gpus=(used, *whole.gpus[1:])), Times(NOW))).splitlines()
    assert re.split(" {2,}", page[1])[-2:] == ["MEMORY", "UTIL"]
    assert re.split(" {2,}", page[2])[-2:] == ["1.0/2.0 GiB", "-"]


def test_at_a_glance_gpus_are_counted() -> None:
    page = plain(status_page(status(given(), given(pod="other")), Times(NOW), glance=True)).splitlines()
    assert page[1] == "3 GPUs and MIG devices: 1 given, 2 given to nobody; 0 findings"


def test_gpus_that_nobody_has_and_devices_of_no_known_gpu() -> None:
    found = rows(given(), given(pod="other"), given(gpu_uuid="", device="MIG-7"))
    assert [each[0].strip() for each in found] == ["0", "ml/other", "1", "1:0", "1:1", "?"]
    assert "in MIG mode" in found[2]
    assert "GPU not known" in found[5]


def test_what_is_not_known_has_its_reason_once() -> None:
    why = "which GPU it is a part of is not known here"
    two = (given(gpu_uuid="", device="MIG-\x1b[2J", pod=pod, unseen=why) for pod in ("a", "b"))
    page = plain(status_page(status(*two), Times(NOW))).splitlines()
    assert [line for line in page if why in line] == [rf"ml/a (MIG-\x1b[2J), ml/b (MIG-\x1b[2J): {why}"]


@pytest.fixture
def asked(nri_gpu: NriGpuCall, tmp_path: Path) -> Callable[..., Done]:
    """Asks an observer on a made-up node."""

    def ask(*options: str) -> Done:
        with daemon(tmp_path, json.dumps(to_builtins(observed_node())).encode()) as state:
            return nri_gpu("status", "--state-dir", state, *options)

    return ask


def test_the_verb(asked: Callable[..., Done]) -> None:
    done = asked()
    assert (done.code, done.err) == (Exit.OK, "")
    assert done.out.startswith("node1: observed, driver 580.95.05")
    document = asked("-o", "json").document
    assert document["node"]["observed"] is True
    assert [each["by"] for each in document["observer"]["allocations"]][2] == "DRA driver gpu.nvidia.com"
    assert len(asked("--no-headers").out.splitlines()) == len(document["gpus"]) + 1


def test_a_namespace_has_its_own_alone(asked: Callable[..., Done]) -> None:
    page = asked("-n", "ml").out
    assert "ml/sweep" in page
    assert "dcgm-exporter" not in page
    assert "no pod of namespace none was given a GPU" in asked("-n", "none").out
    assert "an observer refuses nothing" in asked("--refusals").out
    found = of_namespace(status(given(), given(namespace="lab"), findings=(FINDING,)), "lab").observer
    assert found
    assert ([each.namespace for each in found.allocations], found.findings) == (["lab"], ())


FINDING = ObservedFinding(kind=FindingKind.TWICE, message="was given twice", namespace="ml", pod="train")


def test_watch_tells_findings_as_they_come() -> None:
    """Each once: how many looks saw a GPU closed, and who else has it, changes what is said of a finding."""
    late = ObservedFinding(kind=FindingKind.UNOPENED, message="in 3 looks")
    later = replace(late, message="in 4 looks"), replace(FINDING, message="was given twice, and to others")
    answers = iter([status(), status(findings=(FINDING, late)), status(findings=later), status()])
    seen = moments(lambda: ({}, next(answers)), clock=lambda: NOW, sleep=lambda _: None)
    next(seen)
    told = next(seen).changes
    assert told is not None
    assert [each.what for each in told] == ["given-twice: was given twice", "never-opened: in 3 looks"]
    assert told[0].worse
    assert next(seen).changes == ()
    gone = next(seen).changes or ()
    assert [each.what for each in gone] == [
        "no longer: never-opened: in 4 looks",
        "no longer: given-twice: was given twice, and to others",
    ]
