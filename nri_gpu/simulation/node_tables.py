"""The `[node]`, `[[link]]` and `[[numa]]` tables of a topology file."""

from __future__ import annotations

import re
from posixpath import normpath
from typing import Final

from nri_gpu.domain.edits import CHANNEL_MAX, Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.node import Link, Majors, NumaNode
from nri_gpu.inventory.extras import SOCKETS, socket_mount
from nri_gpu.inventory.formats import (
    DEVICE_MINOR_MAX,
    GPU_INDEX_MAX,
    MODULES,
    NUMA_NODE_MAX,
    NVLINKS_MAX,
    PCIE_PATHS,
    parse_cpulist,
    parse_module_version,
)
from nri_gpu.simulation.tables import MAJOR_MAX, Table

OF_GPUS: Final = frozenset({Extra.DRM, Extra.PROFILE})  # made of the granted GPUs alone, so a file has none of them
_MODE: Final = re.compile("0[0-7]{3}")


def read_majors(table: Table) -> Majors:
    """A module whose major is left out is not loaded."""
    names = ("nvidia", "nvidia_uvm", "nvidia_caps")
    nvidia, uvm, caps = (table.number(name, 1, MAJOR_MAX, optional=True) for name in names)
    modeset = table.maybe_flag("modeset")
    table.done()
    return Majors(nvidia=nvidia, nvidia_uvm=uvm, nvidia_caps=caps, modeset=modeset)


def read_modules(table: Table) -> dict[str, str]:
    """Versions by the kernel's names."""
    found = {name: table.parsed(name, parse_module_version) or "" for name in MODULES if table.has(name)}
    table.done()
    return found


def read_link(table: Table, indices: frozenset[int]) -> Link:
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


def read_numa_node(table: Table) -> NumaNode:
    """One `[[numa]]`."""
    number = table.number("node", 0, NUMA_NODE_MAX)
    table.once("node", number, among="numa")
    node = NumaNode(number or 0, table.parsed("cpus", parse_cpulist) or "", memory=table.flag("memory", default=True))
    table.done()
    return node


def read_extras(node: Table) -> dict[Extra, NodeExtra]:
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
