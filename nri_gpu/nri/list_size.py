"""Names and sizes of what a request carries, without decoding it: what may be too large is measured before it is read.

Only the framing of protobuf is looked at: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from msgspec import Struct

from nri_gpu.domain.container import ContainerId, PodId

# Bytes of a listed object beside its own: a tag, and a length of at most four bytes.
FRAME_BYTES: Final = 5
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_MAX: Final = 10  # bytes
_UNKNOWN: Final = "?"  # name of what the runtime has not listed


class Field(NamedTuple):
    """A field of a message. value: a varint's; 0 for others. start, end: where its bytes are."""

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

    @property
    def pod_id(self) -> PodId:
        return self.id

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


class ContainerSize(Struct, frozen=True):
    """A container by name. size_bytes: of its message. privileged: its device cgroup allows everything."""

    id: ContainerId
    pod_id: PodId
    name: str
    size_bytes: int
    privileged: bool = False


class RequestSize(Struct, frozen=True):
    """The pod and container that a request is about. container: None if it is about a pod alone."""

    pod: PodSize
    container: ContainerSize | None


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message in the order of its bytes. Raises: DecodeError."""
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        value, size = 0, _FIXED_BYTES.get(kind, 0)
        if kind == _BYTES:
            size, position = _varint(data, position)
        elif kind == _VARINT:
            value, position = _varint(data, position)
        elif not size:
            raise DecodeError(f"wire type {kind} at byte {position}")
        if position + size > end:
            raise DecodeError(f"a field of {size} bytes at byte {position} of {end}")
        yield Field(number, value, position, position + size)
        position += size


def size_of(payload: bytes) -> RequestSize:
    """Measure a request with a pod and a container: CreateContainer, StateChange and the others.

    Raises: DecodeError.
    """
    before = 1 if event_of(payload) else 0  # StateChange numbers its fields differently: the event comes first
    pod, container = _pod_size(b""), None
    for field in fields(payload):
        if field.number == before + 1:
            pod = _pod_size(payload[field.start : field.end])
        elif field.number == before + 2:
            container = _container_size(payload[field.start : field.end])
    return RequestSize(pod, container)


def event_of(payload: bytes) -> int:
    """Return NRI's number of the event in a StateChangeEvent; 0 in every other request. Raises: DecodeError."""
    return next((field.value for field in fields(payload) if field.number == 1), 0)


def _pod_size(data: bytes) -> PodSize:
    texts = _texts(data, 4)
    return PodSize(PodId(texts.get(1, "")), texts.get(2, _UNKNOWN), texts.get(4, _UNKNOWN), len(data))


def _container_size(data: bytes) -> ContainerSize:
    texts = _texts(data, 3)
    return ContainerSize(ContainerId(texts.get(1, "")), PodId(texts.get(2, "")), texts.get(3, _UNKNOWN), len(data))


def _texts(data: bytes, last: int) -> dict[int, str]:
    """Return the texts of the fields up to `last`.

    Go writes fields by their numbers, so the many behind it are not read.
    """
    found: dict[int, str] = {}
    for field in fields(data):
        if field.number > last:
            break
        found[field.number] = data[field.start : field.end].decode(errors="replace")
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position behind it."""
    if position < len(data) and data[position] < 0x80:  # as nearly always
        return data[position], position + 1
    value = shift = 0
    for at in range(position, min(len(data), position + _VARINT_MAX)):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise DecodeError(f"a number that does not end at byte {position}")


ENVELOPE_BYTES: Final = 256  # ttrpc's own around the list: service, method, timeout, metadata
# NRI up to 0.6 sends one message, which its mux takes up to 16 MiB behind a first frame of 4 KiB.
WHOLE_MAX: Final = (16 << 20) + 4096 - ENVELOPE_BYTES
# Newer NRI sends parts of at most one ttrpc message.
PART_MAX: Final = (4 << 20) - ENVELOPE_BYTES
# A runtime that has to split again takes fewer objects, by this factor at least, and never fewer than 8 of both kinds
# together: where 8 are too large, it gives up or panics. So any 9 must fit into one part.
_SHRINK: Final = 0.9
_ALWAYS_FIT: Final = 9
# Both kinds are rounded down separately, each time it splits and for each part: so far may a kind fall behind.
_ROUNDINGS: Final = 3
# A container grows before it is listed: by its state, pid, times, and what other plugins add.
GROWTH_BYTES: Final = 2048


class ListedObject(NamedTuple):
    """An object of the list, or a pod with all its containers.

    name: for sentences: `namespace/pod` or `namespace/pod/container`.
    """

    name: str
    size_bytes: int
    pod_id: PodId


def message_max(*, splits: bool) -> int:
    """Return the most bytes of the list that one message takes. splits: NRI 0.7 or newer, which sends several."""
    return PART_MAX if splits else WHOLE_MAX


def share_bytes(max_pods: int, *, splits: bool) -> int:
    """Return how many bytes each pod may come to with its containers, whatever the others come to.

    n <= max_pods pods of at most so many bytes come to n * share <= message_max: one message, in any mixture and order.
    No larger share is safe: max_pods pods of more do not go into one message, and if all of it is annotations but for
    one container, the runtime's count of containers rounds down to 0.
    """
    return message_max(splits=splits) // max_pods


class ListedContainer(Struct, frozen=True):
    """A live container of the runtime. pod, namespace: of its pod, or `?` if the runtime has not listed that."""

    pod_id: PodId
    namespace: str
    pod: str
    name: str
    privileged: bool


class ListSize:
    """The live pods and containers of a node with their sizes: what Synchronize would list now."""

    def __init__(self) -> None:
        self._pods: dict[PodId, PodSize] = {}
        self._containers: dict[ContainerId, ContainerSize] = {}
        self._of_pods: Counter[PodId] = Counter()  # bytes, with their containers
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._pods) + len(self._containers)

    def add(self, size: PodSize | ContainerSize) -> None:
        """Add a pod or container, or replace it; one without an id is not counted."""
        if not size.id:
            return
        self.drop(size)
        self._count(size.pod_id, _framed(size))
        if isinstance(size, PodSize):
            self._pods[size.id] = size
        else:
            self._containers[size.id] = size

    def drop(self, size: PodSize | ContainerSize) -> None:
        """Remove a sandbox, or a container: one that ended is not listed."""
        known: PodSize | ContainerSize | None
        known = self._pods.pop(size.id, None) if isinstance(size, PodSize) else self._containers.pop(size.id, None)
        if known:
            self._count(known.pod_id, -_framed(known))

    def drop_container(self, container_id: ContainerId) -> None:
        """Remove a container, if it is listed."""
        if size := self._containers.get(container_id):
            self.drop(size)

    def drop_pod(self, pod_id: PodId) -> None:
        """Remove a sandbox with all its containers."""
        for container_id in [id_ for id_, each in self._containers.items() if each.pod_id == pod_id]:
            self.drop_container(container_id)
        if size := self._pods.get(pod_id):
            self.drop(size)

    @property
    def pods(self) -> Mapping[PodId, PodSize]:
        """Return all sandboxes by id."""
        return self._pods

    def of_pod(self, pod_id: PodId, more: Iterable[PodSize | ContainerSize]) -> int:
        """Return the bytes of a pod with all its live containers, and with these of its objects besides."""
        return self._of_pods[pod_id] + sum(map(self._growth, more))

    def fits(self, added_bytes: int, *, splits: bool) -> bool:
        """Return whether the list goes into one message with so many bytes besides, in whatever order it is sent."""
        return self.total_bytes + added_bytes <= message_max(splits=splits)

    def fault(self, *, splits: bool, more: Sequence[PodSize | ContainerSize] = ()) -> str:
        """Return why the runtime could not send the list with these besides, or empty. splits: NRI 0.7 or newer."""
        if self.fits(sum(map(self._growth, more)), splits=splits):
            return ""
        pods = self._pods | {size.id: size for size in more if isinstance(size, PodSize)}
        containers = self._containers | {size.id: size for size in more if isinstance(size, ContainerSize)}
        return _fault(pods.values(), containers.values(), splits=splits)

    def in_the_way(self, *, splits: bool) -> list[ListedObject]:
        """Return the fewest of the largest pods without which the runtime can send the rest."""
        pods = sorted(self._of_pods, key=self._of_pods.__getitem__, reverse=True)
        for count in range(len(pods)):
            gone = frozenset(pods[:count])
            left = [pod for pod in self._pods.values() if pod.id not in gone]
            containers = [container for container in self._containers.values() if container.pod_id not in gone]
            if not _fault(left, containers, splits=splits):
                return list(map(self._whole, pods[:count]))
        return list(map(self._whole, pods))

    def largest_pods(self, count: int) -> list[ListedObject]:
        """Return the pods that take most of the list with their containers, the largest first."""
        return [self._whole(pod) for pod, _ in self._of_pods.most_common(count)]

    def containers(self) -> Mapping[ContainerId, ListedContainer]:
        """Return all live containers by id."""
        found: dict[ContainerId, ListedContainer] = {}
        for each in self._containers.values():
            pod = self._pods.get(each.pod_id) or _pod_size(b"")
            found[each.id] = ListedContainer(each.pod_id, pod.namespace, pod.name, each.name, each.privileged)
        return found

    def namespaces(self) -> frozenset[str]:
        """Return the namespaces of the pods."""
        return frozenset(pod.namespace for pod in self._pods.values())

    def over(self, limit_bytes: int) -> list[ListedObject]:
        """Return the objects that are larger than this, the largest first."""
        pods = (each for each in self._pods.values() if each.size_bytes > limit_bytes)
        containers = (each for each in self._containers.values() if each.size_bytes > limit_bytes)
        found = [ListedObject(self._name(each.id), each.size_bytes, each.id) for each in pods]
        for each in containers:
            found.append(ListedObject(f"{self._name(each.pod_id)}/{each.name}", each.size_bytes, each.pod_id))
        return sorted(found, key=lambda each: each.size_bytes, reverse=True)

    def _whole(self, id_: PodId) -> ListedObject:
        return ListedObject(self._name(id_), self._of_pods[id_], id_)

    def _name(self, id_: PodId) -> str:
        pod = self._pods.get(id_)
        return pod.full_name if pod and pod.name != _UNKNOWN else id_

    def _count(self, pod_id: PodId, added_bytes: int) -> None:
        self.total_bytes += added_bytes
        self._of_pods[pod_id] += added_bytes
        if not self._of_pods[pod_id]:
            del self._of_pods[pod_id]

    def _growth(self, size: PodSize | ContainerSize) -> int:
        """Return by how many bytes the list grows with this object, which may replace a listed one."""
        known: PodSize | ContainerSize | None
        known = self._pods.get(size.id) if isinstance(size, PodSize) else self._containers.get(size.id)
        return _framed(size) - (_framed(known) if known else 0)


def _framed(size: PodSize | ContainerSize) -> int:
    return size.size_bytes + FRAME_BYTES


def _fault(pods: Collection[PodSize], containers: Collection[ContainerSize], *, splits: bool) -> str:
    return unsendable([pod.size_bytes for pod in pods], [each.size_bytes for each in containers], splits=splits)


def unsendable(pods: Sequence[int], containers: Sequence[int], *, splits: bool) -> str:
    """Return why a runtime cannot send pods and containers of these sizes (bytes), in whatever order, or empty.

    splits: it sends parts (NRI 0.7 and newer); older ones send one message. The answer errs towards a reason: the
    order, on which the parts depend, is the runtime's, and changes each time.
    """
    total = sum(pods) + sum(containers) + FRAME_BYTES * (len(pods) + len(containers))
    if not splits:
        return f"the list has {total} bytes, and NRI before 0.7 sends at most {WHOLE_MAX}" if total > WHOLE_MAX else ""
    if total <= PART_MAX:
        return ""
    of_pods, of_containers = _sums(pods), _sums(containers)
    if sum(heapq.nlargest(_ALWAYS_FIT, (*pods, *containers))) + FRAME_BYTES * _ALWAYS_FIT > PART_MAX:
        return (
            f"the list has {total} bytes, and its {_ALWAYS_FIT} largest objects do not fit into one part of {PART_MAX}"
        )
    factor = _factor(total)
    most_pods, most_containers = int(len(pods) * factor), int(len(containers) * factor)
    none_left = (
        f"the list has {total} bytes, and the runtime's count of {{}} for one part of {PART_MAX} rounds down to 0"
    )
    lag = _ROUNDINGS * (2 + int(2 / factor))
    if _rounds_to_none(of_pods, most_pods, of_containers, most_containers, lag):
        return none_left.format("pods")
    if _rounds_to_none(of_containers, most_containers, of_pods, most_pods, lag):
        return none_left.format("containers")
    return ""


def _rounds_to_none(few: Sequence[int], most_few: int, many: Sequence[int], most_many: int, lag: int) -> bool:
    """Return whether the runtime may come to a part without a kind that has objects left: it then never ends.

    few, many: the bytes of the 0, 1, 2 ... largest of the kind in question, and of the other. most_few, most_many: how
    many of each a part has at first. Later parts have fewer. The runtime shrinks both counts by one factor, so their
    ratio stays that of the first part, plus `lag` for rounding.
    """
    if len(few) == 1:  # there are none of that kind
        return False
    if not most_few:
        return True
    for count in range(1, most_few + 1):
        others = min(most_many, most_many * (count + _ROUNDINGS) // most_few + lag)
        size = few[count] + many[min(others, len(many) - 1)]
        if size > PART_MAX and int(count * _factor(size)) == 0:
            return True
    return False


def _factor(size_bytes: int) -> float:
    """Return by what the runtime multiplies both counts after a part of that size."""
    return min(PART_MAX / size_bytes, _SHRINK)


def _sums(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of the 0, 1, 2 ... largest together, with what frames them."""
    return [0, *accumulate(size + FRAME_BYTES for size in sorted(sizes, reverse=True))]
