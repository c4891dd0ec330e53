"""The reader of an ELF file's class, machine, interpreter, SONAME and notes: a few KiB of it, never all.

It accepts all bytes: for a file that is no ELF file of a little-endian machine, or is cut short, the result is None
and not an exception.
Source: elf(5); System V ABI, chapters "Object Files" (sections, notes) and "Dynamic Linking".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from msgspec import Struct

from nri_gpu.domain.errors import DriverError, cause_of

EM_386: Final = 3
EM_X86_64: Final = 62
EM_AARCH64: Final = 183

MAGIC: Final = b"\x7fELF"
ELFDATA2LSB: Final = 1
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NULL, DT_STRTAB, DT_SONAME = 0, 5, 14
SHT_NOTE: Final = 7

# A library has about ten program headers and forty dynamic entries. Bounds keep a hostile file from making us read or
# loop for long.
PROGRAM_HEADERS_MAX: Final = 1024
PATH_BYTES_MAX: Final = 4096  # PATH_MAX of linux/limits.h
DYNAMIC_BYTES_MAX: Final = 64 * 1024
NAME_BYTES_MAX: Final = 256  # NAME_MAX of linux/limits.h and the NUL
SECTIONS_MAX: Final = 1024  # a library has about thirty
NOTE_BYTES_MAX: Final = 64 * 1024


class MalformedError(Exception):
    """A file that is not ELF, points past its own end, or has a note that is incomplete or another owner's."""


class Elf(Struct, frozen=True):
    """The identity of an ELF file."""

    bits: int  # 32 or 64
    machine: int  # e_machine
    soname: str = ""  # empty if there is none
    interpreter: str = ""  # the loader that the kernel starts a program with; empty for a static program


class _Shape(Struct, frozen=True):
    """The layouts of one class's structures. segment: which fields are offset, address and size in the file."""

    bits: int
    header: str
    program: str
    dynamic: str
    segment: tuple[int, int, int]
    section: str


SHAPES: Final = {
    1: _Shape(32, "<HHIIIIIHHHHHH", "<IIIIIIII", "<iI", (1, 2, 4), "<10I"),
    2: _Shape(64, "<HHIQQQIHHHHHH", "<IIQQQQQQ", "<qQ", (2, 3, 5), "<IIQQQQIIQQ"),
}


class _Segment(Struct, frozen=True):
    kind: int
    offset: int
    address: int
    size_bytes: int


def read_elf(path: Path) -> Elf | None:
    """Return the identity of the file at `path`, or None if it is not a complete ELF file.

    Raises: DriverError, if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return parse_elf(file)
    except OSError as error:
        raise DriverError(f"{path} cannot be read: {cause_of(error)}") from error


def claims_to_be_elf(path: Path) -> bool:
    """Return whether the file begins as an ELF file does, complete or not. Raises: OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parse_elf(file: BinaryIO) -> Elf | None:
    """Return the identity of an open file, whatever its bytes, or None if it is not a complete ELF file."""
    try:
        elf = _ElfFile(file)
        segments = list(_segments(elf))
        return Elf(elf.shape.bits, elf.header[1], _soname(elf, segments), _interpreter(elf, segments))
    except MalformedError:
        return None


def parse_note(file: BinaryIO, section: str, owner: str) -> bytes | None:
    """Return the text of the first note in a section, without the NULs around it, or None if there is no such section.

    Raises: MalformedError.
    """
    elf = _ElfFile(file)
    table, entry_bytes, count, names_index = elf.header[5], elf.header[10], elf.header[11], elf.header[12]
    if not count:  # stripped of its sections
        return None
    form = elf.shape.section
    if count > SECTIONS_MAX or names_index >= count or entry_bytes != struct.calcsize(form):
        raise MalformedError
    # name, type, flags, address, offset, size, link, info, alignment, size of entries: in both classes
    sections = [elf.unpack(form, table + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    for found in sections:
        if found[1] == SHT_NOTE and elf.string(names + found[0]) == section:
            return _description(elf.read(found[4], min(found[5], NOTE_BYTES_MAX)), found[8], owner.encode())
    return None


class _ElfFile:
    """An open ELF file. header: its fields behind the first sixteen bytes. Every method raises MalformedError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = file.seek(0, 2)
        ident = self.read(0, 16)
        shape = SHAPES.get(ident[4])
        if not ident.startswith(MAGIC) or shape is None or ident[5] != ELFDATA2LSB:
            raise MalformedError
        self.shape = shape
        self.header = self.unpack(shape.header, 16)

    def read(self, offset: int, size: int) -> bytes:
        if offset + size > self._end:
            raise MalformedError
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:  # the file shrank meanwhile
            raise MalformedError
        return data

    def unpack(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack(form, self.read(offset, struct.calcsize(form)))

    def string(self, offset: int) -> str:
        text = b""
        while b"\0" not in text:
            if len(text) >= NAME_BYTES_MAX:
                raise MalformedError
            # In small steps: a fixed long read would miss a name near the end of the file.
            text += self.read(offset + len(text), 1)
        try:
            return text[: text.index(b"\0")].decode("ascii")
        except UnicodeDecodeError:
            raise MalformedError from None


def _interpreter(elf: _ElfFile, segments: list[_Segment]) -> str:
    found = next((segment for segment in segments if segment.kind == PT_INTERP), None)
    path = elf.read(found.offset, min(found.size_bytes, PATH_BYTES_MAX)) if found else b""
    return path.partition(b"\0")[0].decode("ascii", errors="replace")


def _soname(elf: _ElfFile, segments: list[_Segment]) -> str:
    dynamic = next((segment for segment in segments if segment.kind == PT_DYNAMIC), None)
    if dynamic is None:  # a static program, an object file
        return ""
    entries = dict(_entries(elf, dynamic))
    if DT_STRTAB not in entries or DT_SONAME not in entries:
        return ""
    return elf.string(_file_offset(segments, entries[DT_STRTAB]) + entries[DT_SONAME])


def _segments(elf: _ElfFile) -> Iterator[_Segment]:
    table, entry_bytes, count = elf.header[4], elf.header[8], elf.header[9]
    if count and (count > PROGRAM_HEADERS_MAX or entry_bytes != struct.calcsize(elf.shape.program)):
        raise MalformedError
    at, address, size = elf.shape.segment
    for i in range(count):
        fields = elf.unpack(elf.shape.program, table + i * entry_bytes)
        yield _Segment(fields[0], fields[at], fields[address], fields[size])


def _entries(elf: _ElfFile, dynamic: _Segment) -> Iterator[tuple[int, int]]:
    data = elf.read(dynamic.offset, min(dynamic.size_bytes, DYNAMIC_BYTES_MAX))
    whole = len(data) - len(data) % struct.calcsize(elf.shape.dynamic)
    for tag, value in struct.iter_unpack(elf.shape.dynamic, data[:whole]):
        if tag == DT_NULL:
            return
        yield tag, value


def _file_offset(segments: list[_Segment], address: int) -> int:
    # Dynamic entries hold addresses; the segment that is loaded around one says where that is in the file.
    for segment in segments:
        if segment.kind == PT_LOAD and segment.address <= address < segment.address + segment.size_bytes:
            return segment.offset + address - segment.address
    raise MalformedError


def _description(data: bytes, alignment: int, owner: bytes) -> bytes:
    if len(data) < 12:
        raise MalformedError
    owner_bytes, description_bytes, _ = struct.unpack("<III", data[:12])
    # NVIDIA's reader pads the owner as its section is aligned (nvidia-container-toolkit:
    # cmd/nvidia-cdi-hook/cudacompat/cuda-elf-header.go); with 4, the usual one, that is what the ABI says.
    padding = alignment if alignment in (1, 8) else 4
    start = 12 + -(-owner_bytes // padding) * padding
    if data[12 : 12 + owner_bytes].strip(b"\0") != owner or start + description_bytes > len(data):
        raise MalformedError
    return data[start : start + description_bytes].strip(b"\0")
