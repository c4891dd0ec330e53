"""A runtime's CRI socket on which containers can be stopped, and which can refuse to."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

import grpc

from nri_gpu._pb import cri_pb2 as pb

STOP: Final = "StopContainer"


class CriServer:
    """Answers StopContainer. refusals: container id -> what it is refused with. stopped: id -> seconds of grace."""

    def __init__(self, socket: Path, refusals: Mapping[str, tuple[grpc.StatusCode, str]] | None = None) -> None:
        self.stopped: dict[str, int] = {}
        self._refusals = refusals or {}
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        handler = grpc.unary_unary_rpc_method_handler(
            self._stop,
            request_deserializer=pb.StopContainerRequest.FromString,
            response_serializer=pb.StopContainerResponse.SerializeToString,
        )
        services = grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", {STOP: handler})
        self._server.add_generic_rpc_handlers((services,))
        self._server.add_insecure_port(f"unix://{socket}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()

    def _stop(self, request: pb.StopContainerRequest, context: Any) -> pb.StopContainerResponse:  # noqa: ANN401 - grpc's
        if refusal := self._refusals.get(request.container_id):
            context.abort(*refusal)
        self.stopped[request.container_id] = request.timeout
        return pb.StopContainerResponse()
