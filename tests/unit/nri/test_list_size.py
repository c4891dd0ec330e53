from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.convert import DecodeError
from nri_gpu.nri.list_size import event_of, fields, size_of
from tests.support import nri_messages as nri

POD = nri.pod("p", namespace="ml")
MADE = nri.container(POD, env=["A=" + "x" * 300])


def test_names_and_sizes_are_those_of_the_decoded_message() -> None:
    request = size_of(nri.create(POD, MADE))
    assert (request.pod.id, request.pod.name, request.pod.namespace) == (POD.id, POD.name, POD.namespace)
    assert request.container is not None
    assert (request.container.id, request.container.pod_id, request.container.name) == (MADE.id, POD.id, MADE.name)
    assert (request.pod.size_bytes, request.container.size_bytes) == (POD.ByteSize(), MADE.ByteSize())


def test_a_state_change_has_other_numbers() -> None:
    payload = pb.StateChangeEvent(event=pb.RUN_POD_SANDBOX, pod=POD).SerializeToString()
    assert event_of(payload) == pb.RUN_POD_SANDBOX
    change = size_of(payload)
    assert (change.pod.id, change.container) == (POD.id, None)
    assert event_of(nri.create(POD, MADE)) == event_of(b"") == 0
    assert (size_of(b"").pod.id, size_of(b"").container) == ("", None)


def test_every_wire_type_is_passed_over() -> None:
    data = b"\x08\x96\x01" + b"\x11" + b"\0" * 8 + b"\x1d" + b"\0" * 4 + b"\x22\x02ab"
    assert [(field.number, field.value, data[field.start : field.end]) for field in fields(data)] == [
        (1, 150, b""),
        (2, 0, b"\0" * 8),
        (3, 0, b"\0" * 4),
        (4, 0, b"ab"),
    ]


@given(st.binary(max_size=64))
def test_any_bytes_end_in_fields_or_in_that_error(data: bytes) -> None:
    with suppress(DecodeError):
        assert all(0 <= field.start <= field.end <= len(data) for field in fields(data))


@pytest.mark.parametrize("bad", [b"\xff", b"\x0a\x05ab", b"\x0b", b"\x08" + b"\xff" * 11, b"\x11\0"])
def test_garbage_ends_in_an_error(bad: bytes) -> None:
    with pytest.raises(DecodeError):
        list(fields(bad))
