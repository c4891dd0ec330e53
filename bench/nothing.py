"""A plugin that does nothing, as plainly as asyncio and protobuf allow: what any Python plugin costs at least.

It reads whole messages by length, decodes the request, and answers with an empty success.

python -m bench.nothing SOCKET
"""

from __future__ import annotations

import asyncio
import struct
import sys
from typing import Any

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu._pb import ttrpc_pb2

MUX = struct.Struct(">II")
FRAME = struct.Struct(">IIBB")
EVENTS = 0x064E
REQUESTS: dict[str, Any] = {
    "CreateContainer": pb.CreateContainerRequest,
    "StopContainer": pb.StopContainerRequest,
    "StateChange": pb.StateChangeEvent,
    "Synchronize": pb.SynchronizeRequest,
}


class Nothing(asyncio.Protocol):
    """Trusts every byte it reads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._io = transport
        self._trunk, self._stream = bytearray(), bytearray()
        register = pb.RegisterPluginRequest(plugin_name="nothing", plugin_idx="01").SerializeToString()
        request = ttrpc_pb2.Request(service="nri.pkg.api.v1alpha1.Runtime", method="RegisterPlugin", payload=register)
        self._send(2, 1, 1, request.SerializeToString())

    def connection_lost(self, exc: Exception | None) -> None:
        asyncio.get_running_loop().stop()

    def data_received(self, data: bytes) -> None:
        self._trunk += data
        while len(self._trunk) >= MUX.size:
            conn_id, length = MUX.unpack_from(self._trunk)
            if len(self._trunk) < MUX.size + length:
                return
            if conn_id == 1:
                self._stream += self._trunk[MUX.size : MUX.size + length]
            del self._trunk[: MUX.size + length]
            self._answer()

    def _answer(self) -> None:
        while len(self._stream) >= FRAME.size:
            length, stream_id, _, _ = FRAME.unpack_from(self._stream)
            if len(self._stream) < FRAME.size + length:
                return
            request = ttrpc_pb2.Request.FromString(bytes(self._stream[FRAME.size : FRAME.size + length]))
            del self._stream[: FRAME.size + length]
            if request.method in REQUESTS:
                REQUESTS[request.method].FromString(request.payload)
            reply = pb.ConfigureResponse(events=EVENTS).SerializeToString() if request.method == "Configure" else b""
            self._send(1, stream_id, 2, ttrpc_pb2.Response(payload=reply).SerializeToString())

    def _send(self, conn_id: int, stream_id: int, kind: int, data: bytes) -> None:
        frame = FRAME.pack(len(data), stream_id, kind, 0) + data
        self._io.write(MUX.pack(conn_id, len(frame)) + frame)


async def main(path: str) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(Nothing, path)
    await loop.create_future()


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1]))
    except RuntimeError:  # the loop was stopped: the runtime is gone
        sys.exit(0)
