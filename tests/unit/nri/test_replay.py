"""Sessions recorded on real containerds, replayed: to the runtime's bytes the plugin answers with the recorded ones."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.grant import SignedGrant, verify_grant
from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri.events import Event
from nri_gpu.ttrpc.mux import FIRST_FRAME_MAX
from tests.support.loading import LIBRARIES
from tests.support.plugin import KEY
from tests.support.recorder import Message
from tests.unit.nri.replaying import SESSIONS, Replayed, messages_of, path_of, paths

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64",
    reason="recorded on x86-64: elsewhere the loader has other folders, and we fewer mounts",
)

VERSIONS = ("1.7", "2.1")
STREAM_CUTS = 40

every_recording = pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
both = pytest.mark.parametrize("version", VERSIONS)


def recorded(session: str, version: str) -> list[Message]:
    return messages_of(path_of(session, version))


def asked(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.from_runtime]


def test_every_session_was_recorded_on_every_generation() -> None:
    assert {*paths()} == {path_of(session, version) for session in SESSIONS for version in VERSIONS}


@every_recording
def test_each_message_is_answered_with_the_recorded_bytes(path: Path) -> None:
    messages, plugin = messages_of(path), Replayed()
    answers = {each.stream_id: each for each in messages if not (each.from_runtime or each.is_request)}
    register = next(message for message in messages if message.method == "RegisterPlugin" and message.is_request)
    assert plugin.begin() == register.wire
    for message in asked(messages):
        expected = answers[message.stream_id].wire if message.is_request else b""
        assert plugin.feed(message.wire) == expected, message.comment
    assert plugin.ready == 1


@every_recording
def test_a_byte_at_a_time(path: Path) -> None:
    messages = messages_of(path)
    stream = b"".join(message.wire for message in asked(messages))
    assert Replayed().feed_all([stream[at : at + 1] for at in range(len(stream))]) == _ours(messages)


@settings(max_examples=25, deadline=None)
@given(path=st.sampled_from(paths()), data=st.data())
def test_however_the_stream_is_cut(path: Path, data: st.DataObject) -> None:
    messages = messages_of(path)
    stream = b"".join(message.wire for message in asked(messages))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=STREAM_CUTS).map(sorted))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert Replayed().feed_all(chunks) == _ours(messages)


@both
def test_the_life_of_a_grant(version: str) -> None:
    """What the recording holds, read by field numbers; and that after its last event nothing is held."""
    messages, plugin = recorded("one_life", version), Replayed()
    plugin.begin()
    held = []
    for message in asked(messages):
        plugin.feed(message.wire)
        if message.is_request:
            held.append((message.comment, len(plugin.bench.plugin.ledger.entries)))
    assert held[:5] == [
        ("Configure", 0),
        ("Synchronize", 0),
        ("StateChange RUN_POD_SANDBOX", 0),
        ("CreateContainer", 1),
        ("StateChange START_CONTAINER", 1),
    ]
    assert ("StateChange REMOVE_CONTAINER", 0) in held
    assert held[-1] == ("StateChange REMOVE_POD_SANDBOX", 0)
    [created] = _replies(messages, "CreateContainer")
    assert {each.path for each in created.adjust.linux.devices} >= {"/dev/nvidia0", "/dev/nvidia2", "/dev/nvidiactl"}
    assert not created.adjust.HasField("hooks")


@both
def test_a_refusal_and_what_the_runtime_says_after_it(version: str) -> None:
    messages = recorded("refusal", version)
    refused, bystander = [each for each in messages if each.method == "CreateContainer" and not each.is_request]
    assert (refused.envelope.status.code, refused.envelope.payload) == (9, b"")
    assert re.search(r"nri-gpu \[no-such-gpu\]: .*'9'", refused.envelope.status.message)
    assert bystander.envelope.ByteSize() == 0  # the cheapest answer there is, to who asked for nothing
    after = [each.comment for each in asked(messages) if each.is_request][4:6]
    assert after == ["StopContainer", "StateChange REMOVE_CONTAINER"]


@both
def test_the_second_session_finds_its_grants(version: str) -> None:
    messages = recorded("second_session", version)
    [listed] = [message.body for message in asked(messages) if message.method == "Synchronize"]
    pods = {pod.id: pod for pod in listed.pods}
    grants = [
        verify_grant(each.annotations[GRANT_KEY], PodUid(pods[each.pod_sandbox_id].uid), ContainerId(each.id), KEY)
        for each in listed.containers
    ]
    assert all(isinstance(each, SignedGrant) for each in grants), grants
    assert sorted(each.state for each in listed.containers) == [pb.CONTAINER_CREATED, pb.CONTAINER_RUNNING]
    assert not listed.more
    plugin = Replayed()
    plugin.feed_all([message.wire for message in asked(messages)])
    assert {entry.phase.value for entry in plugin.bench.plugin.ledger.entries.values()} == {"running"}


@both
def test_a_reply_of_two_mux_frames(version: str) -> None:
    [reply] = [
        each for each in recorded("long_reply", version) if each.method == "CreateContainer" and not each.is_request
    ]
    assert len(reply.data) > FIRST_FRAME_MAX
    [path] = [each.value for each in reply.body.adjust.env if each.key == "LD_LIBRARY_PATH"]
    assert path.startswith(f"{LIBRARIES}:/opt/application/component-000/lib:")


@both
def test_events_come_by_state_change_up_to_nri_0_11(version: str) -> None:
    changes = [each for each in recorded("one_life", version) if each.method == "StateChange" and each.is_request]
    pods = {Event.RUN_POD_SANDBOX, Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX}
    expected = {Event.START_CONTAINER, Event.REMOVE_CONTAINER, *pods}
    assert {each.body.event for each in changes} == expected


@every_recording
def test_nothing_of_the_machine_is_left(path: Path) -> None:
    """Ids are one digit repeated, and every request has the same time."""
    for message in messages_of(path):
        if message.from_runtime and message.is_request:
            assert message.envelope.timeout_nano == 2_000_000_000
        for found in re.findall(rb"[0-9a-f]{64}", message.data):
            repeated = len(set(found)) == 1
            assert repeated or b"mac=" + found in message.data, found


def _ours(messages: list[Message]) -> bytes:
    return b"".join(message.wire for message in messages if not message.from_runtime)


def _replies(messages: list[Message], method: str) -> list[pb.CreateContainerResponse]:
    return [message.body for message in messages if message.method == method and not message.is_request]
