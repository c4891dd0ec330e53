"""Names and sizes of what a request carries, without decoding it: what may be too large is measured before it is read.

Only the framing of protobuf is looked at: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from msgspec import Struct

from nri_gpu.domain.container import ContainerId, PodId

# What a listed object weighs beside its own bytes: a tag, and a length of at most four bytes.
FRAME_BYTES: Final = 5
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_MAX: Final = 10  # bytes


class Field(NamedTuple):
    """One field of a message. value: a varint's; 0 for others. start, end: where its bytes are."""

    number: int
    value: int
    start: int
    end: int


class PodSize(Struct, frozen=True):
    """A pod sandbox by name. size_bytes: of its message."""

    id: PodId
    name: str
    namespace: str
    size_bytes: int


class ContainerSize(Struct, frozen=True):
    """A container by name. size_bytes: of its message."""

    id: ContainerId
    pod_id: PodId
    name: str
    size_bytes: int


class RequestSize(Struct, frozen=True):
    """What a request is about. container: None where it is about a pod alone."""

    pod: PodSize
    container: ContainerSize | None


def fields(data: bytes, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of a message in the order of its bytes. Raises: DecodeError."""
    end = len(data) if end is None else end
    position = start
    while position < end:
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        value, size = 0, _FIXED_BYTES.get(kind, 0)
        if kind == _BYTES:
            size, position = _varint(data, position, end)
        elif kind == _VARINT:
            value, position = _varint(data, position, end)
        elif not size:
            raise DecodeError(f"wire type {kind} at byte {position}")
        if position + size > end:
            raise DecodeError(f"a field of {size} bytes at byte {position} of {end}")
        yield Field(number, value, position, position + size)
        position += size


def size_of_request(payload: bytes) -> RequestSize:
    """Of a request with a pod and a container, such as CreateContainer. Raises: DecodeError."""
    return _size_of(payload, 1, 2)


def size_of_state_change(payload: bytes) -> RequestSize:
    """Of a StateChangeEvent, whose fields are numbered differently. Raises: DecodeError."""
    return _size_of(payload, 2, 3)


def event_of(payload: bytes) -> int:
    """NRI's number of the event that a StateChangeEvent tells; 0 where it tells none. Raises: DecodeError."""
    first = next(fields(payload), None)  # Go writes fields by their numbers
    return first.value if first and first.number == 1 else 0


def pod_size(data: bytes, start: int = 0, end: int | None = None) -> PodSize:
    """Of a PodSandbox. Raises: DecodeError."""
    end = len(data) if end is None else end
    texts = _texts(data, start, end, 4)
    return PodSize(PodId(texts.get(1, "")), texts.get(2, "?"), texts.get(4, "?"), end - start)


def container_size(data: bytes, start: int = 0, end: int | None = None) -> ContainerSize:
    """Of a Container. Raises: DecodeError."""
    end = len(data) if end is None else end
    texts = _texts(data, start, end, 3)
    return ContainerSize(ContainerId(texts.get(1, "")), PodId(texts.get(2, "")), texts.get(3, "?"), end - start)


def _size_of(payload: bytes, pod_field: int, container_field: int) -> RequestSize:
    pod, container = pod_size(b""), None
    for field in fields(payload):
        if field.number == pod_field:
            pod = pod_size(payload, field.start, field.end)
        elif field.number == container_field:
            container = container_size(payload, field.start, field.end)
    return RequestSize(pod, container)


def _texts(data: bytes, start: int, end: int, last: int) -> dict[int, str]:
    """The texts of the fields up to `last`. Go writes fields by their numbers, so the many behind it are not read."""
    found: dict[int, str] = {}
    for field in fields(data, start, end):
        if field.number > last:
            break
        found[field.number] = data[field.start : field.end].decode(errors="replace")
    return found


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """A number and the position behind it."""
    value = shift = 0
    for at in range(position, min(end, position + _VARINT_MAX)):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise DecodeError(f"a number that does not end at byte {position}")
