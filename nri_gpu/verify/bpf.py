"""bpf(2), by ctypes: the programs that filter the devices of a cgroup, and their instructions. Source: linux/bpf.h."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path
from typing import Final

# enum bpf_cmd, enum bpf_attach_type, and a flag of BPF_PROG_QUERY.
_PROG_GET_FD_BY_ID, _OBJ_GET_INFO_BY_FD, _PROG_QUERY = 13, 15, 16
_CGROUP_DEVICE: Final = 6
_QUERY_EFFECTIVE: Final = 1
_NUMBERS: Final = {"x86_64": 321, "aarch64": 280, "ppc64le": 361}  # of the system call, asm/unistd.h
_ATTR_BYTES: Final = 64
_INFO: Final = struct.Struct("<4I 2I 2Q")  # struct bpf_prog_info: type, id, tag, 2 lengths, 2 addresses
_PROGRAMS_MAX: Final = 256  # the kernel attaches at most 64 to one cgroup

_libc = ctypes.CDLL(None, use_errno=True)


def effective_programs(cgroup: Path) -> tuple[int, ...]:
    """Return the ids of all programs that a device has to pass.

    They are the cgroup's own and, as they were attached, its ancestors'.

    Raises: OSError: no permission, no such cgroup, or a kernel without them.
    """
    descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ids = (ctypes.c_uint32 * _PROGRAMS_MAX)()
        head = struct.pack("<4I", descriptor, _CGROUP_DEVICE, _QUERY_EFFECTIVE, 0)
        _, answer = _bpf(_PROG_QUERY, head + struct.pack("<QI", ctypes.addressof(ids), _PROGRAMS_MAX))
    finally:
        os.close(descriptor)
    (count,) = struct.unpack_from("<I", answer, 24)
    return tuple(ids[:count])


def instructions(program: int) -> bytes:
    """Return a loaded program as the kernel's verifier left it, or empty if the kernel hides it. Raises: OSError."""
    descriptor, _ = _bpf(_PROG_GET_FD_BY_ID, struct.pack("<I", program))
    try:
        length = _info(descriptor, 0, 0)[0]
        if not length:
            return b""
        code = ctypes.create_string_buffer(length)
        length, address = _info(descriptor, length, ctypes.addressof(code))
        return code.raw[:length] if address else b""
    finally:
        os.close(descriptor)


def _info(descriptor: int, length: int, address: int) -> tuple[int, int]:
    """Return the bytes of the program's instructions, and the address that they were written to."""
    info = ctypes.create_string_buffer(_INFO.pack(0, 0, 0, 0, 0, length, 0, address), _INFO.size)
    _bpf(_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", descriptor, _INFO.size, ctypes.addressof(info)))
    fields = _INFO.unpack(info.raw)
    return fields[5], fields[7]


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Call bpf(2). Return its result, and the attributes as the kernel left them. Raises: OSError."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(f"nri-gpu does not know bpf(2) on {platform.machine()}")
    buffer = ctypes.create_string_buffer(attributes, _ATTR_BYTES)
    result = int(_libc.syscall(number, command, buffer, _ATTR_BYTES))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result, buffer.raw
