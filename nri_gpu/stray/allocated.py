"""The GPUs that the kubelet allocated to pods, asked when a container uses a GPU that nobody here granted.

The question is put by a child process, because the daemon may have no other use for gRPC:

    python -I -m nri_gpu.stray.allocated SOCKET
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISSOCK
from typing import Final

import msgspec

from nri_gpu.domain.errors import NriGpuError, cause_of, fault_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.system.child import python, run
from nri_gpu.system.proc import name_process
from nri_gpu.system.storage import stat_of

LIMIT_S: Final = 15.0
_UUIDS: Final = ("GPU-", "MIG-")  # how ids begin; other devices of pods do not matter here


class AllocationsUnknownError(NriGpuError):
    """The reason why the kubelet did not tell."""


async def allocated(socket: str) -> Mapping[tuple[str, str], frozenset[GpuUuid]]:
    """Map namespace and name of a pod to the UUIDs of its devices; empty if this node has no kubelet.

    Raises: AllocationsUnknownError.
    """
    try:
        found = stat_of(Path(socket)) if socket else None
        if found is None or not S_ISSOCK(found.st_mode):
            return {}
    except OSError as error:
        raise AllocationsUnknownError(f"{socket}: {cause_of(error)}") from error
    try:
        child = await run([python(), "-I", "-m", "nri_gpu.stray.allocated", socket], LIMIT_S)
    except TimeoutError as error:
        raise AllocationsUnknownError(str(error) or f"no answer on {socket} within {LIMIT_S:.0f} s") from None
    except OSError as error:
        raise AllocationsUnknownError(fault_of(error)) from error
    if not child.output:
        raise AllocationsUnknownError(child.complaint or f"no answer on {socket}")
    devices: dict[tuple[str, str], frozenset[GpuUuid]] = {}
    for namespace, name, uuids in msgspec.json.decode(child.output, type=list[tuple[str, str, frozenset[GpuUuid]]]):
        devices[namespace, name] = uuids | devices.get((namespace, name), frozenset())  # the old pod and the new
    return devices


async def _ask(socket: Path) -> bytes:
    """Return a line of JSON: namespace, name and UUIDs of each pod that has some."""
    from nri_gpu.kubelet.kubelet_controller import set_up_grpc

    set_up_grpc()
    from nri_gpu.kubelet.podresources import PodResources

    client = PodResources(socket)
    try:
        pods = [(pod.namespace, pod.name, {each.uuid for each in pod.devices}) for pod in await client.list()]
        ours = [(*names, sorted(each for each in uuids if each.startswith(_UUIDS))) for *names, uuids in pods]
        return msgspec.json.encode([each for each in ours if each[-1]]) + b"\n"
    finally:
        await client.close()


def main(arguments: list[str]) -> None:
    try:
        sys.stdout.buffer.write(asyncio.run(_ask(Path(arguments[0]))))
    except NriGpuError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    name_process("kubelet")
    main(sys.argv[1:])
