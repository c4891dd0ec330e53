"""The table of `nri-gpu status`: a row for each GPU and for each of its holders, and what they use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from nri_gpu.cli.page import Cell, Column, Grid, Line, Tone
from nri_gpu.cli.render import Times
from nri_gpu.daemon.answers import DaemonStatus, ExternalStatus, GpuUsage, HolderStatus, UnitStatus
from nri_gpu.decision.refusals import IN_MIG_MODE, number_of
from nri_gpu.domain.health import HealthState
from nri_gpu.domain.text import counted

USUAL: Final = "main"  # the container whose name says nothing
MODES: Final = {"exclusive": Tone.HEAD, "": Tone.FAINT}  # others share it
NOBODY: Final[Mapping[str, Cell]] = dict.fromkeys(("HELD BY", "CONTAINER", "FOR", "SINCE", "USES", "IDLE"), "-")
GPU: Final = Column("GPU", repeated=True)
HELD_BY: Final = Column("HELD BY", name=True, repeated=True)
CONTAINER: Final = Column("CONTAINER", name=True)
MODEL: Final = Column("MODEL", name=True)
POOL: Final = Column("POOL", name=True)
USED: Final = tuple(map(Column, ("MEMORY", "UTIL", "USES", "IDLE")))
WIDE: Final = tuple(map(Column, ("TEMP", "POWER", "CLOCKS", "UUID", "PCI ADDRESS", "NODE")))
MEMORY: Final = re.compile(r"\d+GB")  # a word of a model's name

Cells = Mapping[str, Cell]  # by the heads of their columns


def status_table(status: DaemonStatus, times: Times, *, wide: bool = False) -> Grid:
    """Return the table. wide: with whole names, and with all that is known of each GPU."""
    models = short_models([gpu.model for gpu in status.gpus if gpu.kind != "mig"])
    blocks = [(gpu_cells(gpu, {} if wide else models), [*_holders(gpu, status, times)]) for gpu in status.gpus]
    containers = {str(holder["CONTAINER"]) for _, holders in blocks for holder in holders}
    columns = [GPU, MODEL, *([POOL] if any(gpu.pool for gpu in status.gpus) else []), Column("MODE"), HELD_BY]
    columns += [CONTAINER] if wide or containers - {USUAL, "-"} else []
    columns.append(Column("SINCE" if wide else "FOR"))
    columns += USED if status.sampling.enabled or any(gpu.usage for gpu in status.gpus) else ()
    columns += WIDE if wide else ()
    rows = (row for gpu, holders in blocks for row in _rows(gpu, holders))
    return Grid(tuple(columns), tuple(tuple(row.get(each.head, "") for each in columns) for row in rows), whole=wide)


def _rows(gpu: Cells, holders: list[Cells]) -> Iterator[Cells]:
    """Yield the cells of a GPU's rows; the first has the GPU too."""
    yield {**gpu, **(holders[0] if holders else NOBODY)}
    yield from holders[1:]


def of_namespace(status: DaemonStatus, namespace: str) -> DaemonStatus:
    """Return what concerns the pods of a namespace: the GPUs that they hold, and nothing of others on these."""
    own = f"{namespace}/"
    gpus = (
        replace(
            gpu,
            holders=tuple(each for each in gpu.holders if each.namespace == namespace),
            foreign=tuple(each for each in gpu.foreign if each.startswith(own)),
            opened_by=tuple(each for each in gpu.opened_by if each.pod.startswith(own)),
            monitors=tuple(each for each in gpu.monitors if each.startswith(own)),
        )
        for gpu in status.gpus
    )
    observer = status.observer and replace(
        status.observer,
        allocations=tuple(each for each in status.observer.allocations if each.namespace == namespace),
        findings=tuple(each for each in status.observer.findings if each.namespace == namespace),
    )
    claims = tuple(each for each in status.claims if each.namespace == namespace)
    claimed = {device.gpu_uuid for claim in claims for device in claim.devices}
    return replace(
        status,
        gpus=tuple(
            gpu for gpu in gpus if gpu.holders or gpu.foreign or gpu.opened_by or gpu.monitors or gpu.uuid in claimed
        ),
        claims=claims,
        gone=tuple(each for each in status.gone if each.namespace == namespace),
        refusals=tuple(each for each in status.refusals if each.namespace == namespace),
        lost=tuple(each for each in status.lost if each.pod.startswith(own)),
        external=tuple(each for each in status.external if each.pod.startswith(own)),
        observer=observer,
    )


def short_models(models: Iterable[str]) -> dict[str, str]:
    """Return each model without `NVIDIA`, and without the last words that all share.

    A word with a number stays, and so does its memory: `H100 80GB`.
    """
    words = {model: model.removeprefix("NVIDIA ").split() for model in models}
    while words and len({each[-1] for each in words.values() if each}) == 1:
        left = {model: each[:-1] for model, each in words.items()}
        if not all(_tells(each) and _memory(each) == _memory(words[model]) for model, each in left.items()):
            break
        words = left
    return {model: " ".join(each) for model, each in words.items()}


def _tells(words: Iterable[str]) -> bool:
    return any(letter.isdigit() for word in words for letter in word)


def _memory(words: Iterable[str]) -> bool:
    return any(map(MEMORY.search, words))


def gpu_cells(gpu: UnitStatus, models: Mapping[str, str]) -> Cells:
    """Return the cells that a table has of a GPU or MIG device itself."""
    usage = gpu.usage or GpuUsage(sampled_s=0.0)
    return {
        "GPU": Line(f"{'  ' if gpu.kind == 'mig' else ''}{gpu.place}", Tone.HEAD),
        "MODEL": models.get(gpu.model, gpu.model),
        "POOL": gpu.pool or "-",
        "MODE": _mode(gpu),
        "MEMORY": _of_two(_gib(usage.memory_used_bytes), _gib(usage.memory_total_bytes), " GiB"),
        "UTIL": _with_unit(usage.utilization_percent, "%"),
        "TEMP": _with_unit(usage.temperature_c, "C"),
        "POWER": _of_two(_rounded(usage.power_w), _rounded(usage.power_limit_w), " W"),
        "CLOCKS": _of_two(_rounded(usage.sm_clock_mhz), _rounded(usage.memory_clock_mhz), " MHz"),
        "UUID": gpu.uuid,
        "PCI ADDRESS": gpu.pci_bus_id or "-",
        "NODE": gpu.device_node or "-",
    }


def _mode(gpu: UnitStatus) -> Line:
    """Return how it is held, and its state where it is granted to nobody: the table has no other place for that."""
    if gpu.withheld == IN_MIG_MODE:
        return Line("MIG", Tone.FAINT)
    ill = gpu.health.state if gpu.health.state in (HealthState.BAD, HealthState.RECOVERING) else "withheld"
    if gpu.withheld:
        return Line(", ".join(filter(None, (gpu.mode, ill))), Tone.BAD)
    if gpu.left_by and not gpu.mode:
        return Line("releasing", Tone.WARN)
    return Line(gpu.mode or "-", MODES.get(gpu.mode, Tone.LINK))


def _holders(gpu: UnitStatus, status: DaemonStatus, times: Times) -> Iterator[Cells]:
    """Yield the cells of each holder of a GPU, and of each container that opens it."""
    for holder in gpu.holders:
        usage = holder.usage
        yield {
            **_named(pod_of(holder), holder.container, _since(holder, times)),
            "USES": _with_unit(_gib(usage.memory_bytes), " GiB") if usage else "-",
            "IDLE": _idle(holder, times),
        }
    held = {pod_of(each) for each in gpu.holders}
    for claim in status.claims:
        pods = {f"{claim.namespace}/{pod}" for pod in claim.pods}
        mine = [each for each in claim.devices if each.gpu_uuid == gpu.uuid and not each.admin]
        if mine and pods.isdisjoint(held):
            yield _named(f"claim {claim.namespace}/{claim.name}", "-", "prepared")
    shifted = {(each.pod, each.container) for each in gpu.opened_by}
    external = [each for each in status.external if gpu.uuid in each.gpu_uuids]
    for each in external:
        if (each.pod, each.container) not in shifted:
            yield _named(each.pod, each.container, _opening(each, gpu, status))
    if not external:
        yield from (_named(pod, "-", "-") for pod in gpu.foreign)  # an older daemon names pods alone
    yield from (_named(each.pod, each.container, "by its number") for each in gpu.opened_by)
    yield from (_named(each.pod, each.container, "watches") for each in status.external if gpu.uuid in each.watched)


def _named(pod: str, container: str, since: Cell) -> dict[str, Cell]:
    return {**NOBODY, "HELD BY": pod, "CONTAINER": container, "FOR": since, "SINCE": since}


def _opening(other: ExternalStatus, gpu: UnitStatus, status: DaemonStatus) -> Cell:
    """Return what a container does that opens a GPU, marked if another pod has the GPU exclusively."""
    opens = f"claims {other.prepared}" if other.prepared else f"opens {number_of(other.gpu_uuids)}"
    if any(other.container_id == each.container_id and gpu.uuid in each.gpu_uuids for each in status.conflicts):
        return Line(f"{opens}, in conflict", Tone.BAD)
    return opens


def pod_of(holder: HolderStatus) -> str:
    return f"{holder.namespace}/{holder.pod}"


def _since(holder: HolderStatus, times: Times) -> str:
    phase = "" if holder.running else f" ({'reserved' if holder.reserved else holder.phase})"
    return ("?" if holder.since_s is None else times.since(holder.since_s)) + phase


def _idle(holder: HolderStatus, times: Times) -> Cell:
    """Return since when a holder does nothing, and by what that is told."""
    if not (idle := holder.usage and holder.usage.idle):
        return "-"
    by = "no process" if idle.no_process else counted(idle.samples, "sample")
    return Line(f"{times.since(idle.since_s)}, {by}", Tone.WARN)


def _gib(size_bytes: int | None) -> str | None:
    if size_bytes is None:
        return None
    gib = size_bytes / 2**30
    return f"{gib:.1f}" if 0 < gib < 9.95 else f"{gib:.0f}"


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _with_unit(value: int | str | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"


def _of_two(first: str | None, second: str | None, unit: str) -> str:
    return "-" if first is None is second else f"{first or '-'}/{second or '-'}{unit}"
