"""Reads an ELF file's class, machine, SONAME, needed libraries and notes: a few KiB of it, never all.

Any bytes are accepted: for a file that is not ELF, or is cut short, the result is None and not an exception.
Source: elf(5); System V ABI, chapters "Object Files" (sections, notes) and "Dynamic Linking".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from msgspec import Struct

from nri_gpu.domain.errors import DriverError

EM_386: Final = 3
EM_X86_64: Final = 62
EM_AARCH64: Final = 183

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME = 0, 1, 5, 14
SHT_NOTE: Final = 7

# A library has about ten program headers and forty dynamic entries. Bounds keep a hostile file from making us read or
# loop for long.
PROGRAM_HEADERS_MAX: Final = 1024
DYNAMIC_BYTES_MAX: Final = 64 * 1024
NAME_BYTES_MAX: Final = 256  # NAME_MAX of linux/limits.h and the NUL
SECTIONS_MAX: Final = 1024  # a library has about thirty
NOTE_BYTES_MAX: Final = 64 * 1024

Read = Callable[[int, int], bytes]  # offset, size -> exactly so many bytes, or _MalformedError


class Elf(Struct, frozen=True):
    """One ELF file's identity.

    bits: 32 or 64. machine: e_machine. soname: empty where there is none. needed: DT_NEEDED, in order.
    """

    bits: int
    machine: int
    soname: str = ""
    needed: tuple[str, ...] = ()


class _Shape(Struct, frozen=True):
    """Layouts of one class's structures. segment: which fields are offset, address and size in the file."""

    bits: int
    header: str
    program: str
    dynamic: str
    segment: tuple[int, int, int]
    section: str


SHAPES: Final = {
    1: _Shape(32, "HHIIIIIHHHHHH", "IIIIIIII", "iI", (1, 2, 4), "10I"),
    2: _Shape(64, "HHIQQQIHHHHHH", "IIQQQQQQ", "qQ", (2, 3, 5), "IIQQQQIIQQ"),
}
ORDERS: Final = {1: "<", 2: ">"}


class MalformedNoteError(Exception):
    """The section exists, and does not hold a complete note of that owner."""


class _MalformedError(Exception):
    """Not an ELF file, or one that points past its own end."""


class _Segment(Struct, frozen=True):
    kind: int
    offset: int
    address: int
    size_bytes: int


def read_elf(path: Path) -> Elf | None:
    """The identity of the file at `path`; None if it is not a complete ELF file. Raises: DriverError: unreadable."""
    try:
        with path.open("rb") as file:
            return parse_elf(file)
    except OSError as error:
        raise DriverError(f"{path} cannot be read: {error.strerror}") from error


def parse_elf(file: BinaryIO) -> Elf | None:
    """The identity of an open file, whatever its bytes; None if it is not a complete ELF file."""
    try:
        return _parse(_reader(file))
    except _MalformedError:
        return None


def parse_note(file: BinaryIO, section: str, owner: str) -> bytes | None:
    """The text of the first note in a section, without the NULs around it; None where there is no such section.

    Raises: MalformedNoteError: the note is cut short or of another owner, or the ELF file is not complete.
    """
    try:
        return _note(_reader(file), section.encode(), owner.encode())
    except _MalformedError:
        raise MalformedNoteError from None


def _reader(file: BinaryIO) -> Read:
    end = file.seek(0, 2)

    def read(offset: int, size: int) -> bytes:
        if offset + size > end:
            raise _MalformedError
        file.seek(offset)
        data = file.read(size)
        if len(data) != size:  # the file shrank meanwhile
            raise _MalformedError
        return data

    return read


def _opened(read: Read) -> tuple[_Shape, str, tuple[int, ...]]:
    """Class, byte order, and the header behind its first sixteen bytes."""
    ident = read(0, 16)
    shape, order = SHAPES.get(ident[4]), ORDERS.get(ident[5])
    if not ident.startswith(b"\x7fELF") or shape is None or order is None:
        raise _MalformedError
    return shape, order, _unpack(read, order + shape.header, 16)


def _parse(read: Read) -> Elf:
    shape, order, header = _opened(read)
    machine, table, entry_bytes, count = header[1], header[4], header[8], header[9]
    if count and (count > PROGRAM_HEADERS_MAX or entry_bytes != struct.calcsize(order + shape.program)):
        raise _MalformedError
    segments = [_segment(read, shape, order, table + i * entry_bytes) for i in range(count)]
    soname, needed = _names(read, shape, order, segments)
    return Elf(shape.bits, machine, soname, needed)


def _segment(read: Read, shape: _Shape, order: str, offset: int) -> _Segment:
    fields = _unpack(read, order + shape.program, offset)
    at, address, size = shape.segment
    return _Segment(fields[0], fields[at], fields[address], fields[size])


def _names(read: Read, shape: _Shape, order: str, segments: list[_Segment]) -> tuple[str, tuple[str, ...]]:
    dynamic = next((segment for segment in segments if segment.kind == PT_DYNAMIC), None)
    if dynamic is None:  # a static program, an object file
        return "", ()
    entries = list(_entries(read, order + shape.dynamic, dynamic))
    strings = next((_file_offset(segments, value) for tag, value in entries if tag == DT_STRTAB), None)
    if strings is None:
        return "", ()
    sonames = [_string(read, strings + value) for tag, value in entries if tag == DT_SONAME]
    needed = tuple(_string(read, strings + value) for tag, value in entries if tag == DT_NEEDED)
    return (sonames[0] if sonames else ""), needed


def _entries(read: Read, form: str, dynamic: _Segment) -> Iterator[tuple[int, int]]:
    data = read(dynamic.offset, min(dynamic.size_bytes, DYNAMIC_BYTES_MAX))
    whole = len(data) - len(data) % struct.calcsize(form)
    for tag, value in struct.iter_unpack(form, data[:whole]):
        if tag == DT_NULL:
            return
        yield tag, value


def _file_offset(segments: list[_Segment], address: int) -> int:
    # Dynamic entries hold addresses; the segment that is loaded around one says where that is in the file.
    for segment in segments:
        if segment.kind == PT_LOAD and segment.address <= address < segment.address + segment.size_bytes:
            return segment.offset + address - segment.address
    raise _MalformedError


def _string(read: Read, offset: int) -> str:
    text = b""
    while b"\0" not in text:
        if len(text) >= NAME_BYTES_MAX:
            raise _MalformedError
        # In small steps: a fixed long read would miss a name near the end of the file.
        text += read(offset + len(text), 1)
    try:
        return text[: text.index(b"\0")].decode("ascii")
    except UnicodeDecodeError:
        raise _MalformedError from None


def _unpack(read: Read, form: str, offset: int) -> tuple[int, ...]:
    return struct.unpack(form, read(offset, struct.calcsize(form)))


def _note(read: Read, wanted: bytes, owner: bytes) -> bytes | None:
    shape, order, header = _opened(read)
    table, entry_bytes, count, names_index = header[5], header[10], header[11], header[12]
    if not count:  # stripped of its sections
        return None
    form = order + shape.section
    if count > SECTIONS_MAX or names_index >= count or entry_bytes != struct.calcsize(form):
        raise _MalformedError
    # name, type, flags, address, offset, size, link, info, alignment, size of entries: in both classes
    sections = [_unpack(read, form, table + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    for section in sections:
        if section[1] == SHT_NOTE and _string(read, names + section[0]).encode() == wanted:
            return _description(read(section[4], min(section[5], NOTE_BYTES_MAX)), order, section[8], owner)
    return None


def _description(data: bytes, order: str, alignment: int, owner: bytes) -> bytes:
    if len(data) < 12:
        raise _MalformedError
    owner_bytes, description_bytes, _ = struct.unpack(f"{order}III", data[:12])
    # NVIDIA's reader pads the owner as its section is aligned (nvidia-container-toolkit:
    # cmd/nvidia-cdi-hook/cudacompat/cuda-elf-header.go); with 4, the usual one, that is what the ABI says.
    padding = alignment if alignment in (1, 8) else 4
    start = 12 + -(-owner_bytes // padding) * padding
    if data[12 : 12 + owner_bytes].strip(b"\0") != owner or start + description_bytes > len(data):
        raise _MalformedError
    return data[start : start + description_bytes].strip(b"\0")
