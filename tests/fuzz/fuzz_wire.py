"""Any bytes, cut in any way, end in events, NEED_DATA or RemoteProtocolError, and in nothing else.

And: how they are cut changes nothing; all that comes out can be answered; there are no more events than headers.

    python -m tests.fuzz.fuzz_wire --seconds 60 [--seed N]

The corpus is hex as text, in corpus/wire. An input is fed to each target.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

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
from nri_gpu.ttrpc.events import HEADER_BYTES
from tests.fuzz.mutation import fuzz

CORPUS: Final = Path(__file__).parent / "corpus" / "wire"
CALLS: Final = (1, 3, 5)  # open in every client, so that answers mean something


def _client(receive_limit: int) -> Connection:
    client = Connection(Role.CLIENT, receive_limit=receive_limit)
    for number in CALLS:
        client.send(RequestSent(StreamId(number), "s", "m"))
    return client


def _mux(serves: ConnId, calls: ConnId, receive_limit: int = 1000) -> Mux:
    return Mux({serves: Connection(Role.SERVER, receive_limit=receive_limit, open_limit=3), calls: _client(1000)})


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


TARGETS: Final[Mapping[str, Callable[[], Mux]]] = {
    "plugin": lambda: _mux(PLUGIN_SERVICE, RUNTIME_SERVICE),
    "runtime": lambda: _mux(RUNTIME_SERVICE, PLUGIN_SERVICE),
    "server": lambda: _Bare(Connection(Role.SERVER, receive_limit=1000, open_limit=3)),
    "client": lambda: _Bare(_client(1000)),
}


def outcome(target: str, chunks: Sequence[bytes]) -> tuple[list[tuple[ConnId, Incoming]], str]:
    """All events of these bytes, and how it ended: text of the error, or nothing. Any other exception gets through."""
    mux, events = TARGETS[target](), list[tuple[ConnId, Incoming]]()
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
    step = 1 + data[0] % 13 if data else 1
    good = False
    for target in TARGETS:
        whole = outcome(target, [data])
        assert len(whole[0]) <= len(data) // HEADER_BYTES + 2, "more events than headers"  # 2: the ends
        pieces = [data[at : at + step] for at in range(0, len(data), step)]
        assert outcome(target, pieces) == whole, f"{target}: cutting by {step} changes what comes out"
        good |= not whole[1]
    return good


def corpus() -> list[Path]:
    """The inputs that are kept."""
    return sorted(CORPUS.glob("*.hex"))


def read(path: Path) -> bytes:
    """One input; comments after #."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in path.read_text().splitlines()))


POOL: Final = tuple(map(read, corpus()))


def mutate(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """A few edits that keep some structure: interesting numbers, pieces repeated, dropped, or from elsewhere."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at, end = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0:
                out[at:at] = rng.choice((b"\0", b"\1", b"\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x0a", b"\0\0\x10\0"))
            case 1:
                out[at:end] = b""
            case 2:
                out[at:at] = out[at:end]
            case 3:
                out[at : at + 4] = rng.choice((0, 1, 2, 9, 10, 1000, 1001, 4096, 2**24, 2**32 - 1)).to_bytes(4)
            case 4:
                out[at:at] = rng.choice(pool)
            case _:
                out[at : at + 1] = rng.randbytes(1)
    return bytes(out[:20_000])


def mutated(dice: random.Random) -> bytes:
    """A mutation of the corpus."""
    return mutate(dice.choice(POOL), POOL, dice)


@pytest.mark.parametrize("path", corpus(), ids=lambda path: path.stem)
def test_the_corpus(path: Path) -> None:
    check(read(path))


def test_some_mutations() -> None:
    dice = random.Random(0)
    for _ in range(300):
        check(mutated(dice))


if __name__ == "__main__":
    sys.exit(fuzz(check, mutated, __doc__))
