"""The printing of pages; and GPUs and their health, as pages."""

from __future__ import annotations

import argparse
import calendar
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct, UnsetType

from nri_gpu.cli.page import Column, Grid, Line, Page, Row, Tone, json_text, plain
from nri_gpu.daemon.answers import DaemonStatus, HealthStatus, NodeStatus
from nri_gpu.decision.refusals import IN_MIG_MODE, why_not
from nri_gpu.domain.gpu import ComputeMode, Gpu, MigPart, Unit, health_of, whole
from nri_gpu.domain.health import HealthState, History
from nri_gpu.domain.node import Inventory, KernelGpu
from nri_gpu.domain.text import counted

_FOR_ONE: Final = (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.EXCLUSIVE_THREAD)


def answer(args: argparse.Namespace, document: object, page: Iterable[Line | Grid]) -> None:
    """Print the answer of a verb: the document for `-o json`, else the page."""
    if args.output == "json":
        print(json_text(document))
    else:
        show([*page])


def show(page: Page) -> None:
    """Print the page. Only a terminal pays for rich."""
    if not sys.stdout.isatty():
        print(plain(page))
        return
    from nri_gpu.cli import terminal

    terminal.show(page)


def titled(headline: str, *, simulated: bool) -> str:
    """Return the headline of a page about a node, which says first whether the node is real."""
    return f"SIMULATED: {headline}" if simulated else headline


def gpus_page(inventory: Inventory, status: DaemonStatus | None = None) -> list[Line | Grid]:
    """Return a table of the GPUs, with the faults below it."""
    origin = "a topology file" if inventory.simulated else "NVML"
    versions = f"driver {inventory.driver_version or '?'}, CUDA {inventory.cuda_version or '?'}, from {origin}"
    headline = f"{counted(len(inventory.gpus), 'GPU')}, {versions}" + (_snapshot(status.node) if status else "")
    pools = {each.uuid: each.pool for each in status.gpus if each.pool} if status else {}
    table = Grid(GPU_COLUMNS, tuple(_row(unit) for unit in inventory.units))
    if pools:
        rows = zip(table.rows, inventory.units, strict=True)
        cells = tuple((*row[:-2], pools.get(unit.uuid, "-"), *row[-2:]) for row, unit in rows)
        table = Grid((*GPU_COLUMNS[:-2], Column("POOL"), *GPU_COLUMNS[-2:]), cells)
    here = [extra for extra, offer in inventory.extras.items() if not offer.lacking]
    lacking = [extra for extra in inventory.extras if extra not in here]
    extras = [f"extras: {', '.join(here)}"] if here else []
    extras += [f"extras not here: {', '.join(lacking)} (`-o json` says why)"] if lacking else []
    return [
        Line(titled(headline, simulated=inventory.simulated), Tone.HEAD),
        *([table] if inventory.gpus else []),
        *lines(health_lines({unit.place: HealthStatus.of(unit) for unit in inventory.units}), Tone.WARN),
        *lines(_gpus_faults(inventory), Tone.BAD),
        *lines(extras, Tone.FAINT),
        *lines([inventory.fault] if inventory.fault else [], Tone.BAD),
    ]


def _gpus_faults(inventory: Inventory) -> Iterator[str]:
    """Yield a sentence for each thing that cannot be granted at all."""
    yield from (f"GPU {fault.index} cannot be described: {fault.reason}" for fault in inventory.faults)
    yield from unlisted_lines(inventory.unlisted, inventory.fault)
    for name, major in (("nvidia", inventory.majors.nvidia), ("nvidia-uvm", inventory.majors.nvidia_uvm)):
        if major is None and not inventory.fault:
            yield f"kernel module {name} is not loaded: no GPU can be granted (modprobe {name})"
    if inventory.parts and inventory.majors.nvidia_caps is None:
        yield "nvidia-caps has no major: no MIG device can be granted"


def lines(sentences: Iterable[str], tone: Tone) -> Iterator[Line]:
    return (Line(each, tone) for each in sentences)


def of_trouble(why: str) -> Tone:
    """Return the tone of the reason why a GPU is unavailable."""
    return Tone.PLAIN if why == IN_MIG_MODE else Tone.BAD


GPU_COLUMNS: Final = (
    *map(Column, ("INDEX", "MODEL", "MEMORY", "ARCH", "NUMA", "PCI BUS ID", "NODE")),
    Column("STATE", prose=True),
    Column("UUID"),
)


def _snapshot(node: NodeStatus) -> str:
    """Return what a daemon knows of its node, for a headline."""
    age = "not confirmed yet" if node.inventory_age_s is None else f"{node.inventory_age_s:.0f} s old"
    return f"; the daemon's snapshot is number {node.inventory_number}, {age}"


def unlisted_lines(gpus: Iterable[KernelGpu], fault: str) -> Iterator[str]:
    """Yield the GPUs that only the kernel shows. fault: of the whole inventory, which is printed elsewhere."""
    for gpu in gpus:
        why = "is seen by the kernel only" if gpu.reason == fault else f"cannot be granted: {gpu.reason}"
        yield " ".join(filter(None, ("GPU", gpu.pci_bus_id, gpu.model, gpu.uuid, why)))


def _row(unit: Unit) -> Row:
    """Return a unit's row. A MIG device is indented below its GPU; its node is the compute instance's capability."""
    memory = f"{unit.memory_bytes / 2**30:.0f} GiB" if unit.memory_bytes else "-"
    end = state_of(unit), Line(unit.uuid, Tone.FAINT)
    if isinstance(unit, MigPart):
        device, minor = unit.device, unit.device.compute_instance_minor
        place = f"gi {device.gpu_instance_id}, ci {device.compute_instance_id}"
        node = "-" if minor is None else f"nvidia-cap{minor}"
        return (f"  {unit.place}", f"  MIG {device.profile}", memory, "", "", place, node, *end)
    return (
        str(unit.index),
        unit.model,
        memory,
        unit.arch_text or "-",
        "-" if unit.numa_node is None else str(unit.numa_node),
        unit.pci_bus_id,
        f"/dev/nvidia{unit.minor_number}",
        *end,
    )


SHOWN: Final = 10  # transitions; `-o json` has more


def state_of(unit: Unit) -> Line:
    """Return why a unit cannot be granted; else `ok`, health, symptoms, and a compute mode that admits one process.

    With such a mode containers cannot share the GPU by time.
    """
    if why := why_not(unit):
        return Line(why, of_trouble(why))
    health = health_of(unit)
    words = [health.state.value] if health.state is not HealthState.HEALTHY else []
    words += [sign.value for sign in whole(unit).signs]
    if isinstance(unit, Gpu) and unit.compute_mode in _FOR_ONE:
        words.append(unit.compute_mode)
    return Line(", ".join(["ok", *words]), Tone.WARN if words else Tone.GOOD)


def health_lines(units: Mapping[str, HealthStatus]) -> Iterator[str]:
    """Yield a line for each GPU or MIG device that is, or was, not healthy. units: by their places."""
    for place, health in units.items():
        gpu, part, _ = place.partition(":")
        if part and health == units.get(gpu):
            continue  # its GPU's line says it
        signs = () if part else health.signs
        if not (health.changes or signs):
            continue
        name = f"{'MIG device' if part else 'GPU'} {place}"
        if not health.changes and health.state == HealthState.HEALTHY:  # or no daemon judges health
            yield f"{name} shows {', '.join(signs)}"
            continue
        line = f"{name} is {health.state}"
        if health.since_s:
            verb = "recovered from" if health.state == HealthState.HEALTHY else "because of"
            often = "once" if health.changes == 1 else f"{health.changes} times"
            line += f" since {at(health.since_s)}, {verb}: {health.why}; its state changed {often}"
        yield line + (f"; shows {', '.join(signs)}" if signs else "")


def transition_lines(history: History | None) -> Iterator[str]:
    """Yield how often the node changed since the daemon started, by kind, and the last changes with their times."""
    if history is None or not history.total:
        return
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(history.counts.items()))
    last = history.last[-SHOWN:]
    rest = ", the last:" if len(last) < history.total else ":"
    yield f"{counted(history.total, 'change')} since {at(history.began_s)} ({counts}){rest}"
    yield from (f"  {at(each.at_s)}  {each.what}" for each in last)


def at(seconds: float) -> str:
    """Return a time in UTC. seconds: since the epoch."""
    return time.strftime(UTC, time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Return a duration as kubectl writes ages: `3d4h`, `12m`, `7s`; two units at most."""
    left = max(0, int(seconds))
    words: list[str] = []
    for unit, size in UNITS_S:
        if left >= size and len(words) < 2:
            words.append(f"{left // size}{unit}")
            left %= size
        elif words:
            break
    return "".join(words) or "0s"


class Times(Struct, frozen=True):
    """The times of a page: as ages, or absolute. now_s: seconds since the epoch, as are all times here."""

    now_s: float
    absolute: bool = False

    def since(self, at_s: float) -> str:
        """Return `3h`, or the time."""
        return at(at_s) if self.absolute else duration(self.now_s - at_s)

    def ago(self, at_s: float) -> str:
        """Return `3h ago`, or the time."""
        return self.since(at_s) + " ago" * (not self.absolute)

    def lasting(self, at_s: float | UnsetType | None) -> str:
        """Return ` for 3h`, or ` since` and the time; empty where that is not known. It stands before what to do."""
        return f" {'since' if self.absolute else 'for'} {self.since(at_s)}" if isinstance(at_s, float) else ""

    def aged(self, sentence: str) -> str:
        """Return a sentence of the daemon's with its times as this page has them."""
        return (
            sentence
            if self.absolute
            else SINCE.sub(lambda found: self.lasting(_parsed(found[1])) or found[0], sentence)
        )


UTC: Final = "%Y-%m-%d %H:%M:%S UTC"
SINCE: Final = re.compile(r" since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC)")
UNITS_S: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def _parsed(text: str) -> float | None:
    """Return the time that `at` wrote."""
    try:
        return float(calendar.timegm(time.strptime(text, UTC)))
    except ValueError:
        return None
