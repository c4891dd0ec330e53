"""Lines of the log when findings come and go."""

from __future__ import annotations

from msgspec.structs import replace

from nri_gpu.daemon.answers import ObservedFinding
from nri_gpu.domain.finding_kind import FindingKind
from nri_gpu.observe.finding_log import LINES_MAX, log_findings
from tests.support.log import Log

TWICE = ObservedFinding(kind=FindingKind.TWICE, message="GPU 0 was given twice", gpu_uuids=("GPU-0",))
UNOPENED = ObservedFinding(kind=FindingKind.UNOPENED, message="in 2 looks", namespace="ml", pod="train", container="a")
MINER = ObservedFinding(kind=FindingKind.NOT_GIVEN, message="host process pid 7 /opt/miner", gpu_uuids=("GPU-0",))


def told(before: tuple[ObservedFinding, ...], after: tuple[ObservedFinding, ...]) -> list[tuple[str, str]]:
    with Log() as log:
        log_findings(before, after)
    return [(each.text, each.fields["event"]) for each in log.lines]


def test_each_is_told_when_it_comes_and_when_it_goes() -> None:
    came, gone = "observer finding", "observer finding is gone"
    assert told((), (TWICE, UNOPENED)) == [(came, "given-twice"), (came, "never-opened")]
    assert told((TWICE, UNOPENED), (TWICE, replace(UNOPENED, message="in 3 looks"))) == []
    assert told((TWICE, UNOPENED), (UNOPENED,)) == [(gone, "given-twice")]


def test_programs_of_the_host_are_told_apart_by_name_and_not_by_pid() -> None:
    again, other = (replace(MINER, message=each) for each in ("host process pid 8 /opt/miner", "host process pid 7 /x"))
    assert told((MINER,), (again,)) == []
    assert len(told((MINER,), (MINER, other))) == 1


def test_a_look_has_no_more_lines_than_that() -> None:
    many = tuple(replace(UNOPENED, pod=f"pod{number}") for number in range(LINES_MAX + 9))
    assert len(told((), many)) == len(told(many, ())) == LINES_MAX


def test_many_of_one_kind_leave_a_line_for_another() -> None:
    many = tuple(replace(MINER, message=f"host process /{'x' * number}") for number in range(LINES_MAX + 9))
    assert ("observer finding", "never-opened") in told((), (*many, UNOPENED))
