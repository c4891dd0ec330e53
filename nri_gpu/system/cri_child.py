"""Stops containers through CRI, and ends: a process of its own, because gRPC takes six threads and some 20 MiB.

    python -I -m nri_gpu.system.cri_child SOCKET GRACE_S PATIENCE_S        container ids on standard input, one a line

It prints a line for each container: `ID ok`, or the ID and what went wrong. NRI has an eviction message, but no runtime
obeys it (containerd/nri: pkg/adaptation/plugin.go), hence CRI.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from nri_gpu._pb import cri_pb2 as pb

DONE: Final = "ok"


def request(container: str, grace_s: int) -> pb.StopContainerRequest:
    """grace_s: seconds until it is killed."""
    return pb.StopContainerRequest(container_id=container, timeout=grace_s)


def main(arguments: list[str], ids: Iterable[str]) -> int:
    """Stop them. Returns 0 when every container is stopped, or was gone already.

    patience_s goes beyond the grace: a runtime that has just started answers CRI a moment later than NRI.
    """
    import grpc  # missing without the cri extra; then the exit message says so

    from nri_gpu._pb.cri_pb2_grpc import RuntimeServiceStub

    socket, grace_s, patience_s = arguments[0], int(arguments[1]), float(arguments[2])
    outcomes = []
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        for container, outcome in _stopped(RuntimeServiceStub(channel).StopContainer, ids, grace_s, patience_s):
            print(container, outcome, flush=True)
            outcomes.append(outcome)
    return int(any(outcome != DONE for outcome in outcomes))


def _stopped(
    call: Any,  # noqa: ANN401 - grpc's
    ids: Iterable[str],
    grace_s: int,
    patience_s: float,
) -> Iterator[tuple[str, str]]:
    import grpc

    # All at once: the graces of many containers must not add up.
    asked = [
        (each, call.future(request(each, grace_s), timeout=grace_s + patience_s, wait_for_ready=True))
        for each in filter(None, map(str.strip, ids))
    ]
    for container, answer in asked:
        try:
            answer.result()
        except grpc.RpcError as error:
            gone = error.code() is grpc.StatusCode.NOT_FOUND
            yield container, DONE if gone else f"{error.code().name}: {' '.join(str(error.details()).split())[:300]}"
        else:
            yield container, DONE


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], sys.stdin))
    except ImportError as error:
        sys.exit(f"{error}: install the cri extra, pip install 'nri-gpu[cri]'")
