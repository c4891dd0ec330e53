"""Loads device filters of a test's own into the kernel and attaches them to a cgroup, by bpf(2)."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# linux/bpf.h: enum bpf_cmd, BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE, BPF_F_ALLOW_MULTI.
LOAD, ATTACH, DETACH = 5, 8, 9
PROGRAM_TYPE, ATTACH_TYPE, MULTI = 15, 6, 2
SYSCALL: Final = {"x86_64": 321, "aarch64": 280}
LOG_BYTES: Final = 1 << 16
Words = tuple[int, int, int, int, int]  # of an instruction: opcode, target, source, offset, value

libc = ctypes.CDLL(None, use_errno=True)


def assembled(*instructions: Words) -> bytes:
    """Instructions in the kernel's encoding."""
    return b"".join(struct.pack("<BBhi", op, src << 4 | dst, off, imm) for op, dst, src, off, imm in instructions)


@contextmanager
def attached(cgroup: Path, code: bytes) -> Iterator[None]:
    """The program filters the devices of a cgroup, beside others there. Raises: OSError, with the verifier's log."""
    folder, program = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY), load(code)
    try:
        bpf(ATTACH, struct.pack("<4I", folder, program, ATTACH_TYPE, MULTI))
        try:
            yield
        finally:
            bpf(DETACH, struct.pack("<4I", folder, program, ATTACH_TYPE, 0))
    finally:
        os.close(program)
        os.close(folder)


def load(code: bytes) -> int:
    """A descriptor of the loaded program."""
    text, licence, log = (ctypes.create_string_buffer(each, len(each)) for each in (code, b"GPL\0", b"\0" * LOG_BYTES))
    places = [ctypes.addressof(each) for each in (text, licence)]
    attributes = struct.pack("<2I2Q2IQ", PROGRAM_TYPE, len(code) // 8, *places, 1, LOG_BYTES, ctypes.addressof(log))
    try:
        return bpf(LOAD, attributes)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {log.value.decode()}") from error


def bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, 120)
    result = int(libc.syscall(SYSCALL[platform.machine()], command, buffer, len(buffer)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
