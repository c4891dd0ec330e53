"""Topology files: a node described in TOML, for demos, CI and clusters without GPUs. See config/topologies/."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from posixpath import normpath
from typing import Final

from nri_gpu.domain.edits import CHANNEL_MAX, Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.errors import Fault, InventoryError
from nri_gpu.domain.node import Inventory, Link, NumaNode
from nri_gpu.inventory.extras import SOCKETS, socket_mount
from nri_gpu.inventory.formats import (
    DEVICE_MINOR_MAX,
    GPU_INDEX_MAX,
    NUMA_NODE_MAX,
    NVLINKS_MAX,
    PCIE_PATHS,
    parse_cpulist,
    parse_module_version,
    parse_version,
)
from nri_gpu.simulation.gpu_tables import read_fault, read_gpu
from nri_gpu.simulation.scenario import Scenario, read_changes, read_events, read_majors
from nri_gpu.simulation.tables import MAJOR_MAX, Notes, Table
from nri_gpu.system.kernel_modules import MODULES

SCHEMA: Final = 1
OF_GPUS: Final = frozenset({Extra.DRM, Extra.PROFILE})  # made of the granted GPUs alone, so a file has none of them
_MODE: Final = re.compile("0[0-7]{3}")
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
    modules = _read_modules(node.table("modules", optional=True))
    extras = _read_extras(node)
    node.done()
    gpus = sorted((read_gpu(table) for table in root.tables("gpu")), key=lambda gpu: gpu.index)
    indices = frozenset(gpu.index for gpu in gpus)
    links = sorted((_read_link(table, indices) for table in root.tables("link")), key=lambda link: (link.a, link.b))
    numa = sorted((_read_numa_node(table) for table in root.tables("numa")), key=lambda each: each.number)
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


def _read_modules(table: Table) -> dict[str, str]:
    """Versions by the kernel's names."""
    found = {name: table.parsed(name, parse_module_version) or "" for name in MODULES if table.has(name)}
    table.done()
    return found


def _read_link(table: Table, indices: frozenset[int]) -> Link:
    """One `[[link]]`. indices: of the file's GPUs."""
    a, b = (table.number(key, 0, GPU_INDEX_MAX) for key in ("a", "b"))
    for key, end in (("a", a), ("b", b)):
        if end is not None and end not in indices:
            table.wrong(key, f"there is no GPU with index {end}")
    if a is not None and b is not None:
        if a >= b:
            table.wrong("a", f"must be less than b: {a}, {b}")
        table.once("", (a, b), among="link")
    link = Link(
        a=a or 0,
        b=b or 0,
        pcie=table.one_of("pcie", PCIE_PATHS) or "",
        nvlink=table.number("nvlink", 0, NVLINKS_MAX, optional=True) or 0,
    )
    table.done()
    return link


def _read_numa_node(table: Table) -> NumaNode:
    """One `[[numa]]`."""
    number = table.number("node", 0, NUMA_NODE_MAX)
    table.once("node", number, among="numa")
    node = NumaNode(number or 0, table.parsed("cpus", parse_cpulist) or "", memory=table.flag("memory", default=True))
    table.done()
    return node


def _read_extras(node: Table) -> dict[Extra, NodeExtra]:
    """`[[node.extra]]`."""
    extras: dict[Extra, NodeExtra] = {}
    for table in node.tables("extra"):
        name = table.one_of("name", tuple(extra.value for extra in Extra if extra not in OF_GPUS))
        extra = None if name is None else Extra(name)
        table.once("name", extra, among="extra")
        nodes = tuple(_device_node(each) for each in table.tables("nodes"))
        mounts = tuple(_mount(each, extra) for each in table.tables("mounts"))
        lacking = table.text("lacking", default="") or ""
        channels = _channels(table) if extra is Extra.IMEX and not (lacking and not table.has("channels")) else None
        table.done()
        if extra is not None:
            extras[extra] = NodeExtra(nodes, mounts, channels, lacking)
            if not (nodes or mounts or channels or lacking):
                table.wrong("", f"{extra} has neither nodes nor mounts")
    return extras


def _channels(table: Table) -> Channels | None:
    major, count = table.number("major", 1, MAJOR_MAX), table.number("channels", 1, CHANNEL_MAX + 1)
    return Channels(major, count) if major and count else None


def _device_node(table: Table) -> DeviceNode:
    node = DeviceNode(
        path=table.parsed("path", _parse_device_path) or "",
        major=table.number("major", 1, MAJOR_MAX) or 0,
        minor=table.number("minor", 0, DEVICE_MINOR_MAX) or 0,
        mode=int(table.parsed("mode", _parse_mode, default="0666") or "0", 8),
    )
    table.done()
    return node


def _mount(table: Table, extra: Extra | None) -> Mount:
    destination, source = (table.parsed(key, _parse_path) or "" for key in ("destination", "source"))
    table.done()
    return socket_mount(destination, source) if extra in SOCKETS else Mount(destination, source)


def _parse_path(text: str) -> str:
    """Raises: ValueError."""
    if not text.startswith("/") or text.startswith("//") or normpath(text) != text:
        raise ValueError(f"{text!r} is not an absolute path without `.`, `..` and `//`")
    return text


def _parse_device_path(text: str) -> str:
    """Raises: ValueError."""
    if not _parse_path(text).startswith("/dev/"):
        raise ValueError(f"{text!r} is not below /dev")
    return text


def _parse_mode(text: str) -> str:
    """A text and not a number, because TOML has no 0666. Raises: ValueError."""
    if not _MODE.fullmatch(text):
        raise ValueError(f'{text!r} is not a mode ("0666")')
    return text
