"""The two sockets for the kubelet: `dra.sock`, and the socket in `plugins_registry` by which the kubelet finds it.

The kubelet's plugin watcher dials a registration socket as it appears, and drops the driver as it goes. So the answer
to a refusal is a new registration socket. `dra.sock` stays meanwhile, with the calls that are being answered on it.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from loguru import logger

from nri_gpu._pb.pluginregistration_pb2 import PluginInfo
from nri_gpu._pb.pluginregistration_pb2_grpc import add_RegistrationServicer_to_server
from nri_gpu.domain.errors import fault_of
from nri_gpu.dra.claim_service import SUPPORTED
from nri_gpu.dra.device_health import SERVICES as HEALTH_SERVICES
from nri_gpu.dra.questions import NodeView
from nri_gpu.kubelet.device_plugin import PluginWatcherService
from nri_gpu.kubelet.registered_socket import EndpointTimes, RegistrationError, check_made, check_reached, serve_at
from nri_gpu.system.folder_watch import folder_watched
from nri_gpu.system.storage import lock_holder, open_lock, signature, try_lock
from nri_gpu.system.tasks import Backoff, LogOnce, set_within, to_its_end

DRAIN_S: Final = 2.0
LOOK_S: Final = 0.05


class KubeletSockets:
    """The sockets of a driver. One process at a time holds its folder; the next process waits, as an update needs.

    opened: set once the kubelet can find the driver. registered: set once it did.
    """

    def __init__(
        self, view: NodeView, handlers: Sequence[grpc.GenericRpcHandler], times: EndpointTimes | None = None
    ) -> None:
        self.folder = Path(view.dir, view.driver)
        self.socket = self.folder / "dra.sock"
        self.registration = Path(view.registry_dir, f"{view.driver}-reg.sock")
        self.opened, self.registered = asyncio.Event(), asyncio.Event()
        self._woken = asyncio.Event()  # the session may be over
        self._driver = view.driver
        self._handlers = handlers
        self._times = times = times or EndpointTimes()
        self._log = LogOnce(stuck_s=times.stuck)
        self._waits = Backoff(times.first_wait, times.longest_wait, jitter=0.5)
        self._lock: int | None = None

    async def hold(self) -> None:
        """Return once no other process serves this driver. Raises: RestartNeededError."""
        while not self._holds():
            try:
                self._make_folder()
                lock = open_lock(self.folder / "lock")
            except (RegistrationError, OSError) as error:
                self._complain(fault_of(error))
                await asyncio.sleep(self._waits.next_s())
                continue
            if try_lock(lock):
                self.release()
                self._lock = lock
                self._all_well()
                return
            fault = (
                f"another process{lock_holder(lock)} serves {self._driver}: this process starts serving when it exits"
            )
            self._log.note("waiting for another nri-gpu dra to exit", fault, path=str(self.folder))
            os.close(lock)
            await asyncio.sleep(LOOK_S)

    def _holds(self) -> bool:
        """Return whether the lock is ours, in the folder that is there now."""
        with suppress(OSError):
            return self._lock is not None and os.path.samestat(os.fstat(self._lock), (self.folder / "lock").stat())
        return False

    def release(self) -> None:
        """Let the next process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def run(self) -> None:
        """Serve until cancelled. Raises: RestartNeededError: this process cannot reach a folder that is there now."""
        while True:
            try:
                await self._serve()
            except (RegistrationError, OSError) as error:
                self._complain(fault_of(error))
            await asyncio.sleep(self._waits.next_s())

    async def _serve(self) -> None:
        """Answer on `dra.sock` until it is gone, and register again and again meanwhile."""
        await self.hold()  # again, where the folder was made anew
        async with _served(self.socket, lambda server: server.add_generic_rpc_handlers(self._handlers)):
            while signature(self.socket, follow=False) is not None:
                try:
                    with folder_watched(self.registration.parent, self._woken.set):
                        ended = await self._session()
                    logger.bind(resource=self._driver, fault=ended).info("registering with the kubelet again")
                except (RegistrationError, OSError) as error:
                    self._complain(fault_of(error))
                await asyncio.sleep(self._waits.next_s())

    async def _session(self) -> str:
        """Serve a registration socket until a new one is needed. Return why it is. Raises: RegistrationError."""
        loop, path = asyncio.get_running_loop(), self.registration
        check_made(path.parent)
        served = (*SUPPORTED, *HEALTH_SERVICES)
        info = PluginInfo(type="DRAPlugin", name=self._driver, endpoint=str(self.socket), supported_versions=served)
        watcher = PluginWatcherService(info, self._woken.set)
        until, refused = loop.time() + self._times.watched_within, False
        async with _served(path, lambda server: add_RegistrationServicer_to_server(watcher, server)):
            self.opened.set()
            while True:
                self._woken.clear()
                check_reached(path.parent, self.folder)
                for socket in (path, self.socket):
                    if signature(socket, follow=False) is None:
                        return f"{socket} was removed"
                if (verdict := watcher.take_verdict()) == "":
                    logger.bind(resource=self._driver, socket=str(self.socket)).info("registered with the kubelet")
                    self.registered.set()
                    self._all_well()
                    until, refused = math.inf, False
                elif verdict:
                    # The kubelet asks again on another socket only. A kubelet that restarts meanwhile finds this one.
                    self._complain(verdict)
                    until, refused = loop.time() + self._waits.next_s(), True
                elif loop.time() >= until:
                    if refused:
                        return "the kubelet refused it"
                    self._complain(
                        f"no kubelet has come to {path} yet: is kubelet.registry_dir the folder it looks in?"
                    )
                    until = math.inf
                limit_s = min(self._times.look_every, max(until - loop.time(), 0))
                await set_within(self._woken, limit_s)

    def _make_folder(self) -> None:
        """Make the driver's folder. Raises: RegistrationError, OSError; RestartNeededError."""
        check_reached(self.folder)
        check_made(self.folder.parent)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _all_well(self) -> None:
        self._log.clear()
        self._waits.reset()

    def _complain(self, fault: str) -> None:
        self._log.warning("DRA driver not registered, trying again", fault, resource=self._driver)


@asynccontextmanager
async def _served(path: Path, add: Callable[[grpc.aio.Server], object]) -> AsyncIterator[None]:
    """Serve gRPC on a socket, in place of what a killed process left there. Raises: RegistrationError; OSError."""
    _remove(path)
    server = await serve_at(path, add, "dra.driver or dra.dir")
    try:
        yield
    finally:
        _remove(path)  # before the last calls are answered: the kubelet begins no new calls
        await to_its_end(server.stop(DRAIN_S))


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
