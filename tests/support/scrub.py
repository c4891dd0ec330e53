"""Takes this machine and this moment out of a recorded session.

Ids and uids become one digit repeated, in order of appearance; pids, timeouts and a driver's generation become fixed
numbers; paths become what the caller names, at the same length. The mac of a signed grant covers ids, so it is made
anew, by the same key.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.ledger.grant_text import SignedGrant, sign_grant, verify_grant
from nri_gpu.ttrpc.frames import HEADER as FRAME
from tests.support.errors import HarnessError
from tests.support.recorder import Message

TIMEOUT_NS: Final = 2_000_000_000  # what requests are given; what is left of it when one is written is never the same
GENERATION: Final = re.compile(rb"(\d+\.\d+\.\d+-)[0-9a-f]{8}")
FAKE_GENERATION: Final = "0" * 8
MAC_CHARACTERS: Final = 64


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
            self.pids[pid] = int("4242424"[: len(str(pid))])
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
        for pod, container in _mentioned(message, message.body):
            known.learn(pod, container)
    macs = dict(_grants(messages, key, known))
    return [_scrub(message, known, macs) for message in messages]


def _scrub(message: Message, known: _Names, macs: Mapping[bytes, bytes]) -> Message:
    envelope, body = message.envelope, message.body
    for each in (each for pair in _mentioned(message, body) for each in pair if each is not None and each.pid):
        each.pid = known.pids.get(each.pid, each.pid)  # of a pod, once for each of its containers
    if message.from_runtime and message.is_request:
        envelope.timeout_nano = TIMEOUT_NS
        envelope.payload = body.SerializeToString(deterministic=True)
    data = known.apply(envelope.SerializeToString())
    for real, fake in macs.items():
        data = data.replace(real, fake)
    _, *rest = FRAME.unpack_from(message.data)
    return replace(message, data=FRAME.pack(len(data), *rest) + data)


def _mentioned(message: Message, body: Any) -> Iterator[tuple[pb.PodSandbox | None, pb.Container | None]]:  # noqa: ANN401
    """Pods with their containers, of a request's body."""
    if not message.from_runtime or not message.is_request:
        return
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
        for pod, container in _mentioned(message, message.body):
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
