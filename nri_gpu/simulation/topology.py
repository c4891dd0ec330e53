"""Topology files: a node described in TOML, for demos, CI and clusters without GPUs. See config/topologies/."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nri_gpu.domain.errors import Fault, InventoryError
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.formats import parse_version
from nri_gpu.simulation.gpu_tables import read_fault, read_gpu
from nri_gpu.simulation.node_tables import read_extras, read_link, read_majors, read_modules, read_numa_node
from nri_gpu.simulation.scenario import Scenario, read_changes, read_events
from nri_gpu.simulation.tables import Notes, Table

SCHEMA: Final = 1
_SYNTAX_PLACE: Final = re.compile(r"\(at line (\d+), column \d+\)$")


class TopologyError(InventoryError):
    """A topology file with faults: all of them at once."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


def load_topology(path: str | Path, *, wall: Callable[[], float] = time.time) -> Inventory:
    """The node of a topology file at the beginning. Raises: TopologyError."""
    return load_scenario(path, wall=wall).after(0)


def load_scenario(path: str | Path, *, wall: Callable[[], float] = time.time) -> Scenario:
    """The node of a topology file, with its changes. Raises: TopologyError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError((Fault(str(path), "", error.strerror or str(error)),)) from error
    except UnicodeDecodeError as error:
        raise TopologyError((Fault(str(path), "", f"is not UTF-8: {error.reason}"),)) from error
    return parse_scenario(text, str(path), wall())


def parse_topology(text: str, file: str, taken_at: float) -> Inventory:
    """The node that `text` describes, at the beginning. file: its name in faults.

    Raises: TopologyError; InventoryError: the driver does not answer from the beginning.
    """
    return parse_scenario(text, file, taken_at).after(0)


def parse_scenario(text: str, file: str, taken_at: float) -> Scenario:
    """The node that `text` describes, with its changes. Raises: TopologyError."""
    from nri_gpu.simulation.contradictions import find_contradictions, with_lines  # only a simulated node needs it

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _SYNTAX_PLACE.search(str(error))
        fault = Fault(file, "", str(error), int(place.group(1)) if place else None)
        raise TopologyError((fault,)) from error
    notes = Notes(file)
    root = Table(notes, data)
    inventory = _read_inventory(root, taken_at)
    changes = read_changes(root, inventory)
    root.done()
    scenario = Scenario(inventory, changes)
    for path, sentence in tuple(find_contradictions(data, scenario, notes.faults)):
        notes.fault(path, sentence)
    if notes.faults:
        raise TopologyError(with_lines(notes.faults, text))
    return scenario


def _read_inventory(root: Table, taken_at: float) -> Inventory:
    root.number("schema", SCHEMA, SCHEMA)
    node = root.table("node")
    driver, cuda = (node.parsed(key, parse_version, default="") or "" for key in ("driver", "cuda"))
    majors = read_majors(node.table("majors", optional=True))
    modules = read_modules(node.table("modules", optional=True))
    extras = read_extras(node)
    node.done()
    gpus = sorted((read_gpu(table) for table in root.tables("gpu")), key=lambda gpu: gpu.index)
    indices = frozenset(gpu.index for gpu in gpus)
    links = sorted((read_link(table, indices) for table in root.tables("link")), key=lambda link: (link.a, link.b))
    numa = sorted((read_numa_node(table) for table in root.tables("numa")), key=lambda each: each.number)
    faults = sorted((read_fault(table) for table in root.tables("fault")), key=lambda each: each.index)
    return Inventory(
        taken_at=taken_at,
        gpus=tuple(gpus),
        faults=tuple(faults),
        links=tuple(links),
        numa=tuple(numa),
        majors=majors,
        driver_version=driver,
        cuda_version=cuda,
        simulated=True,
        extras=extras,
        script=read_events(root, indices),
        modules=modules,
    )
