"""The part of `nri-gpu status` that an observer's answer has: who was given which GPU by whom, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.cli.page import Column, Grid, Line, Tone
from nri_gpu.cli.render import SHOWN, Times, lines
from nri_gpu.cli.status_table import (
    CONTAINER,
    GPU,
    MODEL,
    USUAL,
    WIDE,
    Cells,
    gpu_cells,
    short_models,
)
from nri_gpu.daemon.answers import AllocationStatus, DaemonStatus, ObserverStatus
from nri_gpu.decision.refusals import IN_MIG_MODE
from nri_gpu.domain.text import counted, listed, shown

GIVEN_TO: Final = Column("GIVEN TO", name=True, repeated=True)
BY: Final = Column("BY", name=True)
NAME_MAX: Final = 253  # characters of a Kubernetes name
DEVICE_MAX: Final = 64  # characters of a device's name
QUIET_MAX: Final = 3  # patterns and monitors in a line
NOBODY: Final[Cells] = dict.fromkeys(("GIVEN TO", "CONTAINER", "BY", "OPENED", "FOR", "SINCE", "ASKED"), "-")
UNKNOWN: Final = "?"  # in place of an index
NOT_KNOWN: Final = "GPU not known"


def observed_table(status: DaemonStatus, observer: ObserverStatus, times: Times, *, wide: bool = False) -> Grid:
    """Return a row for each GPU and for each container that it was given to; devices of no GPU known here come last."""
    models = {} if wide else short_models([gpu.model for gpu in status.gpus if gpu.kind != "mig"])
    rows: list[Cells] = []
    for gpu in status.gpus:
        cells = gpu_cells(gpu, models)
        mode = "in MIG mode" if gpu.withheld == IN_MIG_MODE else "-"
        mine = [_given(each, times) for each in observer.allocations if each.gpu_uuid == gpu.uuid]
        rows += [{**cells, **(mine[0] if mine else {**NOBODY, "GIVEN TO": mode})}, *mine[1:]]
    known = {gpu.uuid for gpu in status.gpus}
    for each in observer.allocations:
        if each.gpu_uuid not in known:
            uuid = each.gpu_uuid or each.device or "-"
            rows.append({"GPU": UNKNOWN, "MODEL": NOT_KNOWN, "UUID": uuid, **_given(each, times)})
    told = {str(row["CONTAINER"]) for row in rows} - {USUAL, "-"}
    columns = [GPU, MODEL, GIVEN_TO, *([CONTAINER] if wide or told else []), BY, Column("OPENED")]
    columns.append(Column("SINCE" if wide else "FOR"))
    if any(gpu.usage for gpu in status.gpus):
        columns += map(Column, ("MEMORY", "UTIL"))
    columns += (Column("ASKED"), *WIDE) if wide else ()
    cells_of = (tuple(row.get(each.head, "") for each in columns) for row in rows)
    return Grid(tuple(columns), tuple(cells_of), whole=wide)


def _given(each: AllocationStatus, times: Times) -> dict[str, str | Line]:
    since_s = each.since_s if each.began_s is None else each.began_s
    since = "-" if since_s is None else times.since(since_s)
    shares = f", 1 of {each.shared} replicas" if each.shared else ""
    return {
        "GIVEN TO": _whose(each),
        "CONTAINER": each.container if each.pod else "-",
        "BY": f"{each.by}{shares}",
        "OPENED": _opened(each, times),
        "FOR": since,
        "SINCE": since,
        "ASKED": each.asked or "-",
    }


def _whose(each: AllocationStatus) -> str:
    return f"{each.namespace}/{each.pod}" if each.pod else f"{each.runtime}/{each.container}"


def _opened(each: AllocationStatus, times: Times) -> str | Line:
    if each.opened is None:
        return "-"
    if each.opened:
        return Line("yes", Tone.GOOD)
    return f"no, last {times.ago(each.last_opened_s)}" if each.last_opened_s is not None else Line("no", Tone.WARN)


def observed_lines(status: DaemonStatus, observer: ObserverStatus, times: Times, *, wide: bool) -> Iterator[Line]:
    """Yield what is wrong, what is not seen, and who is left out on purpose."""
    for found in observer.findings:
        yield Line(f"{found.kind}{times.lasting(found.since_s)}: {found.message}", Tone.BAD)
    yield from lines((f"not seen: {each}" for each in observer.unseen), Tone.WARN)
    yield from lines(_unseen(observer), Tone.WARN)
    if watching := [each for each in status.external if each.watched]:
        names = (f"{shown(each.pod, NAME_MAX)} ({counted(len(each.watched), 'GPU')})" for each in watching)
        yield Line(f"open GPUs and hold none: {listed(names, len(watching) if wide else QUIET_MAX)}", Tone.FAINT)
    if observer.quiet:
        more = "" if wide else " (all: -o wide)"
        patterns = listed(observer.quiet, len(observer.quiet) if wide else QUIET_MAX)
        yield Line(f"users that are never a finding: {patterns}{more}", Tone.FAINT)
    asked = f"; the kubelet was asked {times.ago(observer.kubelet_s)}" if observer.kubelet_s is not None else ""
    looked = "no look yet" if observer.looked_s is None else f"looked {times.ago(observer.looked_s)}"
    yield Line(f"{looked}{asked}", Tone.FAINT)


def _unseen(observer: ObserverStatus) -> Iterator[str]:
    """Yield each reason why something about allocations is not known, with whose these are."""
    whose: dict[str, dict[str, None]] = {}
    for each in observer.allocations:
        if each.unseen:
            device = f" ({shown(each.device, DEVICE_MAX)})" if each.device and not each.gpu_uuid else ""
            whose.setdefault(each.unseen, {})[shown(_whose(each), NAME_MAX) + device] = None
    yield from (f"{listed(names)}: {why}" for why, names in [*whose.items()][:SHOWN])


def given_counts(status: DaemonStatus, observer: ObserverStatus) -> str:
    """Return `8 GPUs: 3 given, 5 given to nobody; 2 findings`; a GPU with MIG devices counts as these."""
    cut = {gpu.place.partition(":")[0] for gpu in status.gpus if gpu.kind == "mig"}
    units = [gpu for gpu in status.gpus if gpu.place not in cut]
    given = {each.gpu_uuid for each in observer.allocations}
    taken = sum(gpu.uuid in given for gpu in units)
    all_ = f"{len(units)} GPUs and MIG devices" if cut else counted(len(units), "GPU")
    return f"{all_}: {taken} given, {len(units) - taken} given to nobody; {counted(len(observer.findings), 'finding')}"
