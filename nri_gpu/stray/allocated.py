"""The GPUs that the kubelet allocated to pods, asked when a container uses a GPU that nobody here granted.

The question is put by a child process, because the daemon may have no other use for gRPC:

    python -I -m nri_gpu.stray.allocated SOCKET
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from stat import S_ISSOCK
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from nri_gpu.domain.errors import NriGpuError, cause_of, fault_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.system.child import python, run
from nri_gpu.system.proc import name_process
from nri_gpu.system.storage import stat_of

if TYPE_CHECKING:
    from nri_gpu.kubelet.podresources import PodResources

LIMIT_S: Final = 15.0
_UUIDS: Final = ("GPU-", "MIG-")  # how ids begin; other devices of pods do not matter here
T = TypeVar("T")


class AllocationsUnknownError(NriGpuError):
    """The reason why the kubelet did not tell."""


async def allocated(socket: str) -> Mapping[tuple[str, str], frozenset[GpuUuid]]:
    """Map namespace and name of a pod to the UUIDs of its devices; empty if this node has no kubelet.

    Raises: AllocationsUnknownError.
    """
    devices: dict[tuple[str, str], frozenset[GpuUuid]] = {}
    if not has_kubelet(socket):
        return devices
    listed = await answer_of_child("nri_gpu.stray.allocated", socket)
    for namespace, name, uuids in msgspec.json.decode(listed, type=list[tuple[str, str, frozenset[GpuUuid]]]):
        devices[namespace, name] = uuids | devices.get((namespace, name), frozenset())  # the old pod and the new
    return devices


def has_kubelet(socket: str) -> bool:
    """Return whether there is a socket of a kubelet. Raises: AllocationsUnknownError: it cannot be looked for."""
    try:
        found = stat_of(Path(socket)) if socket else None
    except OSError as error:
        raise AllocationsUnknownError(f"{socket}: {cause_of(error)}") from error
    return found is not None and S_ISSOCK(found.st_mode)


async def answer_of_child(module: str, socket: str) -> bytes:
    """Return what a module prints, as a child, that asks the kubelet. Raises: AllocationsUnknownError."""
    try:
        child = await run([python(), "-I", "-m", module, socket], LIMIT_S)
    except TimeoutError as error:
        raise AllocationsUnknownError(str(error) or f"no answer on {socket} within {LIMIT_S:.0f} s") from None
    except OSError as error:
        raise AllocationsUnknownError(fault_of(error)) from error
    if not child.output:
        raise AllocationsUnknownError(child.complaint or f"no answer on {socket}")
    return child.output


async def asked(socket: Path, question: Callable[[PodResources], Awaitable[T]]) -> T:
    """Return the kubelet's answer to a question, in the child. Raises: PodResourcesError."""
    from nri_gpu.kubelet.kubelet_controller import set_up_grpc

    set_up_grpc()
    from nri_gpu.kubelet.podresources import PodResources

    client = PodResources(socket)
    try:
        return await question(client)
    finally:
        await client.close()


async def _ask(socket: Path) -> bytes:
    """Return a line of JSON: namespace, name and UUIDs of each pod that has some."""
    listed = await asked(socket, lambda client: client.list())
    pods = [(pod.namespace, pod.name, {each.uuid for each in pod.devices}) for pod in listed]
    ours = [(*names, sorted(each for each in uuids if each.startswith(_UUIDS))) for *names, uuids in pods]
    return msgspec.json.encode([each for each in ours if each[-1]]) + b"\n"


def main(arguments: list[str]) -> None:
    try:
        sys.stdout.buffer.write(asyncio.run(_ask(Path(arguments[0]))))
    except NriGpuError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    name_process("kubelet")
    main(sys.argv[1:])
