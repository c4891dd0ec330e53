"""Write the smallest shared library that a loader accepts: no code, but a SONAME. Needs no compiler.

Source: System V ABI, chapters "Object Files" and "Dynamic Linking"; elf(5).
"""

import struct
from typing import Final

EM_386, EM_X86_64, EM_AARCH64 = 3, 62, 183
ET_DYN: Final = 3
PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_GNU_STACK = 1, 2, 3, 0x6474E551
READ_WRITE: Final = 6  # writable, because older loaders relocate the dynamic section in place
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 0, 4, 5, 6, 10, 11, 14
PAGE: Final = 0x10000  # the largest of ARM64: a loader refuses what is aligned for smaller ones than its kernel has
# One bucket, one chain, both empty: a hash table over the one symbol that stands for none.
EMPTY_HASH: Final = struct.pack("<4I", 1, 1, 0, 0)


def shared_library(soname: str, *, bits: int = 64, machine: int = EM_X86_64) -> bytes:
    """A library that is loaded at address 0 of its own, whole, by one segment. soname: empty for none."""
    header_bytes, program_bytes, entry_bytes, symbol_bytes = (64, 56, 16, 24) if bits == 64 else (52, 32, 8, 16)
    strings = b"\0" + (soname.encode() + b"\0" if soname else b"")
    dynamic_at = header_bytes + 3 * program_bytes
    tags = 6 + bool(soname)
    symbols_at = dynamic_at + tags * entry_bytes
    hash_at = symbols_at + symbol_bytes
    strings_at = hash_at + len(EMPTY_HASH)
    size = strings_at + len(strings)
    dynamic = [(DT_SONAME, 1)] * bool(soname)  # its offset in the strings
    dynamic += [(DT_HASH, hash_at), (DT_STRTAB, strings_at), (DT_SYMTAB, symbols_at)]
    dynamic += [(DT_STRSZ, len(strings)), (DT_SYMENT, symbol_bytes), (DT_NULL, 0)]
    programs = [
        _program(bits, PT_LOAD, 0, size, PAGE),
        _program(bits, PT_DYNAMIC, dynamic_at, tags * entry_bytes, 8),
        _program(bits, PT_GNU_STACK, 0, 0, 16),  # without it a loader asks for an executable stack
    ]
    entries = b"".join(struct.pack("<qQ" if bits == 64 else "<iI", *entry) for entry in dynamic)
    return _header(bits, machine) + b"".join(programs) + entries + bytes(symbol_bytes) + EMPTY_HASH + strings


def program(interpreter: str, *, bits: int = 64, machine: int = EM_X86_64) -> bytes:
    """The head of a program that the kernel starts by this loader; empty: of a static one. It cannot be run."""
    header_bytes, program_bytes = (64, 56) if bits == 64 else (52, 32)
    path = interpreter.encode() + b"\0" if interpreter else b""
    found = [_program(bits, PT_INTERP, header_bytes + program_bytes, len(path), 1)] * bool(path)
    return _header(bits, machine, len(found)) + b"".join(found) + path


def _header(bits: int, machine: int, programs: int = 3) -> bytes:
    ident = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1, 1]) + bytes(9)
    form, header_bytes, program_bytes = ("<HHIQQQIHHHHHH", 64, 56) if bits == 64 else ("<HHIIIIIHHHHHH", 52, 32)
    return ident + struct.pack(
        form, ET_DYN, machine, 1, 0, header_bytes, 0, 0, header_bytes, program_bytes, programs, 0, 0, 0
    )


def _program(bits: int, kind: int, offset: int, size: int, align: int) -> bytes:
    if bits == 64:
        return struct.pack("<IIQQQQQQ", kind, READ_WRITE, offset, offset, offset, size, size, align)
    return struct.pack("<8I", kind, offset, offset, offset, size, size, READ_WRITE, align)
