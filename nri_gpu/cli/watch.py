"""`nri-gpu status --watch`: one live page on a terminal; into a pipe the page once, and then a line for each change."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final, Generic, TypeVar

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from nri_gpu.cli.page import Grid, Line, Tone, plain
from nri_gpu.cli.render import Times, at
from nri_gpu.cli.status_page import faults, holder_words, refusal_words, status_page, to_mend, without_folders
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.decision import Refused
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.health import NO_HISTORY, Happened

ASK_S: Final = 1.0  # between two questions to the daemon
RECENT: Final = 20  # changes on a terminal
# Kinds of changes; those of the node's transitions are as they are.
HELD, REFUSED, FAULT, DAEMON = "held", "refused", "fault", "daemon"

Answer = Mapping[str, object]  # as the daemon sent it
Asked = tuple[Answer, DaemonStatus]
S = TypeVar("S")


class WatchLine(Struct, Generic[S], frozen=True, tag_field="schema", tag="nri-gpu/status-watch/v1"):
    """A line of `-o json`: the first with the node as it is, and one for each change. at_s: seconds since the epoch.

    status: of `nri-gpu status -o json`, as the daemon sent it; null without a daemon.
    """

    at_s: float
    changes: tuple[Happened, ...]
    status: S | None


class WatchMoment(Struct, frozen=True):
    """A poll of the daemon."""

    at_s: float
    asked: Asked  # the latest answer received
    fault: str  # why this poll got no answer, or empty
    changes: tuple[Happened, ...] | None  # since the moment before; None at first
    recent: tuple[Happened, ...]  # the last changes, the newest first


def watch(ask: Callable[[], Asked], *, as_json: bool, wide: bool = False) -> Exit:
    """Watch until SIGINT, SIGTERM, or nobody reads. ask: raises CommandError when the daemon does not answer.

    Raises: CommandError, if the daemon did not answer the first time. BrokenPipeError.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seen = moments(ask)
    try:
        if as_json:
            _print_json(seen)
        elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from nri_gpu.cli.live_screen import LiveScreen

            first = next(seen)  # or the verb fails before the screen is another
            LiveScreen().show(live_page(moment, wide=wide) for moment in chain([first], seen))
        else:
            _print_lines(seen, wide=wide)
    except KeyboardInterrupt:
        pass
    return Exit.OK


def moments(
    ask: Callable[[], Asked], clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> Iterator[WatchMoment]:
    """Yield a moment each second, without an end. Raises: CommandError, if the first question was not answered."""
    asked, fault = ask(), ""
    known = [*(asked[1].transitions or NO_HISTORY).last, *map(_refused, asked[1].refusals)]
    recent = tuple(sorted(known, key=lambda each: each.at_s, reverse=True))[:RECENT]
    yield WatchMoment(clock(), asked, "", None, recent)
    while True:
        sleep(ASK_S)
        before, was_lost = asked[1], bool(fault)
        try:
            asked, fault = ask(), ""
        except CommandError as error:
            fault = str(error).removeprefix("nri-gpu: ")
        now = clock()
        found = (*_of_daemon(fault, now, was_lost=was_lost), *changes(before, asked[1], now))
        recent = (*reversed(found), *recent)[:RECENT]
        yield WatchMoment(now, asked, fault, found, recent)


def _of_daemon(fault: str, now: float, *, was_lost: bool) -> Iterator[Happened]:
    if fault and not was_lost:
        yield _happened(now, DAEMON, fault, worse=True)
    elif was_lost and not fault:
        yield _happened(now, DAEMON, "the daemon answers again")


def changes(before: DaemonStatus, after: DaemonStatus, now: float) -> Iterator[Happened]:
    """Yield what a later answer has that an earlier one lacks: the node's transitions, holders, and faults."""
    old, new = before.transitions or NO_HISTORY, after.transitions or NO_HISTORY
    restarted = new.began_s != old.began_s
    if restarted:
        yield _happened(now, DAEMON, "the daemon was restarted")
    known = 0 if restarted else old.total
    news = [each for each in new.last if each.number > known]
    if missed := new.total - known - len(news):
        yield _happened(now, DAEMON, f"{missed} more changes happened in between")
    yield from news
    told = 0 if restarted or not before.refusals else before.refusals[-1].number
    yield from (_refused(each) for each in after.refusals if each.number > told)
    were, are = _held(before), _held(after)
    yield from (
        _happened(now, HELD, f"GPU {p} is no longer {who}", u) for (u, p, who) in were if (u, p, who) not in are
    )
    yield from (_happened(now, HELD, f"GPU {p} is {who}", u) for (u, p, who) in are if (u, p, who) not in were)
    were_wrong, wrong = _wrong(before, now), _wrong(after, now)
    over = (each for about, each in were_wrong.items() if about not in wrong)
    yield from (_happened(now, FAULT, f"no longer: {each}") for each in over)
    come = (each for about, each in wrong.items() if about not in were_wrong)
    yield from (_happened(now, FAULT, each, worse=True) for each in come)


def _refused(each: Refused) -> Happened:
    return _happened(each.at_s, REFUSED, refusal_words(each, Times(each.at_s, absolute=True)), worse=True)


def _held(status: DaemonStatus) -> dict[tuple[str, str, str], None]:
    """Return UUID, place and holder, in the order of the page."""
    held: dict[tuple[str, str, str], None] = {}
    for gpu in status.gpus:
        who = [f"{holder_words(each)} ({each.mode})" for each in gpu.holders]
        who += [f"held by {pod} (not through nri-gpu)" for pod in gpu.foreign]
        who += [f"watched by {pod}" for pod in gpu.monitors]
        who += [f"open by its number to {each.pod}, container {each.container}" for each in gpu.opened_by]
        held |= {(gpu.uuid, gpu.place, each): None for each in who}
    return held


def _wrong(status: DaemonStatus, now: float) -> dict[object, str]:
    """Map what it is about to what keeps the daemon from granting, what to mend, stray use and an observer's findings.

    No transition is among them (inventory fault).
    """
    told = faults(replace(status, node=replace(status.node, inventory_fault="")), Times(now)) + to_mend(status)
    if not status.observer:
        return {each: each for each in (*told, *(f"stray use: {each.message}" for each in status.stray.findings))}
    from nri_gpu.observe.use_findings import subject  # only beside an observer

    wrong: dict[object, str] = {each: each for each in told}
    return wrong | {subject(each): f"{each.kind}: {each.message}" for each in status.observer.findings}


def _happened(at_s: float, kind: str, what: str, uuid: str = "", *, worse: bool = False) -> Happened:
    return Happened(at_s=at_s, kind=kind, uuid=uuid, index=None, worse=worse, what=what)


def _print_lines(seen: Iterator[WatchMoment], *, wide: bool) -> None:
    for moment in seen:
        if moment.changes is None:
            page = status_page(moment.asked[1], Times(moment.at_s, absolute=wide), wide=wide)
            print(plain(page), flush=True)
        for each in moment.changes or ():
            print(f"{at(each.at_s)} {each.what}", flush=True)


def _print_json(seen: Iterator[WatchMoment]) -> None:
    for moment in seen:
        if moment.changes is None or moment.changes:
            status = None if moment.fault else moment.asked[0]
            line = WatchLine(moment.at_s, moment.changes or (), status)
            print(json.dumps(to_builtins(line)), flush=True)


def live_page(moment: WatchMoment, *, wide: bool = False) -> list[Line | Grid]:
    """Return the page of a terminal: the status, and the last changes below it."""
    status, times = replace(moment.asked[1], transitions=None, refusals=()), Times(moment.at_s, absolute=wide)
    first, *page = status_page(status, times, glance=True, wide=wide)
    news = (
        Line(f"  {times.ago(each.at_s)}  {without_folders(each.what)}", Tone.WARN if each.worse else Tone.PLAIN)
        for each in moment.recent
    )
    return [
        first,
        *([Line(f"{moment.fault}; below is its last answer", Tone.BAD)] if moment.fault else []),
        *page,
        *([Line(""), Line("the last changes:", Tone.HEAD), *news] if moment.recent else []),
    ]
