"""Sessions recorded on real containerds, replayed: to the runtime's bytes the plugin answers with the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.recorder import Message
from tests.unit.nri.replaying import Replayed, messages_of, path_of

pytestmark = pytest.mark.usefixtures("on_x86_64")

STREAM_CUTS = 40
# What the plugin holds after each session's last event.
HELD: dict[str, list[str]] = {
    "one_life": [],
    "refusal": [],
    "second_session": ["running", "running"],
    "long_reply": ["created"],
}
SESSIONS = [(path_of(session, version), held) for session, held in HELD.items() for version in ("1.7", "2.1")]


def asked(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.from_runtime]


@pytest.mark.parametrize(("path", "held"), SESSIONS, ids=lambda each: getattr(each, "stem", ""))
def test_each_message_is_answered_with_the_recorded_bytes(path: Path, held: list[str]) -> None:
    messages, plugin = messages_of(path), Replayed()
    answers = {each.stream_id: each for each in messages if not (each.from_runtime or each.is_request)}
    register = next(message for message in messages if message.method == "RegisterPlugin" and message.is_request)
    assert plugin.begin() == register.wire
    for message in asked(messages):
        expected = answers[message.stream_id].wire if message.is_request else b""
        assert plugin.feed(message.wire) == expected, message.comment
    assert plugin.ready == 1
    assert [entry.phase.value for entry in plugin.bench.plugin.ledger.entries.values()] == held


@settings(max_examples=25, deadline=None)
@given(path=st.sampled_from([path for path, _ in SESSIONS]), data=st.data())
def test_however_the_stream_is_cut(path: Path, data: st.DataObject) -> None:
    messages = messages_of(path)
    stream = b"".join(message.wire for message in asked(messages))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=STREAM_CUTS).map(sorted))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert Replayed().feed_all(chunks) == _ours(messages)


def _ours(messages: list[Message]) -> bytes:
    return b"".join(message.wire for message in messages if not message.from_runtime)
