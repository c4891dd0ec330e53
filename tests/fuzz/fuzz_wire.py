"""Any bytes, cut in any way, end in events, NEED_DATA or RemoteProtocolError, and in nothing else.

And: how they are cut changes nothing; all that comes out can be answered; there are no more events than headers.

An input is fed to a mux and to a bare connection, as plugin and as runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nri_gpu.plugin.nri_service import PLUGIN
from nri_gpu.ttrpc import (
    NEED_DATA,
    PLUGIN_SERVICE,
    RUNTIME_SERVICE,
    Connection,
    ConnId,
    Incoming,
    Mux,
    NeedData,
    RemoteProtocolError,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseSent,
    Role,
    StreamId,
)
from nri_gpu.ttrpc.frames import HEADER_BYTES
from tests.fuzz.target import Target, kept

PIECES_MAX: Final = 50  # into which an input is cut; tests/property has every cut
CALLS: Final = (1, 3, 5)  # open in every client, so that answers mean something


def _client() -> Connection:
    client = Connection(Role.CLIENT, receive_limit=1000)
    for number in CALLS:
        client.send(RequestSent(StreamId(number), "s", "m"))
    return client


def _mux(serves: ConnId, calls: ConnId) -> Mux:
    return Mux({serves: Connection(Role.SERVER, receive_limit=1000, open_limit=3), calls: _client()})


class _Bare(Mux):
    """One connection without a mux, in a mux's clothes."""

    __slots__ = ("only",)

    def __init__(self, only: Connection) -> None:
        super().__init__({PLUGIN_SERVICE: only})
        self.only = only

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        self.only.receive_data(data)

    def receive_eof(self) -> None:
        self.only.receive_eof()

    def next_event(self) -> tuple[ConnId, Incoming] | NeedData:
        event = self.only.next_event()
        return NEED_DATA if event is NEED_DATA else (PLUGIN_SERVICE, event)


ENDS: Final[Mapping[str, Callable[[], Mux]]] = {
    "plugin": lambda: _mux(PLUGIN_SERVICE, RUNTIME_SERVICE),
    "runtime": lambda: _mux(RUNTIME_SERVICE, PLUGIN_SERVICE),
    "server": lambda: _Bare(Connection(Role.SERVER, receive_limit=1000, open_limit=3)),
    "client": lambda: _Bare(_client()),
}


def outcome(target: str, chunks: Sequence[bytes]) -> tuple[list[tuple[ConnId, Incoming]], str]:
    """All events of these bytes, and how it ended: text of the error, or nothing. Any other exception gets through."""
    mux, events = ENDS[target](), list[tuple[ConnId, Incoming]]()
    try:
        for chunk in chunks:
            mux.receive_data(chunk)
            _drain(mux, events)
        mux.receive_eof()
        _drain(mux, events)
    except RemoteProtocolError as error:
        return events, str(error)
    return events, ""


def _drain(mux: Mux, events: list[tuple[ConnId, Incoming]]) -> None:
    for conn_id, event in mux.events():
        events.append((conn_id, event))
        if isinstance(event, RequestRejected):
            mux.send(conn_id, event)
        elif isinstance(event, RequestReceived) and event.stream_id % 4 == 1:  # the others stay open
            mux.send(conn_id, ResponseSent(event.stream_id, event.payload[:10]))


def check(data: bytes) -> bool:
    """Whether somebody understood it to its end. Raises: AssertionError, or whatever should not have been raised."""
    step = max(1 + data[0] % 13, len(data) // PIECES_MAX) if data else 1
    good = False
    for target in ENDS:
        whole = outcome(target, [data])
        assert len(whole[0]) <= len(data) // HEADER_BYTES + 2, "more events than headers"  # 2: the ends
        pieces = [data[at : at + step] for at in range(0, len(data), step)]
        assert outcome(target, pieces) == whole, f"{target}: cutting by {step} changes what comes out"
        good |= not whole[1]
    return good


WIRE: Final = Target(
    check,
    good=tuple(each for _, each in kept("wire") if check(each)),
    pieces=("\0\0\0\1", "\0\0\0\2", b"\x7f\xff\xff\xff", "\0\0\0\x0a", "\0\0\x10\0", b"\x01\x00", PLUGIN, "Configure"),
    bytes_max=3000,
)
TARGETS: Final = {"wire": WIRE}
