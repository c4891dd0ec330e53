"""One resource's socket, server and registration: made, watched and made anew, for ever.

The kubelet never dials twice, so whatever ends a session (its restart, a stream that ended, a folder that went) is
answered by a fresh socket with a fresh name and a new registration, in this order: the old server stops and its stream
is gone, then the new one registers. Kubelets before kubernetes#135437 otherwise take the end of the old stream for the
end of the new one; the newer ones know clients by their socket's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from loguru import logger
from msgspec import Struct

from nri_gpu._pb import deviceplugin_pb2 as pb
from nri_gpu.domain.errors import NriGpuError, RestartNeededError
from nri_gpu.domain.kubelet import ResourceStatus
from nri_gpu.kubelet.devices import AdvertisedDevices
from nri_gpu.kubelet.service import VERSION, DevicePlugin, Watched
from nri_gpu.policy.kinds import SOCKET_PATH_MAX
from nri_gpu.policy.kubelet import KubeletSettings, Registration

KUBELET_SOCKET: Final = "kubelet.sock"
REGISTER_TIMEOUT_S: Final = 15.0  # the kubelet dials us for 10 s within it
WATCHED_WITHIN_S: Final = 15.0
LOOK_EVERY_S: Final = 3.0  # inotify tells earlier, but for what comes between two looks
FIRST_WAIT_S: Final = 0.1
WAIT_MAX_S: Final = 30.0
LASTING_S: Final = 60.0
RIVALS_AFTER: Final = 3  # short sessions in a row
OPTIONS: Final = (("grpc.so_reuseport", 0),)

Stamp = tuple[int, int, int] | None


class RegistrationError(NriGpuError):
    """Why it did not work, for now."""


class EndpointPaths(Struct, frozen=True):
    """Where. changed: returns when something appears in a folder, or after so many seconds. wall: since the epoch."""

    settings: KubeletSettings
    changed: Callable[[Path, float], Awaitable[None]]
    wall: Callable[[], float] = time.time

    @property
    def folder(self) -> Path:
        """Of our sockets."""
        by_register = self.settings.registration is Registration.REGISTER
        return Path(self.settings.dir if by_register else self.settings.registry_dir)

    @property
    def kubelet(self) -> Path:
        """The kubelet's own socket."""
        return Path(self.settings.dir) / KUBELET_SOCKET


class Endpoint:
    """One resource, served until cancelled. began: called at the beginning of each session, before we are told of."""

    def __init__(
        self, resource: str, offers: AdvertisedDevices, place: EndpointPaths, began: Callable[[], None]
    ) -> None:
        self.resource = resource
        self.plugin = DevicePlugin(resource, offers)
        self.leaving = False  # another process registers from here on
        self._place = place
        self._began = began
        self._said = self._fault = ""
        self._since: float | None = None  # registered, seconds since the epoch
        self._short = 0  # sessions in a row that did not last
        self._wait_s = FIRST_WAIT_S

    async def run(self) -> None:
        """Until cancelled, whatever happens to the kubelet.

        Raises:
            RestartNeededError: the folder is another one than this process can reach.

        """
        loop = asyncio.get_running_loop()
        while not self.leaving:
            began, stamp = loop.time(), stamp_of(self._place.kubelet)
            at_once = False
            try:
                self._ended(await self._session())
                at_once = self._short == 1
            except RestartNeededError:
                raise
            except (RegistrationError, OSError) as error:
                self._complain(str(error))
            except Exception as error:  # the other half serves on, whatever this one meets
                logger.opt(exception=True).bind(resource=self.resource).error("kubelet session ended by a bug of ours")
                self._fault = f"a bug of ours ended it: {type(error).__name__}"
            self._since = None
            if loop.time() - began > LASTING_S or stamp_of(self._place.kubelet) != stamp:
                self._short, self._wait_s = 0, FIRST_WAIT_S
            if not at_once:
                await self._pause()

    def standing(self) -> ResourceStatus:
        """For who asks how it is."""
        return ResourceStatus(self.resource, self._since, self._fault)

    async def _session(self) -> str:
        """From a new socket to its end. Returns what ended it."""
        self._began()
        path = self._fresh_path()
        if rival := self._rival():
            raise RegistrationError(rival)
        self.plugin.lost.clear()
        self.plugin.aside = False
        by_register = self._place.settings.registration is Registration.REGISTER
        server = grpc.aio.server(options=OPTIONS)
        watched = None if by_register else Watched(self.resource)
        server.add_generic_rpc_handlers([self.plugin.handler(), *([watched.handler()] if watched else [])])
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise RegistrationError(f"socket {path} cannot be made: {error}") from error
        await server.start()
        try:
            stamp = stamp_of(self._place.kubelet)
            if by_register:
                await self._register(path)
            return await self._watch(path, stamp, watched)
        finally:
            await server.stop(None)
            path.unlink(missing_ok=True)

    def _fresh_path(self) -> Path:
        folder = self._place.folder
        self._check_reached()
        if not folder.is_dir():
            raise RegistrationError(f"there is no folder {folder}: the kubelet makes it at its start")
        remove_stale(folder)
        path = folder / f"nri-gpu-{self.resource.partition('/')[2]}-{secrets.token_hex(4)}.sock"
        if len(str(path).encode()) > SOCKET_PATH_MAX:
            raise RegistrationError(
                f"the socket's path {path} is longer than the {SOCKET_PATH_MAX} bytes that a socket can have: shorten "
                "kubelet.dir or kubelet.resource in the policy"
            )
        return path

    async def _register(self, path: Path) -> None:
        if not self._place.kubelet.exists():
            raise RegistrationError(f"no kubelet listens on {self._place.kubelet} yet")
        request = pb.RegisterRequest(
            version=VERSION,
            endpoint=path.name,
            resource_name=self.resource,
            options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
        )
        # Of its own: others inherit the back-off of those before, to a socket that has gone.
        alone = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"unix:{self._place.kubelet}", options=alone) as channel:
            call: Any = channel.unary_unary(
                "/v1beta1.Registration/Register",
                request_serializer=pb.RegisterRequest.SerializeToString,
                response_deserializer=pb.Empty.FromString,
            )
            try:
                await call(request, timeout=REGISTER_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                what = " ".join(str(error.details()).split())[:300]
                raise RegistrationError(f"the kubelet did not register it: {error.code().name}: {what}") from None
        self._registered(path)

    def _registered(self, path: Path) -> None:
        logger.bind(resource=self.resource, socket=str(path)).info("registered with the kubelet")
        self._said = self._fault = ""
        self._since = self._place.wall()

    async def _watch(self, path: Path, stamp: Stamp, watched: Watched | None) -> str:
        """Until this session is over; returns why. watched: where the kubelet comes to us."""
        until = asyncio.get_running_loop().time() + WATCHED_WITHIN_S
        while True:
            if self.plugin.lost.is_set():
                return "the kubelet ended its stream"
            self._check_reached()
            if stamp_of(path) is None:
                return "our socket was removed, as the kubelet does at its start"
            if watched is None and stamp_of(self._place.kubelet) != stamp:
                return "the kubelet was restarted"
            if watched:
                self._heard(path, watched)
            rival = self._rival()
            if self.plugin.aside and not rival:
                return "the other device plugin is gone"
            if rival and not self.plugin.aside:
                # Ending our stream could take theirs along (kubernetes#121994), so it stays open and says nothing more.
                self.plugin.aside, self._since = True, None
                self._complain(rival)
            late = asyncio.get_running_loop().time() > until
            if late and not self.plugin.watched.is_set() and not self.plugin.aside:
                if watched is None:
                    raise RegistrationError("the kubelet registered it and never asked for its devices")
                self._complain(f"no kubelet has come to {path} yet: is kubelet.registry_dir the folder it looks in?")
            await self._something(path.parent, watched)

    def _heard(self, path: Path, watched: Watched) -> None:
        """What the plugin watcher made of us. Raises: RegistrationError: it will not ask again by itself."""
        verdict, watched.verdict = watched.verdict, None
        watched.told.clear()
        if verdict:
            raise RegistrationError(f"the kubelet did not register it: {ascii(verdict)[1:301]}")
        if verdict is not None:
            self._registered(path)

    def _rival(self) -> str:
        """Who else serves the name, and what to do; empty when nobody does, that can be told."""
        rival = rival_of(self.resource, self._place.kubelet.parent)
        return rival and (
            f"{rival} is NVIDIA's device plugin and serves {self.resource} already: two of one name take it from "
            "each other, so take that one off the node, or set kubelet.resource"
        )

    def _check_reached(self) -> None:
        """Raises: RestartNeededError: a folder was removed and made anew beneath a mount, which shows the old one."""
        for folder in {self._place.folder, self._place.kubelet.parent}:
            if removed(folder):
                raise RestartNeededError(
                    f"{folder} was removed, and this process has a mount of it that shows no other one made in its "
                    "place: it ends, so that it is started with a new mount"
                )

    async def _something(self, folder: Path, watched: Watched | None) -> None:
        """Until something may be different."""
        waits = [
            asyncio.ensure_future(self._place.changed(folder, LOOK_EVERY_S)),
            asyncio.ensure_future(self.plugin.lost.wait()),
            *([asyncio.ensure_future(watched.told.wait())] if watched else []),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _pause(self) -> None:
        """The back-off, cut short by a kubelet that comes."""
        loop, stamp = asyncio.get_running_loop(), stamp_of(self._place.kubelet)
        until = loop.time() + self._wait_s * random.uniform(0.5, 1.0)
        self._wait_s = min(self._wait_s * 2, WAIT_MAX_S)
        while (left := until - loop.time()) > 0 and stamp_of(self._place.kubelet) == stamp:
            await self._place.changed(self._place.kubelet.parent, min(left, LOOK_EVERY_S))
        if stamp_of(self._place.kubelet) != stamp:
            self._short, self._wait_s = 0, FIRST_WAIT_S

    def _ended(self, why: str) -> None:
        logger.bind(resource=self.resource, fault=why).info("registering with the kubelet again")
        self._fault = why
        self._short += 1
        if self._short == RIVALS_AFTER:
            self._complain(
                f"the kubelet let go of {self.resource} {RIVALS_AFTER} times in a row and was not restarted: another "
                "device plugin seems to register the same name; take one of them off the node"
            )

    def _complain(self, sentence: str) -> None:
        """Once for each new fault."""
        if sentence != self._said:
            logger.bind(resource=self.resource, fault=sentence).warning("not registered with the kubelet, trying again")
        self._said = self._fault = sentence


def stamp_of(path: Path) -> Stamp:
    """What tells one socket from the next of that name; None where there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def removed(folder: Path) -> bool:
    """Whether it, or the closest above it that there is, was removed: only a mount still shows one, and it is empty."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        return there.stat().st_nlink == 0 and not any(there.iterdir())
    except OSError:
        return False


def rival_of(resource: str, folder: Path) -> str:
    """The socket of NVIDIA's device plugin for a resource, where somebody listens on it; else empty."""
    prefix, _, name = resource.partition("/")
    path = folder / f"nvidia-{name}.sock"
    return str(path) if prefix == "nvidia.com" and listens(path) else ""


def remove_stale(folder: Path) -> None:
    """Sockets of ours that nobody listens on: a process that was killed left them."""
    for path in folder.glob("nri-gpu-*.sock"):
        if path.is_socket() and not listens(path):
            path.unlink(missing_ok=True)


def listens(path: Path) -> bool:
    """Whether somebody does. Connecting to a local socket does not wait: the kernel answers."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its queue is full, so there is one
            return True
        except OSError:
            return False
        return True


TICK_S: Final = 5.0  # for what changes by time alone: grants that lapse, an inventory that grows old


class DevicePlugins:
    """The device plugin. tick: called before each look. began: at the beginning of each session of each resource."""

    def __init__(
        self, offers: AdvertisedDevices, place: EndpointPaths, tick: Callable[[], None], began: Callable[[], None]
    ) -> None:
        self._offers = offers
        self._place = place
        self._tick = tick
        self._began = began
        self._poked = asyncio.Event()
        self._bug = ""
        self._leaving = False
        self._endpoints: dict[str, Endpoint] = {}

    def changed(self) -> None:
        """GPUs, grants, the policy or the connection to the runtime."""
        self._poked.set()

    def standings(self) -> tuple[ResourceStatus, ...]:
        """How each resource stands with the kubelet."""
        return tuple(endpoint.standing() for endpoint in self._endpoints.values())

    def watched(self) -> bool:
        """Whether the kubelet reads the list of every resource."""
        endpoints = self._endpoints.values()
        return bool(endpoints) and all(each.plugin.watched.is_set() for each in endpoints)

    def leave(self) -> None:
        """Serve on, and register no more."""
        self._leaving = True
        for endpoint in self._endpoints.values():
            endpoint.leaving = True

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            ExceptionGroup: of RestartNeededError alone.

        """
        async with asyncio.TaskGroup() as group:
            while True:
                self._poked.clear()
                try:
                    self._look(group)
                except Exception as error:  # the other half serves on, whatever this one meets
                    if repr(error) != self._bug:
                        logger.opt(exception=True).error("device plugin not up to date, by a bug of ours")
                    self._bug = repr(error)
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._poked.wait()
                except TimeoutError:
                    continue

    def _look(self, group: asyncio.TaskGroup) -> None:
        self._tick()
        for resource in () if self._leaving else self._offers.resources():
            if resource not in self._endpoints:
                self._endpoints[resource] = Endpoint(resource, self._offers, self._place, self._began)
                group.create_task(self._endpoints[resource].run())
            self._endpoints[resource].plugin.changed()
        self._bug = ""
