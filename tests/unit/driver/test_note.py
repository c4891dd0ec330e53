"""The note of a libcuda: read from what a real compiler made, and never more than refused where it is damaged."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.driver.compat import NOTE_OWNER, NOTE_SECTION, read_note
from nri_gpu.driver.elf import MalformedError, parse_elf, parse_note
from tests.support import compat
from tests.support.elf_file import shared_library

SAID = compat.note("13.0", (535, 550, 570))


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = compat.make_package(tmp_path_factory.mktemp("compat") / "packages", "13.0", "580.65.06", SAID)
    return (folder / "libcuda.so.580.65.06").read_bytes()


def note(data: bytes, owner: str = NOTE_OWNER) -> bytes | None:
    return parse_note(io.BytesIO(data), NOTE_SECTION, owner)


def test_a_note_that_a_compiler_made(libcuda: bytes) -> None:
    assert note(libcuda) == SAID.encode()
    assert read_note(SAID.encode()) == ("13.0", frozenset({535, 550, 570}))


def test_a_library_without_sections_or_without_such_a_one_has_no_note() -> None:
    assert note(shared_library("libcuda.so.1")) is None
    assert note(Path("/bin/sh").read_bytes()) is None


def test_somebody_elses_note_is_not_one(libcuda: bytes) -> None:
    with pytest.raises(MalformedError):
        note(libcuda, "Somebody")
    with pytest.raises(MalformedError):
        note(b"no ELF file")


def header(data: bytes) -> tuple[int, int, int]:
    """Where the sections are, how many, and which has their names."""
    (table,) = struct.unpack_from("<Q", data, 40)
    return (table, *struct.unpack_from("<2H", data, 60))


def test_a_note_longer_than_its_section(libcuda: bytes) -> None:
    at = libcuda.index(b"NVIDIA Corporation\0") - 12
    for field in (at, at + 4):
        for size in (0, 2**16, 2**32 - 1):
            data = bytearray(libcuda)
            struct.pack_into("<I", data, field, size)
            try:
                found = note(bytes(data))
            except MalformedError:
                continue
            assert (size, found) == (0, b"")


@pytest.mark.parametrize(("offset", "form"), [(40, "<Q"), (58, "<H"), (60, "<H"), (62, "<H")])
def test_a_section_table_that_is_nowhere(libcuda: bytes, offset: int, form: str) -> None:
    data = bytearray(libcuda)
    struct.pack_into(form, data, offset, 0xFFFF)
    with pytest.raises(MalformedError):
        note(bytes(data))


@given(st.data())
def test_a_damaged_library_has_a_note_or_none_or_a_bad_one(libcuda: bytes, data: st.DataObject) -> None:
    damaged = bytearray(libcuda)
    table, count, _ = header(libcuda)
    places = st.one_of(st.integers(0, 63), st.integers(table, table + 64 * count - 1), st.integers(0, len(libcuda) - 1))
    for position, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=8)):
        damaged[position] = byte
    cut = bytes(damaged[: data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))])
    parse_elf(io.BytesIO(cut))
    try:
        text = note(cut)
    except MalformedError:
        return
    if text is not None:
        assert_read_or_refused(text)


def assert_read_or_refused(text: bytes) -> None:
    try:
        cuda, drivers = read_note(text)
    except MalformedError:
        return
    assert not cuda or cuda.replace(".", "").isdigit()
    assert all(isinstance(each, int) for each in drivers)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)))
def test_any_text_is_read_or_refused(text: bytes) -> None:
    assert_read_or_refused(text)


@pytest.mark.parametrize(
    "said",
    [
        *(
            "",
            "{",
            "[]",
            "13.0",
            '{"Driver": "580"}',
            '{"Driver": [580.5]}',
            '{"Driver": [true]}',
            '{"Driver": {"580": 1}}',
        ),
        *('{"CUDA Version": 13}', '{"CUDA Version": "thirteen"}', '{"CUDA Version": "13.0/.."}', "[" * 100_000),
        '{"Driver": [' + ",".join(["1"] * 257) + "]}",
    ],
    ids=lambda said: said[:20],
)
def test_what_is_not_understood_is_refused(said: str) -> None:
    with pytest.raises(MalformedError):
        read_note(said.encode())


def test_what_is_not_said_is_not_known() -> None:
    assert read_note(b"{}") == ("", frozenset())
    assert read_note(b'{"Driver": null, "New": 1}') == ("", frozenset())
