"""A runtime's CRI socket on which containers can be listed and stopped, and which can refuse to."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

import grpc

from nri_gpu._pb import cri_pb2 as pb
from tests.support._pb import cri_tests_pb2 as lists

STOP: Final = "StopContainer"
VERSION: Final = "2.1.9+unknown"  # as NRI_0_8 says it
PLACEHOLDER: Final = "not UTF-8"  # where a text is to have bytes that no text may have


def sandbox(id_: str, name: str, **texts: Mapping[str, str]) -> lists.PodSandbox:
    """texts: its labels or annotations."""
    metadata = lists.PodSandboxMetadata(name=name, namespace="default", uid=f"uid-{name}")
    return lists.PodSandbox(id=id_, metadata=metadata, **texts)


def listing(
    pods: tuple[lists.PodSandbox, ...] = (), containers: tuple[lists.Container, ...] = (), version: str = VERSION
) -> dict[str, bytes]:
    """What CRI answers, method by method; texts with PLACEHOLDER are not UTF-8."""
    answers = {
        "Version": lists.VersionResponse(runtime_version=version).SerializeToString(),
        "ListPodSandbox": lists.ListPodSandboxResponse(items=pods).SerializeToString(),
        "ListContainers": lists.ListContainersResponse(containers=containers).SerializeToString(),
    }
    return {method: not_utf8(answer) for method, answer in answers.items()}


def not_utf8(message: bytes) -> bytes:
    return message.replace(PLACEHOLDER.encode(), b"\xff" * len(PLACEHOLDER))


class CriServer:
    """Answers StopContainer and what is in `answers`. refusals: container id -> what it is refused with.

    stopped: id -> seconds of grace. asked: the methods in order.
    """

    def __init__(
        self,
        socket: Path,
        refusals: Mapping[str, tuple[grpc.StatusCode, str]] | None = None,
        answers: Mapping[str, bytes] | None = None,
    ) -> None:
        self.stopped: dict[str, int] = {}
        self.answers = dict(answers or {})
        self.asked: list[str] = []
        self._refusals = refusals or {}
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool, options=[("grpc.max_send_message_length", -1)])
        handlers = {
            STOP: grpc.unary_unary_rpc_method_handler(
                self._stop,
                request_deserializer=pb.StopContainerRequest.FromString,
                response_serializer=pb.StopContainerResponse.SerializeToString,
            )
        }
        for method in ("Version", "ListPodSandbox", "ListContainers"):
            handlers[method] = grpc.unary_unary_rpc_method_handler(self._answering(method))
        services = (grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers),)
        self._server.add_generic_rpc_handlers(services)
        self._server.add_insecure_port(f"unix://{socket}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()

    def _answering(self, method: str) -> Any:  # noqa: ANN401 - grpc's
        def answer(_: bytes, context: Any) -> bytes:  # noqa: ANN401 - grpc's
            self.asked.append(method)
            if method not in self.answers:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, f"no {method} here")
            return self.answers[method]

        return answer

    def _stop(self, request: pb.StopContainerRequest, context: Any) -> pb.StopContainerResponse:  # noqa: ANN401 - grpc's
        if refusal := self._refusals.get(request.container_id):
            context.abort(*refusal)
        self.stopped[request.container_id] = request.timeout
        return pb.StopContainerResponse()
