"""Reading ELF files and their notes: what linkers made, and no more than a refusal of what is damaged."""

from __future__ import annotations

import io
import platform
import struct
from pathlib import Path

import pytest

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.compat_packages import NOTE_OWNER, NOTE_SECTION
from nri_gpu.driver.elf import Elf, MalformedError, parse_elf, parse_note, read_elf
from nri_gpu.driver.table import MACHINES
from tests.support import compat
from tests.support.elf_file import EM_386, EM_AARCH64, EM_X86_64, program, shared_library

CUDA = shared_library("libcuda.so.1")


def parsed(data: bytes) -> Elf | None:
    return parse_elf(io.BytesIO(data))


def damaged(offset: int, form: str, value: int) -> bytes:
    data = bytearray(CUDA)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


FILES = {
    "x86_64": (CUDA, Elf(64, EM_X86_64, "libcuda.so.1")),
    "aarch64": (shared_library("libcuda.so.1", machine=EM_AARCH64), Elf(64, EM_AARCH64, "libcuda.so.1")),
    "i386": (shared_library("libcuda.so.1", bits=32, machine=EM_386), Elf(32, EM_386, "libcuda.so.1")),
    "a name that is not ASCII": (CUDA.replace(b"libcuda", b"\xff" * 7), None),
    "without names": (shared_library(""), Elf(64, EM_X86_64)),
    "big-endian": (b"\x7fELF\2\2\1" + bytes(9) + struct.pack(">HHIQQQIHHHHHH", 3, 22, *[0] * 11), None),
    "a program": (program("/lib/ld.so"), Elf(64, EM_X86_64, interpreter="/lib/ld.so")),
    "a static program": (program("", bits=32, machine=EM_386), Elf(32, EM_386)),
    "an interpreter beyond the file": (program("/lib/ld.so")[:-1], None),
    "a name without an end": (shared_library("x" * 300), None),
    "program headers beyond every file": (damaged(32, "<Q", 2**64 - 1), None),
    "program headers of another size": (damaged(54, "<H", 1), None),
    "more program headers than any library has": (damaged(56, "<H", 65535), None),
    "dynamic section beyond every file": (damaged(64 + 56 + 8, "<Q", 2**63), None),
    "names in no loaded segment": (damaged(64 + 16, "<Q", 2**40), None),
}


@pytest.mark.parametrize(("data", "elf"), FILES.values(), ids=FILES)
def test_class_machine_and_soname_are_read_or_it_is_no_elf_file(data: bytes, elf: Elf | None) -> None:
    assert parsed(data) == elf


def test_reads_what_a_real_linker_made() -> None:
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so.6" in line}
    libc = read_elf(Path(loaded.pop()))
    assert libc is not None
    assert (libc.bits, libc.soname) == (64, "libc.so.6")
    python = read_elf(Path("/proc/self/exe"))
    assert python
    assert python.interpreter == MACHINES[platform.machine()].interpreter


def test_every_truncation_is_no_elf_file() -> None:
    # The last byte but the names' own is needed, so the only prefix that parses is the whole.
    assert [size for size in range(len(CUDA) + 1) if parsed(CUDA[:size]) is not None] == [len(CUDA)]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="no such file"):
        read_elf(tmp_path / "gone")
    with pytest.raises(DriverError, match="it is a folder"):
        read_elf(tmp_path)


SAID = compat.note("13.0", (535, 550, 570))


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = compat.make_package(tmp_path_factory.mktemp("compat") / "packages", "13.0", "580.65.06", SAID)
    return (folder / "libcuda.so.580.65.06").read_bytes()


def note(data: bytes, owner: str = NOTE_OWNER) -> bytes | None:
    return parse_note(io.BytesIO(data), NOTE_SECTION, owner)


def test_a_note_that_a_compiler_made(libcuda: bytes) -> None:
    assert note(libcuda) == SAID.encode()


def test_a_library_without_sections_or_without_such_a_one_has_no_note() -> None:
    assert note(shared_library("libcuda.so.1")) is None
    assert note(Path("/bin/sh").read_bytes()) is None


def test_somebody_elses_note_is_not_one(libcuda: bytes) -> None:
    with pytest.raises(MalformedError):
        note(libcuda, "Somebody")
    with pytest.raises(MalformedError):
        note(b"no ELF file")


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


# A file for ARM64 is longer than 64 KiB: its segments are aligned for the largest pages.
@pytest.mark.parametrize(
    ("offset", "form", "value"), [(40, "<Q", 2**40), (58, "<H", 0xFFFF), (60, "<H", 0xFFFF), (62, "<H", 0xFFFF)]
)
def test_a_section_table_that_is_nowhere(libcuda: bytes, offset: int, form: str, value: int) -> None:
    data = bytearray(libcuda)
    struct.pack_into(form, data, offset, value)
    with pytest.raises(MalformedError):
        note(bytes(data))
