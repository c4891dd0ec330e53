"""The stopping of containers through CRI, in a child process, because gRPC takes six threads and some 20 MiB.

NRI has an eviction message, but no runtime obeys it (containerd/nri: pkg/adaptation/plugin.go), hence CRI. The child is

    python -I -m nri_gpu.system.container_stops SOCKET GRACE_S PATIENCE_S

It reads container ids, one a line, and prints a line for each: `ID ok`, or the ID and what went wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from loguru import logger

from nri_gpu.domain.errors import fault_of
from nri_gpu.policy.plugin_settings import GuardSettings
from nri_gpu.system.child import python, run
from nri_gpu.system.proc import name_process

PATIENCE_S: Final = 30.0  # beyond the grace, for a runtime whose CRI is still starting
DONE: Final = "ok"


async def stop_containers(
    names: Mapping[str, str], settings: GuardSettings, why: str, *, patience_s: float = PATIENCE_S
) -> frozenset[str]:
    """Stop containers, return the ids of the stopped ones, and log why the rest is not stopped.

    names: container id -> the pod, for the log. why: for the log, too. patience_s: for the runtime, beyond the grace;
    the child has twice as long.
    """
    arguments = (settings.cri_socket, str(settings.stop_grace_s), str(patience_s))
    command = (python(), "-I", "-m", "nri_gpu.system.container_stops", *arguments)
    try:
        child = await run(command, settings.stop_grace_s + 2 * patience_s, text="\n".join(names))
        output, fault = child.output, (child.complaint or "?") if child.status and not child.output else ""
    except (OSError, TimeoutError) as error:
        output, fault = b"", fault_of(error) if error.args else f"no answer on {settings.cri_socket}"
    stopped = set()
    for container, outcome in outcomes(output.decode(errors="replace")):
        bound = logger.bind(pod_name=names.get(container, "?"), container_id=container)
        if outcome == DONE:
            stopped.add(container)
            bound.bind(reason=why).warning("container stopped")
        else:
            bound.bind(fault=outcome).error("container not stopped")
    if fault:
        logger.bind(socket=settings.cri_socket, fault=fault).error("containers not stopped")
    return frozenset(stopped)


def outcomes(output: str) -> Iterator[tuple[str, str]]:
    """Yield container id and outcome of each line that the child printed."""
    for line in output.split("\n"):
        container, _, outcome = line.partition(" ")
        if container:
            yield container, outcome


def main(arguments: list[str], ids: Iterable[str]) -> int:
    """Stop the containers, as the child. Return 0 when every container is stopped, or was gone already.

    patience_s goes beyond the grace: a runtime that has just started answers CRI a moment later than NRI.
    """
    import grpc  # here, because the daemon imports this module, too

    from nri_gpu._pb.cri_pb2 import StopContainerRequest
    from nri_gpu._pb.cri_pb2_grpc import RuntimeServiceStub

    socket, grace_s, patience_s = arguments[0], int(arguments[1]), float(arguments[2])
    failed = False
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        stop = RuntimeServiceStub(channel).StopContainer
        requests = [StopContainerRequest(container_id=each, timeout=grace_s) for each in map(str.strip, ids) if each]
        # All at once: the graces of many containers must not add up.
        calls = [stop.future(each, timeout=grace_s + patience_s, wait_for_ready=True) for each in requests]
        for request, call in zip(requests, calls, strict=True):
            outcome = DONE
            try:
                call.result()
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    outcome = f"{error.code().name}: {' '.join(str(error.details()).split())[:300]}"
                    failed = True
            print(request.container_id, outcome, flush=True)
    return int(failed)


if __name__ == "__main__":
    name_process("stops")
    sys.exit(main(sys.argv[1:], sys.stdin))
