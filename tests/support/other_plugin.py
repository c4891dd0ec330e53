"""Another NRI plugin on a real runtime: it adds to the containers of some pods, as the GPU Operator's NRI mode does.

with OtherPlugin(node.nri_socket, adds):  # adds: pod name -> what its containers get, or None
    ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Self

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.codes import Reply
from nri_gpu.nri.session import Listed
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.counts import Counts
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import Identity, SessionFollowers, Supervisor
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.system.tasks import later

READY_S: Final = 20.0
Adds = Callable[[str], pb.ContainerAdjustment | None]


class Adding:
    """What answers its requests."""

    stage_dir = ""
    same_pids = False
    unsure = False

    def __init__(self, adds: Adds) -> None:
        self.counts = Counts()
        self._adds = adds

    @property
    def events(self) -> Collection[Event]:
        return (Event.CREATE_CONTAINER,)

    def create_container(self, payload: bytes) -> Reply:
        adjust = self._adds(pb.CreateContainerRequest.FromString(payload).pod.name)
        return pb.CreateContainerResponse(adjust=adjust).SerializeToString()

    def unanswered(self, payload: bytes) -> None:
        pass

    def validate(self, payload: bytes) -> Reply:
        return b""

    def lifecycle(self, payload: bytes, event: int = 0) -> Reply:
        return b""

    def synchronized(self, listed: tuple[Listed, ...], request_timeout_s: float) -> None:
        pass


class OtherPlugin:
    """In a thread with a loop of its own. By its index it is called before ours."""

    def __init__(self, socket: Path, adds: Adds) -> None:
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        followers = SessionFollowers(lambda _: None, self._ready.set, lambda _: None, lambda _: None)
        sizes = Sizes(PluginSettings, later, counts=False)
        self._socket = socket
        self._supervisor = Supervisor(Adding(adds), lambda: Identity("other", "05"), followers, sizes)

    def __enter__(self) -> Self:
        self._thread.start()
        self._serving = asyncio.run_coroutine_threadsafe(self._supervisor.run(self._socket), self._loop)
        assert self._ready.wait(READY_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._supervisor.stop(0), self._loop).result(READY_S)
        self._serving.result(READY_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(READY_S)
        self._loop.close()
