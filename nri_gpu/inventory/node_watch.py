"""The kernel's own word on devices and modules that come and go: a netlink socket, and which messages concern GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger
from msgspec import Struct

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


if TYPE_CHECKING:
    from nri_gpu.system.inotify import FolderWatch

DEV_FOLDERS: Final = tuple(Path("/dev", below) for below in ("", "nvidia-caps", "dri"))


class Pace(Struct, frozen=True, kw_only=True):
    """Seconds. look_s: between two glances. quiet_s: without news, before a change is told. longest_s: of a burst."""

    look_s: float = 1.0
    quiet_s: float = 0.1
    longest_s: float = 1.0


SIMULATED_PACE: Final = Pace(quiet_s=0.0)


class NodeWatch:
    """Tells `changed` once for each burst of changes. look: a glance; equal ones mean no change.

    waits: whether a look may have to wait for the kernel or a disk: it is made in a thread then. folders: for inotify.
    uevents: whether to listen to the kernel's events; a simulated node has none of either.
    """

    def __init__(
        self,
        look: Callable[[], Hashable],
        changed: Callable[[], None],
        *,
        folders: tuple[Path, ...] = DEV_FOLDERS,
        uevents: bool = True,
        waits: bool = True,
        pace: Pace | None = None,
    ) -> None:
        self._glance = look
        self._waits = waits
        self._changed = changed
        self._folders = folders
        self._uevents = Uevents(self.told) if uevents else None
        self._inotify: FolderWatch | None = None
        self._pace = pace or Pace()
        self._woken = asyncio.Event()
        self._certain = False

    def told(self) -> None:
        """By somebody who knows that something changed, whatever a glance shows."""
        self._certain = True
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        self._open()
        try:
            seen = await self._look()
            while True:
                if await self._wait(self._pace.look_s):
                    await self._settle()
                certain, self._certain = self._certain, False
                before, seen = seen, await self._look()
                if certain or seen != before:
                    if self._inotify:
                        self._inotify.add(self._folders)  # one of them may be new
                    self._changed()
        finally:
            self._close()

    async def _look(self) -> Hashable:
        return await asyncio.to_thread(self._glance) if self._waits else self._glance()

    def _open(self) -> None:
        """What cannot be had is said once: the glance does the same, up to a second later."""
        try:
            if self._uevents:
                self._uevents.open()
        except OSError as error:
            self._uevents = None
            logger.bind(fault=explain(error)).info("changes of the node are noticed by looking each second")
        if not self._folders:
            return
        from nri_gpu.system.inotify import FolderWatch  # ctypes: 2 ms and half a MiB, which a simulated node saves

        watch = FolderWatch(self._woken.set)
        try:
            watch.open(self._folders)
            self._inotify = watch
        except OSError as error:
            logger.bind(fault=str(error)).info("device nodes are not watched, but looked at each second")

    def _close(self) -> None:
        for each in (self._uevents, self._inotify):
            if each:
                each.close()

    async def _wait(self, limit_s: float) -> bool:
        """Whether something woke us before the time was up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._woken.wait()
        woken = self._woken.is_set()
        self._woken.clear()
        return woken

    async def _settle(self) -> None:
        """A driver's installation is a hundred changes: wait for their end, but not for ever."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._pace.longest_s
        while loop.time() < until and await self._wait(self._pace.quiet_s):
            pass


def node_watch(look: Callable[[], Hashable], changed: Callable[[], None], *, simulated: bool) -> NodeWatch:
    """Of this machine, or of a topology file, which neither the kernel nor /dev tells anything of."""
    if simulated:
        return NodeWatch(look, changed, folders=(), uevents=False, waits=False, pace=SIMULATED_PACE)
    return NodeWatch(look, changed)
