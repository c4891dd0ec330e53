"""A plugin that does nothing, as plainly as asyncio and protobuf allow: what any Python plugin costs at least.

It reads whole messages by length, decodes the request, and answers with an empty success; or every creation with the
same bytes, for a bench that wants to know what these cost the runtime.

python -m bench.nothing SOCKET EVENT-MASK [FILE-WITH-THE-REPLY]
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from pathlib import Path
from typing import Any

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu._pb import ttrpc_pb2

MUX = struct.Struct(">II")
FRAME = struct.Struct(">IIBB")
REQUESTS: dict[str, Any] = {
    method.name: getattr(pb, method.input_type.name) for method in pb.DESCRIPTOR.services_by_name["Plugin"].methods
}


class Nothing(asyncio.Protocol):
    """Trusts every byte it reads. events: the mask it subscribes by. created: the reply to every CreateContainer."""

    def __init__(self, events: int, created: bytes = b"") -> None:
        configured = pb.ConfigureResponse(events=events).SerializeToString()
        self._replies = {"Configure": configured, "CreateContainer": created}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._io = transport
        self._mux, self._stream = bytearray(), bytearray()
        register = pb.RegisterPluginRequest(plugin_name="nothing", plugin_idx="01").SerializeToString()
        request = ttrpc_pb2.Request(service="nri.pkg.api.v1alpha1.Runtime", method="RegisterPlugin", payload=register)
        self._send(2, 1, 1, request.SerializeToString())

    def connection_lost(self, exc: Exception | None) -> None:
        asyncio.get_running_loop().stop()

    def data_received(self, data: bytes) -> None:
        self._mux += data
        while len(self._mux) >= MUX.size:
            conn_id, length = MUX.unpack_from(self._mux)
            if len(self._mux) < MUX.size + length:
                return
            if conn_id == 1:
                self._stream += self._mux[MUX.size : MUX.size + length]
            del self._mux[: MUX.size + length]
            self._answer()

    def _answer(self) -> None:
        while len(self._stream) >= FRAME.size:
            length, stream_id, _, _ = FRAME.unpack_from(self._stream)
            if len(self._stream) < FRAME.size + length:
                return
            request = ttrpc_pb2.Request.FromString(bytes(self._stream[FRAME.size : FRAME.size + length]))
            del self._stream[: FRAME.size + length]
            REQUESTS[request.method].FromString(request.payload)
            reply = self._replies.get(request.method, b"")
            self._send(1, stream_id, 2, ttrpc_pb2.Response(payload=reply).SerializeToString())

    def _send(self, conn_id: int, stream_id: int, kind: int, data: bytes) -> None:
        frame = FRAME.pack(len(data), stream_id, kind, 0) + data
        # As the runtime reads it: all after the first frame of at most 4096 in a second one (nri_gpu.ttrpc.mux).
        for part in (frame[:4096], frame[4096:]):
            if part:
                self._io.write(MUX.pack(conn_id, len(part)) + part)


async def serve(path: str, events: int, created: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: Nothing(events, created), path)
    await loop.create_future()


def main() -> int:
    """Until the runtime is gone."""
    path, events, *files = sys.argv[1:]
    created = Path(files[0]).read_bytes() if files else b""
    with contextlib.suppress(RuntimeError):  # the loop was stopped
        asyncio.run(serve(path, int(events), created))
    return 0


if __name__ == "__main__":
    sys.exit(main())
