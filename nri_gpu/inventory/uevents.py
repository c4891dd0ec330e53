"""The kernel's own word on devices and modules that come and go: a netlink socket, and which messages concern GPUs."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

NETLINK_KOBJECT_UEVENT: Final = 15  # linux/netlink.h
KERNEL_GROUP: Final = 1  # 2 is udev's, whose messages are about the same things and come later
KERNEL_PORT: Final = 0  # who sends them; others with CAP_NET_ADMIN could
MESSAGE_MAX: Final = 8192  # the kernel's own limit is 2048 of variables (linux/kobject.h: UEVENT_BUFFER_SIZE)
NVIDIA_VENDOR: Final = "10DE:"


def parse_uevent(message: bytes) -> Mapping[str, str]:
    r"""The variables of a kernel message, `ACTION@DEVPATH\0KEY=VALUE\0...`; empty where it is none."""
    head, *rest = message.decode("utf-8", errors="replace").split("\0")
    if "@" not in head:
        return {}
    pairs = (word.partition("=") for word in rest)
    return {key: value for key, equals, value in pairs if equals}


def concerns_gpus(event: Mapping[str, str]) -> bool:
    """Whether the node's GPUs may be others after it: NVIDIA's modules, its PCI functions, and graphics nodes."""
    subsystem = event.get("SUBSYSTEM", "")
    if subsystem == "pci":
        return event.get("PCI_ID", "").startswith(NVIDIA_VENDOR) or event.get("DRIVER") == "nvidia"
    if subsystem == "module":
        return event.get("DEVPATH", "").startswith("/module/nvidia")
    return subsystem == "drm" or subsystem.startswith("nvidia")


def netlink() -> socket.socket:
    """A socket that hears the kernel. It needs no capability.

    The kernel tells the sockets of every network namespace that the host's user namespace owns: in one of another user
    namespace it works, and stays silent. Source: linux lib/kobject_uevent.c, man 7 netlink.

    Raises: OSError: a sandbox forbids such sockets.
    """
    kinds = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    made = socket.socket(socket.AF_NETLINK, kinds, NETLINK_KOBJECT_UEVENT)
    try:
        made.bind((0, KERNEL_GROUP))
    except OSError:
        made.close()
        raise
    return made


class Uevents:
    """Listens until closed. told: called once for each batch of messages of which one concerns GPUs."""

    def __init__(self, told: Callable[[], None], connect: Callable[[], socket.socket] = netlink) -> None:
        self._told = told
        self._connect = connect
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Begin. Raises: OSError."""
        self._socket = self._connect()
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        """Listen no more."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _read(self) -> None:
        concerning = False
        while self._socket is not None:
            try:
                message, (port, _groups) = self._socket.recvfrom(MESSAGE_MAX)
            except BlockingIOError:
                break
            except OSError:  # ENOBUFS: some were lost, and nobody knows which
                concerning = True
                break
            concerning = concerning or (port == KERNEL_PORT and concerns_gpus(parse_uevent(message)))
        if concerning:
            self._told()


def explain(error: OSError) -> str:
    """A clause on why there is no such socket."""
    return f"the kernel's device events cannot be heard ({os.strerror(error.errno or 0)})"
