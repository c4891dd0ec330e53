"""Takes this machine and this moment out of a recorded session, byte for byte at the same length.

Ids and uids become one digit repeated, in order of appearance; pids, timeouts and a driver's generation become fixed
numbers; paths become what the caller names. The mac of a signed grant covers ids, so it is made anew, by the same key.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.grant import SignedGrant, sign_grant, verify_grant
from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.names import GRANT_KEY
from tests.support.errors import HarnessError
from tests.support.recorder import Message

TIMEOUT_NS: Final = 2_000_000_000  # what requests are given; what is left of it when one is written is never the same
GENERATION: Final = re.compile(rb"(\d+\.\d+\.\d+-)[0-9a-f]{8}")
FAKE_GENERATION: Final = "0" * 8
MAC_CHARACTERS: Final = 64
TIMEOUT_TAG: Final = b"\x20"  # Request.timeout_nano
POD_PID_TAG: Final = b"\x48"  # PodSandbox.pid
CONTAINER_PID_TAG: Final = b"\x60"  # Container.pid


class _Names(Struct):
    """Real bytes -> fake bytes of the same length; and the numbers, which stand in text and as varints."""

    texts: dict[bytes, bytes]
    pids: dict[int, int] = field(default_factory=dict)
    seen: int = 0

    def learn(self, pod: pb.PodSandbox | None, container: pb.Container | None) -> None:
        if pod is not None:
            self._id(pod.id, pod.uid)
            self._pid(pod.pid)
        if container is not None:
            self._id(container.id)
            self._pid(container.pid)

    def fake(self, text: str) -> str:
        return self.apply(text.encode()).decode()

    def apply(self, data: bytes) -> bytes:
        for real in sorted(self.texts, key=len, reverse=True):
            data = data.replace(real, self.texts[real])
        return GENERATION.sub(rb"\g<1>" + FAKE_GENERATION.encode(), data)

    def _id(self, *ids: str) -> None:
        if ids[0].encode() in self.texts:
            return
        self.seen += 1
        for each in filter(None, ids):
            self.texts[each.encode()] = re.sub(r"[0-9a-f]", f"{self.seen:x}", each).encode()

    def _pid(self, pid: int) -> None:
        if pid:
            self.pids[pid] = _like(pid)
            self.texts[b"/proc/%d/" % pid] = b"/proc/%d/" % self.pids[pid]


def scrubbed(messages: Sequence[Message], key: bytes, names: Mapping[str, str]) -> list[Message]:
    """The same session on no particular machine. names: real -> fake, of equal length.

    Raises: HarnessError where a replacement would change more than it should.
    """
    for real, fake in names.items():
        if len(real) != len(fake):
            raise HarnessError(f"{fake} is not as long as {real}")
    known = _Names({real.encode(): fake.encode() for real, fake in names.items()})
    for message in messages:
        for pod, container in _mentioned(message):
            known.learn(pod, container)
    macs = dict(_grants(messages, key, known))
    return [_scrub(message, known, macs) for message in messages]


def _scrub(message: Message, known: _Names, macs: Mapping[bytes, bytes]) -> Message:
    done = _without_timeout(_without_pids(message, known.pids))
    data = known.apply(done.data)
    for real, fake in macs.items():
        data = data.replace(real, fake)
    if len(data) != len(message.data):
        raise HarnessError(f"{message.comment} changed its length")
    return replace(message, data=data)


def _mentioned(message: Message) -> Iterator[tuple[pb.PodSandbox | None, pb.Container | None]]:
    """Pods with their containers, of a request."""
    if not message.from_runtime or not message.is_request:
        return
    body: Any = message.body
    match body:
        case pb.SynchronizeRequest():
            pods = {pod.id: pod for pod in body.pods}
            yield from ((pod, None) for pod in body.pods)
            yield from ((pods[each.pod_sandbox_id], each) for each in body.containers)
        case pb.ConfigureRequest():
            return
        case _:
            yield body.pod, body.container if body.HasField("container") else None


def _grants(messages: Sequence[Message], key: bytes, known: _Names) -> Iterator[tuple[bytes, bytes]]:
    """Real mac -> the mac of the scrubbed grant."""
    asked: dict[int, tuple[pb.PodSandbox, pb.Container]] = {}
    for message in messages:
        for pod, container in _mentioned(message):
            if pod and container:
                asked[message.stream_id] = (pod, container)
                yield from _signed(container.annotations, pod, container, key, known)
        if message.method == "CreateContainer" and not message.from_runtime:
            yield from _signed(message.body.adjust.annotations, *asked[message.stream_id], key, known)


def _signed(
    annotations: Mapping[str, str], pod: pb.PodSandbox, container: pb.Container, key: bytes, known: _Names
) -> Iterator[tuple[bytes, bytes]]:
    text = annotations.get(GRANT_KEY)
    if text is None:
        return
    signed = verify_grant(text, PodUid(pod.uid), ContainerId(container.id), key)
    if not isinstance(signed, SignedGrant):
        raise HarnessError(f"a grant was not signed with our key: {signed}")
    grant = Grant(
        container_id=ContainerId(known.fake(container.id)),
        container_name=container.name,
        pod_id=PodId(known.fake(pod.id)),
        pod_uid=PodUid(known.fake(pod.uid)),
        pod_name=pod.name,
        namespace=pod.namespace,
        uuids=signed.uuids,
        mode=signed.mode,
        generation=known.fake(signed.generation),
    )
    yield text[-MAC_CHARACTERS:].encode(), sign_grant(grant, key)[-MAC_CHARACTERS:].encode()


def _without_pids(message: Message, pids: Mapping[int, int]) -> Message:
    """The pid fields made fake, and nothing else: varints are short, and might stand elsewhere by chance."""
    for pod, container in _mentioned(message):
        for tag, pid in ((POD_PID_TAG, pod.pid if pod else 0), (CONTAINER_PID_TAG, container.pid if container else 0)):
            if pid:
                changed = message.data.replace(tag + _varint(pid), tag + _varint(pids[pid]))
                message = replace(message, data=changed)
    return message


def _without_timeout(message: Message) -> Message:
    if not (message.is_request and message.from_runtime):
        return message
    real = TIMEOUT_TAG + _varint(message.envelope.timeout_nano)
    head, found, tail = message.data.rpartition(real)  # it stands behind the payload
    if not found or len(_varint(TIMEOUT_NS)) != len(real) - 1:
        raise HarnessError(f"{message.comment} has no timeout like the others")
    return replace(message, data=head + TIMEOUT_TAG + _varint(TIMEOUT_NS) + tail)


def _like(pid: int) -> int:
    """A fixed number of as many digits, and of as many bytes as a varint."""
    digits = len(str(pid))
    return next(
        n for n in (int(each[:digits]) for each in ("4242424", "1242424")) if len(_varint(n)) == len(_varint(pid))
    )


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
