"""Records NRI sessions between a real runtime and a real plugin, as text that diffs and holds no real id.

    with Recorder(folder / "nri.sock", node.nri_socket) as recorder:  # the plugin connects to folder / "nri.sock"
        ...
    text = render(header, scrubbed(split(recorder.sessions[0]), key, names))  # tests/support/scrub.py

A man in the middle: bytes pass unchanged, and are kept, and are cut into ttrpc messages afterwards.
"""

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from google.protobuf.message import Message as ProtobufMessage
from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu._pb import ttrpc_pb2
from nri_gpu.ttrpc.frames import HEADER as FRAME
from nri_gpu.ttrpc.frames import FrameType
from nri_gpu.ttrpc.mux import HEADER as MUX
from nri_gpu.ttrpc.mux import ConnId, encode_message
from tests.support.errors import HarnessError

READ_BYTES: Final = 1 << 18
LINE_BYTES: Final = 56
# Method -> what is asked, what is answered; of the methods that NRI 0.6 and 0.8 have and we subscribe to.
METHODS: Final[Mapping[str, tuple[type[ProtobufMessage], type[ProtobufMessage]]]] = {
    "RegisterPlugin": (pb.RegisterPluginRequest, pb.Empty),
    "Configure": (pb.ConfigureRequest, pb.ConfigureResponse),
    "Synchronize": (pb.SynchronizeRequest, pb.SynchronizeResponse),
    "CreateContainer": (pb.CreateContainerRequest, pb.CreateContainerResponse),
    "StopContainer": (pb.StopContainerRequest, pb.StopContainerResponse),
    "StateChange": (pb.StateChangeEvent, pb.Empty),
}


class Message(Struct, frozen=True):
    """One ttrpc message. data: with its ttrpc header, without the mux's. method: the call it asks or answers."""

    from_runtime: bool
    conn_id: ConnId
    data: bytes
    method: str

    @property
    def wire(self) -> bytes:
        """As it went over the socket; `split` made sure that the sender had framed it so."""
        return encode_message(self.conn_id, self.data)

    @property
    def stream_id(self) -> int:
        return int(FRAME.unpack_from(self.data)[1])

    @property
    def is_request(self) -> bool:
        return bool(FRAME.unpack_from(self.data)[2] == FrameType.REQUEST)

    @property
    def envelope(self) -> Any:  # noqa: ANN401 - one of two generated classes
        kind = ttrpc_pb2.Request if self.is_request else ttrpc_pb2.Response
        return kind.FromString(self.data[FRAME.size :])

    @property
    def body(self) -> Any:  # noqa: ANN401 - one of many generated classes
        """What is asked or answered."""
        return METHODS[self.method][0 if self.is_request else 1].FromString(self.envelope.payload)

    @property
    def comment(self) -> str:
        if self.is_request:
            event = f" {pb.Event.Name(self.body.event)}" if self.method == "StateChange" else ""
            return f"{self.method}{event}"
        status = self.envelope.status
        return f"reply to {self.method}" + (f": error {status.code}" if status.code else "")


class Session(Struct):
    """One connection: chunks as they were read, in the order of both sides."""

    chunks: list[tuple[bool, bytes]] = field(default_factory=list)


class Recorder:
    """Listens where a plugin connects, and connects where the runtime listens. sessions: one a connection."""

    def __init__(self, path: Path, target: Path) -> None:
        self.sessions: list[Session] = []
        self._target = str(target)
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._sockets = [self._listener]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):  # not connected any more
                each.shutdown(socket.SHUT_RDWR)  # wakes accept and recv
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                self._bridge(self._listener.accept()[0])

    def _bridge(self, plugin: socket.socket) -> None:
        runtime = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets += (plugin, runtime)
        runtime.connect(self._target)
        session = Session()
        self.sessions.append(session)
        for source, sink, from_runtime in ((plugin, runtime, False), (runtime, plugin, True)):
            pump = threading.Thread(target=self._pump, args=(source, sink, session, from_runtime), daemon=True)
            self._threads.append(pump)
            pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, session: Session, from_runtime: bool) -> None:
        with contextlib.suppress(OSError):  # either side gone
            while data := source.recv(READ_BYTES):
                with self._lock:  # kept before it is passed on: an answer never precedes what it answers
                    session.chunks.append((from_runtime, data))
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def split(session: Session) -> list[Message]:
    """The session's whole messages, in order. Raises: HarnessError where a sender framed other than we do."""
    buffers = {True: bytearray(), False: bytearray()}
    streams: dict[tuple[bool, int], bytearray] = {}
    framed: dict[tuple[bool, int], bytearray] = {}
    methods: dict[tuple[int, int], str] = {}
    messages: list[Message] = []
    for from_runtime, chunk in session.chunks:
        buffers[from_runtime] += chunk
        for conn_id, frame in _frames(buffers[from_runtime]):
            place = (from_runtime, conn_id)
            stream = streams.setdefault(place, bytearray())
            stream += frame[MUX.size :]
            framed.setdefault(place, bytearray()).extend(frame)
            if len(stream) < FRAME.size or len(stream) < FRAME.size + FRAME.unpack_from(stream)[0]:
                continue
            message = _message(from_runtime, ConnId(conn_id), bytes(stream), methods)
            if message.wire != framed[place]:
                raise HarnessError(f"{message.comment} was not framed as we would")
            messages.append(message)
            stream.clear()
            framed[place].clear()
    return messages


def _frames(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """Whole mux frames at the front of a buffer, which loses them."""
    while len(buffer) >= MUX.size:
        conn_id, length = MUX.unpack_from(buffer)
        if len(buffer) < MUX.size + length:
            return
        yield conn_id, bytes(buffer[: MUX.size + length])
        del buffer[: MUX.size + length]


def _message(from_runtime: bool, conn_id: ConnId, data: bytes, methods: dict[tuple[int, int], str]) -> Message:
    message = Message(from_runtime, conn_id, data, "")
    call = (conn_id, message.stream_id)
    if message.is_request:
        methods[call] = message.envelope.method
    return replace(message, method=methods[call])


def render(header: str, messages: Iterable[Message]) -> str:
    """The text of a recording, as tests/support/recording.py reads it."""
    lines = [f"# {line}" for line in header.splitlines()]
    for message in messages:
        lines += ["", *_lines(message)]
    return "\n".join(lines) + "\n"


def _lines(message: Message) -> Iterator[str]:
    buffer, begun = bytearray(message.wire), False
    for _, frame in _frames(buffer):
        mux, payload = frame[: MUX.size].hex(" ", -4), frame[MUX.size :]
        if begun:
            yield f"  {mux}  # the rest"
        else:
            header, payload = payload[: FRAME.size].hex(), payload[FRAME.size :]
            yield f"{'<' if message.from_runtime else '>'} {mux}  # {message.comment}"
            yield f"  {header[:8]} {header[8:16]} {header[16:18]} {header[18:]}"
        begun = True
        yield from (f"  {payload[at : at + LINE_BYTES].hex()}" for at in range(0, len(payload), LINE_BYTES))
