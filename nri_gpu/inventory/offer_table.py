"""What a topology file says of extras: `[[node.extra]]`, the simulated node's own nodes, files and channels."""

from __future__ import annotations

import re
from posixpath import normpath
from typing import Final

from nri_gpu.domain.edits import DeviceNode, Mount
from nri_gpu.domain.extras import CHANNEL_MAX, Channels, Extra, Offer
from nri_gpu.inventory.offered_files import socket_mount
from nri_gpu.inventory.offers import SOCKETS
from nri_gpu.inventory.table import Table

MAJOR_MAX: Final = 4095  # 12 bits (linux/kdev_t.h)
MINOR_MAX: Final = 2**20 - 1  # 20 bits
# Made of the granted GPUs alone: nothing to say of them.
OF_GPUS: Final = frozenset({Extra.DRM, Extra.PROFILE})
_MODE: Final = re.compile("0[0-7]{3}")


def read_offers(node: Table) -> dict[Extra, Offer]:
    """The extras of a simulated node; what is wrong is noted."""
    offers: dict[Extra, Offer] = {}
    for table in node.tables("extra"):
        extra = table.parsed("name", _parse_extra)
        table.once("name", extra, among="extra")
        nodes = tuple(_node(each) for each in table.tables("nodes"))
        mounts = tuple(_mount(each, extra) for each in table.tables("mounts"))
        lacking = table.text("lacking", default="") or ""
        channels = _channels(table) if extra is Extra.IMEX and not (lacking and not table.has("channels")) else None
        table.done()
        if extra is not None:
            offers[extra] = Offer(nodes, mounts, channels, lacking)
            if not (nodes or mounts or channels or lacking):
                table.wrong("", f"says of {extra} neither nodes nor mounts")
    return offers


def _channels(table: Table) -> Channels | None:
    major, count = table.number("major", 1, MAJOR_MAX), table.number("channels", 1, CHANNEL_MAX + 1)
    return Channels(major, count) if major and count else None


def _node(table: Table) -> DeviceNode:
    node = DeviceNode(
        path=table.parsed("path", _parse_device_path) or "",
        major=table.number("major", 1, MAJOR_MAX) or 0,
        minor=table.number("minor", 0, MINOR_MAX) or 0,
        mode=int(table.parsed("mode", _parse_mode, default="0666") or "0", 8),
    )
    table.done()
    return node


def _mount(table: Table, extra: Extra | None) -> Mount:
    destination, source = (table.parsed(key, _parse_path) or "" for key in ("destination", "source"))
    table.done()
    return socket_mount(destination, source) if extra in SOCKETS else Mount(destination, source)


def _parse_extra(text: str) -> Extra:
    """Raises: ValueError."""
    known = [extra.value for extra in Extra if extra not in OF_GPUS]
    if text not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return Extra(text)


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
    """Text and not a number, because 0666 is no number to TOML. Raises: ValueError."""
    if not _MODE.fullmatch(text):
        raise ValueError(f'{text!r} is not a mode ("0666")')
    return text
