"""Topology files: a node described in TOML, for demos, CI and clusters without GPUs. See config/topologies/."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

from msgspec import convert
from msgspec.structs import replace

from nri_gpu.domain.edits import Extra
from nri_gpu.domain.errors import Fault, InventoryError
from nri_gpu.domain.node import GpuFault, Inventory, Link, Majors, NumaNode
from nri_gpu.inventory.scenario import Scenario
from nri_gpu.inventory.topology_reader import TableReader
from nri_gpu.inventory.topology_tables import FileTable
from nri_gpu.policy.lines import key_lines, line_of
from nri_gpu.system.clocks import since_boot_s

_SYNTAX_PLACE: Final = re.compile(r"\(at line (\d+), column \d+\)$")


class TopologyError(InventoryError):
    """A topology file's faults, all at once."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


def load_topology(path: str | Path, *, boot_clock: Callable[[], float] = since_boot_s) -> Inventory:
    """Return the node of a topology file at the beginning. Raises: TopologyError."""
    return load_scenario(path, boot_clock=boot_clock).after(0)


def load_scenario(path: str | Path, *, boot_clock: Callable[[], float] = since_boot_s) -> Scenario:
    """Return the node of a topology file, with its changes. Raises: TopologyError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(Fault(str(path), "", error.strerror or str(error))) from error
    except UnicodeDecodeError as error:
        raise TopologyError(Fault(str(path), "", f"is not UTF-8: {error.reason}")) from error
    return parse_scenario(text, str(path), boot_clock())


def parse_scenario(text: str, file: str, taken_at: float) -> Scenario:
    """Return the node that `text` describes, with its changes.

    Raises: TopologyError, with every wrong value, or, if there is none, with every GPU that is named and does not
    exist, or every UUID that a change uses again.
    """
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise TopologyError(Fault(file, "", "is nested too deeply")) from None
    except ValueError as error:  # TOMLDecodeError, and what int() says of a number with thousands of digits
        place = _SYNTAX_PLACE.search(str(error))
        raise TopologyError(Fault(file, "", str(error), int(place.group(1)) if place else None)) from error
    reader = TableReader(file)
    table = reader.read(FileTable, data)
    faults, scenario = reader.faults, table and _scenario(table, taken_at)
    if table and scenario and not faults:
        found = tuple(_references(table)) or _uuids_after_changes(table, scenario)
        faults = [Fault(file, path, message) for path, message in found]
    if faults or not scenario:
        lines = key_lines(text)
        raise TopologyError(*(replace(fault, line=line_of(lines, fault.key)) for fault in faults))
    return scenario


def _scenario(file: FileTable, taken_at: float) -> Scenario:
    minors = {gpu.index: gpu.minor_number for gpu in file.gpu}
    changes = (table.change(minors.get(-1 if table.gpu is None else table.gpu, 0)) for table in file.change)
    return Scenario(_inventory(file, taken_at), tuple(sorted(changes, key=attrgetter("at_s"))))


def _references(file: FileTable) -> Iterator[tuple[str, str]]:
    """Yield key path and sentence of each link, event or change of a missing GPU, and of each repeated link."""
    known, pairs = {gpu.index for gpu in file.gpu}, dict[tuple[int, int], int]()
    named = [(f"link[{place}].{end}", getattr(link, end)) for place, link in enumerate(file.link) for end in "ab"]
    named += [(f"event[{place}].gpu", event.gpu) for place, event in enumerate(file.event)]
    named += [(f"change[{at}].gpu", change.gpu) for at, change in enumerate(file.change) if change.gpu is not None]
    yield from ((path, f"there is no GPU with index {index}") for path, index in named if index not in known)
    for place, link in enumerate(file.link):
        if (first := pairs.setdefault((link.a, link.b), place)) != place:
            yield f"link[{place}]", f"the same as link[{first}]"


def _uuids_after_changes(file: FileTable, scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield each MIG device that a change gives another's UUID; `TableReader` finds those at the beginning."""
    changes = tuple(replace(change, fault=None) for change in scenario.changes)
    places = sorted(range(len(changes)), key=lambda place: file.change[place].at_s)
    told = set[str]()
    for number, place in enumerate(places, 1):
        met = dict[str, str]()
        for part in Scenario(scenario.inventory, changes[:number]).after(float("inf")).parts:
            if (first := met.setdefault(part.uuid, part.place)) != part.place and part.uuid not in told:
                told.add(part.uuid)
                message = f"{part.uuid} is already the UUID of MIG device {first}"
                yield f"change[{place}].mig", f"from then on: {message}"


def _inventory(file: FileTable, taken_at: float) -> Inventory:
    node = file.node
    faults = convert(file.fault, list[GpuFault], from_attributes=True)
    links = convert(file.link, list[Link], from_attributes=True)
    numa = convert(file.numa, list[NumaNode], from_attributes=True)
    return Inventory(
        taken_at=taken_at,
        gpus=tuple(sorted((table.gpu() for table in file.gpu), key=attrgetter("index"))),
        faults=tuple(sorted(faults, key=attrgetter("index"))),
        links=tuple(sorted(links, key=attrgetter("a", "b"))),
        numa=tuple(sorted(numa, key=attrgetter("number"))),
        majors=convert(node.majors, Majors, from_attributes=True),
        driver_version=node.driver,
        cuda_version=node.cuda,
        simulated=True,
        extras={Extra(table.name): table.extra() for table in node.extra},
        script=tuple(sorted((table.event() for table in file.event), key=attrgetter("at_s"))),
        modules=node.modules,
        nvswitches=node.nvswitches,
    )
