"""The plugin's side of a recorded session: the code of the daemon, without its socket, clock and driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capability
from nri_gpu.domain.node import DriverFiles, DriverTree
from nri_gpu.nri.convert import register_to_pb
from nri_gpu.plugin.nri_service import PluginService
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import NRI_VERSION
from nri_gpu.plugin.transport import LIMITS, RUNTIME
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.ttrpc import RUNTIME_SERVICE, Mux, RequestReceived, RequestSent
from tests.support.plugin import Bench
from tests.support.recorder import Message, Session, split
from tests.support.recording import FOLDER, parse

# What stood where the recordings were made, once scrubbed.
FOLDER_NAME: Final = "ng-rec-00000000"
GENERATION: Final = "580.95.05-00000000"
STAGED: Final = f"/tmp/{FOLDER_NAME}/d/drivers/{GENERATION}"
TREES: Final = {
    DEFAULT_CAPABILITIES: DriverTree(f"{STAGED}/compute+utility", ("nvidia-smi",)),
    frozenset({Capability.UTILITY}): DriverTree(f"{STAGED}/utility", ("nvidia-smi",)),
}


def path_of(session: str, version: str) -> Path:
    return FOLDER / f"{session.replace('_', '-')}-containerd-{version}.session"


def messages_of(path: Path) -> list[Message]:
    """A recording's messages."""
    writes = parse(path.read_text()).writes
    return split(Session([(write.from_runtime, write.data) for write in writes]))


class Replayed:
    """A plugin on the recorded node. `begin` gives what it says first, `feed` its answers."""

    def __init__(self) -> None:
        self.bench = Bench()
        driver = DriverFiles("580.95.05", GENERATION, TREES, {})
        self.bench.node = replace(self.bench.node, driver=driver)
        self.ready = 0
        self._service = PluginService(
            self.bench.plugin, lambda _: None, self._count, Sizes(PluginSettings, self.bench.later)
        )
        self._mux = Mux.for_plugin()

    def begin(self) -> bytes:
        stream_id = self._mux[RUNTIME_SERVICE].next_stream_id
        payload = register_to_pb("nri-gpu", "10", NRI_VERSION)
        request = RequestSent(stream_id, RUNTIME, "RegisterPlugin", payload, int(LIMITS.register_s * 1e9))
        return self._mux.send(RUNTIME_SERVICE, request)

    def feed(self, data: bytes) -> bytes:
        answers = []
        for conn_id, event in self._mux.feed(data):
            if isinstance(event, RequestReceived):
                answers.append(self._mux.send(conn_id, self._service.answer(event)))
        return b"".join(answers)

    def feed_all(self, chunks: Sequence[bytes]) -> bytes:
        return b"".join([self.begin(), *map(self.feed, chunks)])

    def _count(self) -> None:
        self.ready += 1
