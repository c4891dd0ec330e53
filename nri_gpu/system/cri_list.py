"""The runtime's sandboxes and containers by CRI, asked by a child process like that of container_stops.py.

The answers are read as bytes, since a decoder refuses texts that are not UTF-8. The child is

    python -I -m nri_gpu.system.cri_list SOCKET LIMIT_S

It prints a `CriList` as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from nri_gpu.domain.container import ContainerId, PodId
from nri_gpu.nri.list_size import fields
from nri_gpu.system.proc import name_process

_ENDED: Final = 2  # ContainerState.CONTAINER_EXITED
_ID_MAX, _NAME_MAX = 64, 317  # bytes; longer ones are cut
# The texts of an entry by their field numbers; maps are messages, too (cri-api: pkg/apis/runtime/v1/api.proto).
_Shape = Mapping[int, "_Shape"]
_TEXT: Final[_Shape] = {}
_MAP: Final[_Shape] = {1: _TEXT, 2: _TEXT}
_SANDBOX: Final[_Shape] = {1: _TEXT, 2: {1: _TEXT, 2: _TEXT, 3: _TEXT}, 5: _MAP, 6: _MAP, 7: _TEXT}
_IMAGE: Final[_Shape] = {1: _TEXT, 2: _MAP, 18: _TEXT, 19: _TEXT, 20: _TEXT}
_CONTAINER: Final[_Shape] = {1: _TEXT, 2: _TEXT, 3: {1: _TEXT}, 4: _IMAGE, 5: _TEXT, 8: _MAP, 9: _MAP, 10: _TEXT}
_VERSION: Final[_Shape] = {3: _TEXT}
_STATE: Final = 6  # of a container
_METHODS: Final = ("Version", "ListPodSandbox", "ListContainers")


class CriList(Struct, frozen=True):
    """The sandboxes and containers that CRI lists, and the runtime's version.

    not_utf8: the sandboxes with a text that is not UTF-8, of their own or of a container.
    """

    version: str
    pods: Mapping[PodId, str]  # `namespace/name`
    containers: Mapping[ContainerId, PodId]
    ended: frozenset[ContainerId]  # of `containers`
    not_utf8: tuple[PodId, ...]


def cri_list(version: bytes, sandboxes: bytes, containers: bytes) -> CriList:
    """Read the answers of Version, ListPodSandbox and ListContainers. Raises: DecodeError."""
    pods: dict[PodId, str] = {}
    pod_of: dict[ContainerId, PodId] = {}
    ended: set[ContainerId] = set()
    not_utf8: dict[PodId, None] = {}
    for entry in _entries(sandboxes):
        texts, valid = _read(entry, _SANDBOX)
        pod_id = PodId(_shown(texts, (1,), _ID_MAX))
        pods[pod_id] = f"{_shown(texts, (2, 3))}/{_shown(texts, (2, 1))}"
        if not valid:
            not_utf8[pod_id] = None
    for entry in _entries(containers):
        texts, valid = _read(entry, _CONTAINER)
        container_id, pod_id = ContainerId(_shown(texts, (1,), _ID_MAX)), PodId(_shown(texts, (2,), _ID_MAX))
        pod_of[container_id] = pod_id
        if any(field.number == _STATE and field.value == _ENDED for field in fields(entry)):
            ended.add(container_id)
        if not valid:
            not_utf8[pod_id] = None
    return CriList(_shown(_read(version, _VERSION)[0], (3,)), pods, pod_of, frozenset(ended), tuple(not_utf8))


def _entries(answer: bytes) -> Iterator[bytes]:
    return (answer[field.start : field.end] for field in fields(answer) if field.number == 1)


def _texts(message: bytes, shape: _Shape, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield the texts of a message, each with the numbers of the fields that lead to it."""
    for field in fields(message):
        inner = shape.get(field.number)
        data, here = message[field.start : field.end], (*place, field.number)
        if inner:
            yield from _texts(data, inner, here)
        elif inner is not None:
            yield here, data


def _read(message: bytes, shape: _Shape) -> tuple[Mapping[tuple[int, ...], bytes], bool]:
    """Return the texts of a message, of those at one place the last, and whether all of them are UTF-8."""
    texts = [*_texts(message, shape)]
    try:
        for _, text in texts:
            text.decode()
    except UnicodeDecodeError:
        return dict(texts), False
    return dict(texts), True


def _shown(texts: Mapping[tuple[int, ...], bytes], place: tuple[int, ...], most: int = _NAME_MAX) -> str:
    return texts.get(place, b"")[:most].decode(errors="replace")


def main(arguments: list[str]) -> int:
    """Print what CRI lists, as the child. Return 0 if CRI has answered."""
    import grpc  # here, because the daemon imports this module, too

    path, limit_s = arguments
    # A list has no limit but time: the process is gone with it.
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"unix://{path}", options=options) as channel:
        try:
            calls = [channel.unary_unary(f"/runtime.v1.RuntimeService/{method}") for method in _METHODS]
            answers = [call.future(b"", timeout=float(limit_s)).result() for call in calls]
        except grpc.RpcError as error:
            print(f"{error.code().name}: {' '.join(str(error.details()).split())[:300]}", file=sys.stderr)
            return 1
    sys.stdout.buffer.write(msgspec.json.encode(cri_list(*answers)))
    return 0


if __name__ == "__main__":
    name_process("cri")
    sys.exit(main(sys.argv[1:]))
