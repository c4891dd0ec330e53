from __future__ import annotations

import pytest

from nri_gpu.ttrpc import (
    LocalProtocolError,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
)
from nri_gpu.ttrpc.connection import TABLES, Role, Streams, StreamState
from nri_gpu.ttrpc.events import CallForgotten, StreamEvent
from tests.unit.ttrpc.helpers import stream

EVENTS: tuple[type[StreamEvent], ...] = (
    RequestReceived,
    RequestRejected,
    ResponseReceived,
    RequestSent,
    ResponseSent,
    CallForgotten,
)
ONE = stream(1)


def streams_in(role: Role, state: StreamState) -> Streams:
    streams = Streams(role)
    opening, closing = (RequestReceived, ResponseSent) if role is Role.SERVER else (RequestSent, ResponseReceived)
    if state is not StreamState.IDLE:
        streams.move(ONE, opening)
    if state is StreamState.DONE:
        streams.move(ONE, closing)
    assert streams.state(ONE) is state
    return streams


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", StreamState)
@pytest.mark.parametrize("role", Role)
def test_a_stream_goes_where_the_table_says_or_nowhere(
    role: Role, state: StreamState, event: type[StreamEvent]
) -> None:
    streams = streams_in(role, state)
    after = TABLES[role][state].get(event)
    assert streams.allows(ONE, event) is (after is not None)
    if after is None:
        with pytest.raises(LocalProtocolError, match=f"{event.__name__} on stream 1, which is {state.value}"):
            streams.move(ONE, event)
        assert streams.state(ONE) is state
    else:
        streams.move(ONE, event)
        assert streams.state(ONE) is after


@pytest.mark.parametrize("role", Role)
def test_every_state_of_a_table_has_a_row(role: Role) -> None:
    assert set(TABLES[role]) == set(StreamState)


def test_ids_start_at_one_and_grow_by_two() -> None:
    streams = Streams(Role.CLIENT)
    for expected in (1, 3, 5):
        assert streams.next_id == expected
        streams.move(streams.next_id, RequestSent)


def test_a_skipped_id_is_gone() -> None:
    streams = Streams(Role.CLIENT)
    streams.move(stream(5), RequestSent)
    assert (streams.state(stream(3)), streams.next_id) == (StreamState.DONE, 7)


def test_memory_is_the_open_streams_only() -> None:
    streams = Streams(Role.SERVER)
    for number in range(1, 2001, 2):
        streams.move(stream(number), RequestReceived)
        streams.move(stream(number), ResponseSent)
    assert (len(streams), streams.open) == (0, frozenset())


def test_a_rejected_id_is_used_up() -> None:
    streams = Streams(Role.SERVER)
    streams.move(ONE, RequestRejected)
    assert not streams.allows(ONE, RequestReceived)
