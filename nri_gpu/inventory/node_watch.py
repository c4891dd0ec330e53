"""The watch for changes of a node's GPUs: the kernel's device events, inotify on /dev, and a check each second."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger
from msgspec import Struct

from nri_gpu.system.tasks import first_done

if TYPE_CHECKING:
    from nri_gpu.system.folder_watch import FolderWatch

NETLINK_KOBJECT_UEVENT: Final = 15  # linux/netlink.h
KERNEL_GROUP: Final = 1  # 2 is udev's, whose messages are about the same things and come later
KERNEL_PORT: Final = 0  # the sender; others with CAP_NET_ADMIN could send too
MESSAGE_MAX: Final = 8192  # the kernel's own limit is 2048 for the variables (linux/kobject.h: UEVENT_BUFFER_SIZE)
NVIDIA_VENDOR: Final = "10DE:"
DEV_FOLDERS: Final = tuple(Path("/dev", below) for below in ("", "nvidia-caps", "dri"))


def parse_uevent(message: bytes) -> Mapping[str, str]:
    r"""Return the variables of a kernel message, `ACTION@DEVPATH\0KEY=VALUE\0...`, or an empty map for other input."""
    head, *rest = message.decode("utf-8", errors="replace").split("\0")
    if "@" not in head:
        return {}
    pairs = (word.partition("=") for word in rest)
    return {key: value for key, equals, value in pairs if equals}


def concerns_gpus(event: Mapping[str, str]) -> bool:
    """Return whether the event is about NVIDIA's modules, its PCI functions, or DRM nodes."""
    subsystem = event.get("SUBSYSTEM", "")
    if subsystem == "pci":
        return event.get("PCI_ID", "").startswith(NVIDIA_VENDOR) or event.get("DRIVER") == "nvidia"
    if subsystem == "module":
        return event.get("DEVPATH", "").startswith("/module/nvidia")
    return subsystem == "drm" or subsystem.startswith("nvidia")


def netlink() -> socket.socket:
    """Return a socket that receives the kernel's device events. It needs no capability.

    The kernel sends them to the network namespaces that the host's user namespace owns. In another user namespace the
    socket can be made and stays silent. Source: linux lib/kobject_uevent.c, man 7 netlink.

    Raises: OSError, in a sandbox that forbids such sockets.
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
    """A receiver of device events. changed: called once for each batch of messages with one that concerns GPUs."""

    def __init__(self, changed: Callable[[], None], connect: Callable[[], socket.socket] = netlink) -> None:
        self._changed = changed
        self._connect = connect
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Begin. Raises: OSError."""
        self._socket = self._connect()
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
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
            except OSError:  # ENOBUFS: some messages were lost, which may have concerned GPUs
                concerning = True
                break
            concerning = concerning or (port == KERNEL_PORT and concerns_gpus(parse_uevent(message)))
        if concerning:
            self._changed()


class Pace(Struct, frozen=True, kw_only=True):
    """The watch's intervals."""

    look_s: float = 1.0  # between two looks, in seconds
    quiet_s: float = 0.1  # without news before a change is reported, in seconds
    longest_s: float = 1.0  # the longest burst, in seconds


SIMULATED_PACE: Final = Pace(quiet_s=0.0)


class NodeWatch:
    """A watch that calls `changed` once for each burst of changes."""

    def __init__(
        self,
        look: Callable[[], Hashable],  # returns the kernel view; equal views mean no change
        changed: Callable[[], None],
        *,
        folders: tuple[Path, ...] = DEV_FOLDERS,  # for inotify; a simulated node has none
        uevents: bool = True,  # receive the kernel's events; a simulated node has none
        blocking: bool = True,  # a look may wait for the kernel or a disk, so it is made in a thread
        pace: Pace | None = None,
    ) -> None:
        self._view = look
        self._blocking = blocking
        self._changed = changed
        self._folders = folders
        self._uevents = Uevents(self.notify) if uevents else None
        self._inotify: FolderWatch | None = None
        self._pace = pace or Pace()
        self._woken = asyncio.Event()
        self._certain = False

    def notify(self) -> None:
        """Report a change, whatever the next look shows."""
        self._certain = True
        self._woken.set()

    async def run(self) -> None:
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
        return await asyncio.to_thread(self._view) if self._blocking else self._view()

    def _open(self) -> None:
        """Open the watches, and log once what cannot be watched: the look each second finds the same changes later."""
        try:
            if self._uevents:
                self._uevents.open()
        except OSError as error:
            self._uevents = None
            logger.bind(fault=explain(error)).info("no device events: looking for changes of the node each second")
        if not self._folders:
            return
        from nri_gpu.system.folder_watch import FolderWatch  # a simulated node does without the 2 ms of its import

        watch = FolderWatch(self._woken.set)
        try:
            watch.open(self._folders)
            self._inotify = watch
        except OSError as error:
            logger.bind(fault=str(error)).info("no inotify: looking for changes of device nodes each second")

    def _close(self) -> None:
        for each in (self._uevents, self._inotify):
            if each:
                each.close()

    async def _wait(self, limit_s: float) -> bool:
        """Wait, and return whether something woke us before the time was up."""
        await first_done(self._woken.wait(), timeout_s=limit_s)
        woken = self._woken.is_set()
        self._woken.clear()
        return woken

    async def _settle(self) -> None:
        """Wait for the last of the changes, but not for ever: installing a driver makes a hundred."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._pace.longest_s
        while loop.time() < until and await self._wait(self._pace.quiet_s):
            pass


def explain(error: OSError) -> str:
    """Return a clause that says why the socket for device events cannot be opened."""
    return f"cannot receive the kernel's device events ({os.strerror(error.errno or 0)})"


def node_watch(look: Callable[[], Hashable], changed: Callable[[], None], *, simulated: bool) -> NodeWatch:
    """Return the watch of this machine, or of a topology file, whose changes neither the kernel nor /dev reports."""
    if simulated:
        return NodeWatch(look, changed, folders=(), uevents=False, blocking=False, pace=SIMULATED_PACE)
    return NodeWatch(look, changed)
