"""`nri-gpu status --watch`: what counts as a change, how it is told, and the live page in a real terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from nri_gpu.cli.page import plain
from nri_gpu.cli.watch import Asked, WatchMoment, changes, live_page, moments
from nri_gpu.daemon.answers import DaemonStatus, OpenedBy, PolicyStatus, RuntimeConnection, StrayStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.decision import Refused
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Happened, History
from nri_gpu.ledger.events import DevicesAllocated
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.stray.judge import StrayUse
from tests.support import builders as make
from tests.support.ledgers import after
from tests.support.views import CLOCK, NOW, OTHER, TRAIN, view
from tests.unit.cli.conftest import NriGpuCall

EMPTY = status_of(view())


def happened(number: int, what: str) -> Happened:
    return Happened(number=number, at_s=NOW + number, kind="sign", uuid=make.uuid(0), index=0, worse=True, what=what)


def with_history(*last: Happened, total: int, began_s: float = NOW - 9) -> DaemonStatus:
    return status_of(view(history=History(began_s, total, {"sign": total}, last)))


def holding(*ledger: Any) -> DaemonStatus:  # noqa: ANN401 - entries of a ledger
    return status_of(view(make.ledger(*ledger)))


HOT, COLD = happened(1, "GPU 0 shows thermal"), happened(2, "GPU 0 no longer shows thermal")
RESERVED = after(Ledger(), DevicesAllocated(CLOCK, (AllocatedDevice("nvidia.com/gpu", make.uuid(0)),)))
OPENED = replace(EMPTY.gpus[3], opened_by=(OpenedBy("ml/old", "main"),))
AWAY = RuntimeConnection(ready=False, since_s=NOW, fault="no NRI socket")
FIRST, SECOND = (
    Refused(
        number=number,
        at_s=NOW + number,
        what="container refused",
        code="no-such-gpu",
        reason=f"reason {number}.",
        namespace="ml",
        pod="train",
        container="main",
    )
    for number in (1, 2)
)
STRAY = StrayStatus(findings=(StrayUse(kind="host", message="process 7 has /dev/nvidia0 open", processes=()),))
CHANGES = {
    "nothing": (with_history(HOT, total=1), with_history(HOT, total=1), []),
    "a transition": (with_history(HOT, total=1), with_history(HOT, COLD, total=2), [COLD.what]),
    "more than it keeps": (
        with_history(HOT, total=1),
        with_history(happened(5, "five"), total=5),
        ["3 more changes happened in between", "five"],
    ),
    "another daemon": (
        with_history(HOT, total=9),
        with_history(HOT, total=1, began_s=NOW),
        ["the daemon was restarted", HOT.what],
    ),
    "granted": (
        EMPTY,
        holding(make.entry(1, to=TRAIN)),
        ["GPU 1 is held by ml/train, container main (exclusive)"],
    ),
    "one of two left": (
        holding(make.entry(1, to=TRAIN, mode=Mode.SHARED), make.entry(1, to=OTHER, mode=Mode.SHARED)),
        holding(make.entry(1, to=OTHER, mode=Mode.SHARED)),
        ["GPU 1 is no longer held by ml/train, container main (shared)"],
    ),
    "the kubelet allocated": (EMPTY, status_of(view(RESERVED)), ["GPU 0 is reserved (exclusive)"]),
    "somebody else's": (
        EMPTY,
        status_of(view(make.ledger(others=[make.foreign(2)]))),
        ["GPU 2 is held by ml/plugin (not through nri-gpu)"],
    ),
    "by its number": (
        EMPTY,
        replace(EMPTY, gpus=(*EMPTY.gpus[:3], OPENED)),
        ["GPU 3 is open by its number to ml/old, container main"],
    ),
    "a refusal": (
        replace(EMPTY, refusals=(FIRST,)),
        replace(EMPTY, refusals=(FIRST, SECOND)),
        ["ml/train, container main: container refused [no-such-gpu]: reason 2."],
    ),
    "stray use": (EMPTY, replace(EMPTY, stray=STRAY), ["stray use: process 7 has /dev/nvidia0 open"]),
    "a fault": (EMPTY, status_of(view(connection=AWAY)), ["not connected to the runtime: no NRI socket"]),
    "a fault is over": (
        status_of(view(policy=PolicyStatus("policy.toml", "line 3"))),
        EMPTY,
        ["no longer: policy not usable: line 3"],
    ),
    "a rejected policy": (
        EMPTY,
        status_of(view(policy=PolicyStatus("policy.toml", "", "line 3"))),
        ["policy file rejected, the previous policy stays in force: line 3"],
    ),
    "an inventory's fault is a transition": (EMPTY, status_of(view(inventory_fault="no driver")), []),
}


@pytest.mark.parametrize(("before", "after", "said"), CHANGES.values(), ids=CHANGES)
def test_what_changed(before: DaemonStatus, after: DaemonStatus, said: list[str]) -> None:
    found = list(changes(before, after, NOW))
    assert [each.what for each in found] == said
    assert list(changes(after, after, NOW)) == []


def seen(*answers: DaemonStatus | str) -> list[WatchMoment]:
    """What is seen of a daemon that answers so; a sentence where it does not."""
    script, ticks = iter(answers), count()

    def ask() -> Asked:
        answer = next(script)
        if isinstance(answer, str):
            raise CommandError(Exit.UNAVAILABLE, answer)
        sent: Any = to_builtins(answer)
        return sent, answer

    watched = moments(ask, clock=lambda: NOW + next(ticks), sleep=lambda _: None)
    return [next(watched) for _ in answers]


def test_a_daemon_that_goes_and_comes_back() -> None:
    held = holding(make.entry(1, to=TRAIN))
    told = [[each.what for each in moment.changes or ()] for moment in seen(EMPTY, "gone", "gone", held)]
    assert told == [
        [],
        ["gone"],
        [],
        ["the daemon answers again", "GPU 1 is held by ml/train, container main (exclusive)"],
    ]


def test_without_a_daemon_it_does_not_begin(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    done = nri_gpu("status", "--watch", "--state-dir", tmp_path)
    assert (done.code, done.out) == (Exit.UNAVAILABLE, "")
    assert "is `nri-gpu run` running?" in done.err


@pytest.mark.parametrize("option", [("--alive",), ("--probe",), ("--guard", "x")])
def test_not_with_what_prints_nothing(nri_gpu: NriGpuCall, option: Sequence[str]) -> None:
    done = nri_gpu("status", "--watch", *option)
    assert (done.code, "leave out --alive, --probe and --guard" in done.err) == (Exit.USAGE, True)


@pytest.mark.parametrize("option", [("--no-headers",), ("--refusals",), ("-o", "name")])
def test_not_with_what_prints_a_part(nri_gpu: NriGpuCall, option: Sequence[str]) -> None:
    done = nri_gpu("status", "--watch", *option)
    assert (done.code, "leave out --no-headers, --refusals and -o name" in done.err) == (Exit.USAGE, True)


def test_the_live_page_has_the_newest_change_first_and_says_when_the_daemon_is_lost() -> None:
    before = replace(with_history(HOT, total=1), refusals=(FIRST,))
    first, second, lost = seen(before, replace(with_history(HOT, COLD, total=2), refusals=(FIRST,)), "no answer")
    assert "container refused [no-such-gpu]: reason 1." in plain(live_page(first)).partition("the last changes:")[2]
    assert "  GPU 0 shows thermal" in plain(live_page(first))
    news = plain(live_page(second)).partition("the last changes:")[2]
    assert news.index(COLD.what) < news.index(HOT.what)
    assert "no answer; below is its last answer" in plain(live_page(lost)).splitlines()[1]
    assert "4 GPUs: 0 held, 4 free, 0 unavailable" in plain(live_page(lost))
