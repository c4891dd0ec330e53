"""The socket of one resource of our device plugin: served, registered and watched for as long as the daemon runs.

The DRA driver's sockets (dra/kubelet_sockets.py) are started and checked by the functions at the end.

The kubelet never dials twice. So whatever ends a session (its restart, a stream that ended, a folder that was removed)
is answered by a new socket with a new name and a new registration, in this order: the old server stops and its stream
ends, then the new server registers. Kubelets before kubernetes#135437 otherwise take the end of the old stream for the
end of the new stream; newer kubelets tell clients apart by their socket's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from loguru import logger
from msgspec import Struct

from nri_gpu._pb import deviceplugin_pb2 as pb
from nri_gpu._pb import deviceplugin_pb2_grpc as pb_grpc
from nri_gpu._pb import pluginregistration_pb2_grpc as watcher_grpc
from nri_gpu._pb.pluginregistration_pb2 import PluginInfo
from nri_gpu.domain.allocation import ResourceStatus
from nri_gpu.domain.errors import NriGpuError, RestartNeededError, fault_of
from nri_gpu.kubelet.advertised import AdvertisedDevices
from nri_gpu.kubelet.device_plugin import VERSION, DevicePluginService, PluginWatcherService
from nri_gpu.policy.forms import SOCKET_PATH_MAX
from nri_gpu.policy.kubelet_settings import Registration
from nri_gpu.system.folder_watch import folder_changed, folder_watched
from nri_gpu.system.storage import Signature, signature
from nri_gpu.system.tasks import STUCK_S, Backoff, LogOnce, set_within, to_its_end

REGISTER_TIMEOUT_S: Final = 15.0  # within it the kubelet dials us, for up to 10 s
LASTING_S: Final = 60.0  # a session that lasted so long was a good one
IN_FLIGHT_S: Final = 0.1  # for calls that are being answered: a call that is cut off costs a pod its admission
RIVALS_AFTER: Final = 3  # short sessions in a row


class EndpointTimes(Struct, frozen=True):
    """The times of an endpoint, in seconds."""

    watched_within: float = 15.0  # after a registration
    look_every: float = 3.0  # inotify is faster, but misses what happens between two looks
    first_wait: float = 0.1  # after a failure
    longest_wait: float = 30.0  # at most, after several failures
    stuck: float = STUCK_S  # not registered for so long is an error in the log


class RegistrationError(NriGpuError):
    """A failed registration. Its sentence says why the kubelet cannot find or call us; it is tried again."""


class Endpoint:
    """The socket of a resource. began: called at the beginning of each session, before the kubelet learns of it.

    registers: False once another daemon takes over; what runs is then still served, and nothing registered again.
    """

    def __init__(
        self, resource: str, devices: AdvertisedDevices, began: Callable[[], None], times: EndpointTimes | None = None
    ) -> None:
        settings = devices.settings
        self.resource = resource
        self._woken = asyncio.Event()  # the session may be over
        self.plugin = DevicePluginService(resource, devices, self._woken.set)
        self.registers = True
        # Otherwise the kubelet's plugin watcher finds our socket.
        self._by_register = settings.registration is Registration.REGISTER
        self._folder = Path(settings.dir if self._by_register else settings.registry_dir)
        self._kubelet = Path(settings.dir, "kubelet.sock")
        self._began = began
        self._times = times = times or EndpointTimes()
        self._log = LogOnce(stuck_s=times.stuck)
        self._fault = ""
        self._since: float | None = None  # registered, seconds since the epoch
        self._short = 0  # sessions in a row that did not last
        self._waits = Backoff(times.first_wait, times.longest_wait, jitter=0.5)

    async def run(self) -> None:
        """Serve until cancelled, whatever happens to the kubelet.

        Raises: RestartNeededError: this process cannot reach the folder that is there now.
        """
        loop = asyncio.get_running_loop()
        while self.registers:
            began, kubelet = loop.time(), self._kubelet_signature()
            at_once = False
            try:
                self._ended(await self._session())
                at_once = self._short == 1
            except RestartNeededError:
                raise
            except (RegistrationError, OSError) as error:
                self._complain(fault_of(error))
            except Exception as error:  # the NRI plugin goes on serving, whatever goes wrong here
                logger.opt(exception=True).bind(resource=self.resource).error("bug: kubelet session ended")
                self._fault = f"a bug in nri-gpu ended it: {type(error).__name__}"
            self._since = None
            if loop.time() - began > LASTING_S or self._kubelet_signature() != kubelet:
                self._start_over()
            if not at_once:
                await self._pause()

    def status(self) -> ResourceStatus:
        """Return whether the resource is registered, and why not."""
        return ResourceStatus(self.resource, self._since is not None, self._since, self._fault)

    async def _session(self) -> str:
        """Serve a new socket until its end. Return what ended it."""
        self._began()
        path = self._fresh_path()
        if rival := self._rival():
            raise RegistrationError(rival)
        self.plugin.lost = self.plugin.paused = False
        info = PluginInfo(type="DevicePlugin", name=self.resource, supported_versions=[VERSION])
        watcher = None if self._by_register else PluginWatcherService(info, self._woken.set)

        def add(server: grpc.aio.Server) -> None:
            pb_grpc.add_DevicePluginServicer_to_server(self.plugin, server)
            if watcher:
                watcher_grpc.add_RegistrationServicer_to_server(watcher, server)

        server = await serve_at(path, add, "kubelet.dir or kubelet.resource")
        try:
            kubelet = self._kubelet_signature()
            if self._by_register:
                await self._register(path)
            with folder_watched(path.parent, self._woken.set):
                return await self._watch(path, kubelet, watcher)
        finally:
            await to_its_end(server.stop(IN_FLIGHT_S))
            path.unlink(missing_ok=True)

    def _fresh_path(self) -> Path:
        check_reached(self._kubelet.parent)
        check_made(self._folder)
        for left in self._folder.glob("nri-gpu-*.sock"):  # by a process of ours that was killed
            if left.is_socket() and not _listens(left):
                left.unlink(missing_ok=True)
        return self._folder / f"nri-gpu-{self.resource.partition('/')[2]}-{secrets.token_hex(4)}.sock"

    async def _register(self, path: Path) -> None:
        if not self._kubelet.exists():
            raise RegistrationError(f"no kubelet listens on {self._kubelet} yet")
        request = pb.RegisterRequest(
            version=VERSION,
            endpoint=path.name,
            resource_name=self.resource,
            options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
        )
        # The channel has a pool of its own: otherwise it inherits the back-off of a channel to a socket that is gone.
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}", options=options) as channel:
            try:
                await pb_grpc.RegistrationStub(channel).Register(request, timeout=REGISTER_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                what = " ".join(str(error.details()).split())[:300]
                raise RegistrationError(f"the kubelet did not register it: {error.code().name}: {what}") from None
        self._registered(path)

    def _registered(self, path: Path) -> None:
        logger.bind(resource=self.resource, socket=str(path)).info("registered with the kubelet")
        self._log.clear()
        self._fault = ""
        self._since = time.time()

    async def _watch(self, path: Path, kubelet: Signature | None, watcher: PluginWatcherService | None) -> str:
        """Wait until the session is over. Return why. watcher: where the kubelet finds us by itself."""
        until = asyncio.get_running_loop().time() + self._times.watched_within
        while True:
            self._woken.clear()
            check_reached(self._folder, self._kubelet.parent)
            if self.plugin.lost:
                return "the kubelet ended its stream"
            if signature(path, follow=False) is None:
                return "our socket was removed, as the kubelet does at its start"
            if watcher:
                self._take_verdict(path, watcher)
            elif self._kubelet_signature() != kubelet:
                return "the kubelet was restarted"
            rival = self._rival()
            if self.plugin.paused and not rival:
                return "the other device plugin is gone"
            if rival and not self.plugin.paused:
                # Our stream's end could end the other's too (kubernetes#121994), so it stays open, without messages.
                self.plugin.paused, self._since = True, None
                self._complain(rival)
            late = asyncio.get_running_loop().time() > until
            if late and not self.plugin.watched and not self.plugin.paused:
                if watcher is None:
                    raise RegistrationError("the kubelet registered it and never asked for its devices")
                self._complain(f"no kubelet has come to {path} yet: is kubelet.registry_dir the folder it looks in?")
            await set_within(self._woken, self._times.look_every)

    def _take_verdict(self, path: Path, watcher: PluginWatcherService) -> None:
        """Take the plugin watcher's verdict, if there is one.

        Raises: RegistrationError: the watcher refused us, and will not ask again by itself.
        """
        verdict = watcher.take_verdict()
        if verdict:
            raise RegistrationError(verdict)
        if verdict is not None:
            self._registered(path)

    def _rival(self) -> str:
        """Say that NVIDIA's device plugin serves the resource, and what to do; empty if it does not."""
        prefix, _, name = self.resource.partition("/")
        path = self._kubelet.with_name(f"nvidia-{name}.sock")
        if prefix != "nvidia.com" or not _listens(path):
            return ""
        return (
            f"{path} is NVIDIA's device plugin and serves {self.resource} already, and two plugins of one name replace "
            "each other: remove NVIDIA's from the node, or set kubelet.resource"
        )

    async def _pause(self) -> None:
        """Wait for the back-off, which ends early if a kubelet starts."""
        loop, kubelet = asyncio.get_running_loop(), self._kubelet_signature()
        until = loop.time() + self._waits.next_s()
        while (left := until - loop.time()) > 0 and self._kubelet_signature() == kubelet:
            await folder_changed(self._kubelet.parent, min(left, self._times.look_every))
        if self._kubelet_signature() != kubelet:
            self._start_over()

    def _start_over(self) -> None:
        self._short = 0
        self._waits.reset()

    def _kubelet_signature(self) -> Signature | None:
        """Return the signature of the kubelet's socket, which changes when the kubelet makes a new one, or None."""
        return signature(self._kubelet, follow=False)

    def _ended(self, why: str) -> None:
        logger.bind(resource=self.resource, fault=why).info("registering with the kubelet again")
        self._fault = why
        self._short += 1
        if self._short == RIVALS_AFTER:
            self._complain(
                f"the kubelet dropped {self.resource} {RIVALS_AFTER} times in a row and was not restarted: another "
                "device plugin seems to register the same name; remove one of them from the node"
            )

    def _complain(self, fault: str) -> None:
        self._log.warning("not registered with the kubelet, trying again", fault, resource=self.resource)
        self._fault = fault


async def serve_at(path: Path, add: Callable[[grpc.aio.Server], object], keys: str) -> grpc.aio.Server:
    """Start a gRPC server on a socket of that path, with the services that `add` gives it. Raises: RegistrationError.

    keys: the policy's keys by which the path becomes shorter.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise RegistrationError(
            f"the socket's path {path} is longer than the {SOCKET_PATH_MAX} bytes that a socket can have: shorten "
            f"{keys} in the policy"
        )
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add(server)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise RegistrationError(f"socket {path} cannot be made: {error}") from error
    await server.start()
    return server


def check_made(folder: Path) -> None:
    """Check that the kubelet has made a folder.

    Raises: RegistrationError: it has not made the folder yet; RestartNeededError: as `check_reached`.
    """
    check_reached(folder)
    if not folder.is_dir():
        raise RegistrationError(f"there is no folder {folder}: the kubelet makes it at its start")


def check_reached(*folders: Path) -> None:
    """Check that this process reaches folders.

    Raises: RestartNeededError: a folder was removed and made anew, and our mount still shows the old folder.
    """
    for folder in folders:
        if _removed(folder):
            raise RestartNeededError(
                f"{folder} was removed; this process's mount does not show its replacement: exiting, so that a restart "
                "mounts the new folder"
            )


def _removed(folder: Path) -> bool:
    """Return whether a folder, or the closest existing one above it, was removed, and only a mount still shows it."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        return there.stat().st_nlink == 0 and not any(there.iterdir())
    except OSError:
        return False


def _listens(path: Path) -> bool:
    """Return whether somebody listens on a socket. Connecting to a local socket does not wait."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:  # the queue is full, so there is a listener
            return True
        except OSError:
            return False
        return True
