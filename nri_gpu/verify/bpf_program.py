"""An eBPF program that filters a cgroup's devices, carried out to answer what it would let through.

Such a program reads the three words of its context (include/uapi/linux/bpf.h: struct bpf_cgroup_dev_ctx), computes with
registers, and returns whether the device may be used. A program that does more, such as looking into a map, is not
judged. Source: Linux Documentation/bpf/standardization/instruction-set.rst.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import UnseenError

CHARACTER: Final = 2  # BPF_DEVCG_DEV_CHAR, in the lower half of the context's first word; the access is in the upper
READ, WRITE = 2, 4  # BPF_DEVCG_ACC_*
STEPS_MAX: Final = 100_000  # newer kernels allow loops
_BYTES: Final = 8  # of an instruction
_LD, _LDX, _ST, _ALU, _JMP, _JMP32, _ALU64 = 0, 1, 2, 4, 5, 6, 7  # classes: opcode & 7
_BY_REGISTER: Final = 0x08
_MEM, _MODE = 0x60, 0xE0
_LOAD_WIDE: Final = 0x18  # BPF_LD | BPF_IMM | BPF_DW: takes two instructions
_NO_SPECULATION: Final = 0xC2  # BPF_ST | BPF_NOSPEC: the verifier's own, does nothing
_WIDTHS: Final = {0x00: 4, 0x08: 2, 0x10: 1, 0x18: 8}  # bytes, by opcode & 0x18
_EXIT, _ALWAYS, _CALL, _NEGATE, _SIGNED_SHIFT, _END = 0x90, 0x00, 0x80, 0x80, 0xC0, 0xD0
_COMPUTED: Final[Mapping[int, Callable[[int, int], int]]] = {
    0x00: lambda a, b: a + b,
    0x10: lambda a, b: a - b,
    0x20: lambda a, b: a * b,
    0x30: lambda a, b: a // b if b else 0,
    0x40: lambda a, b: a | b,
    0x50: lambda a, b: a & b,
    0x60: lambda a, b: a << b,
    0x70: lambda a, b: a >> b,
    0x90: lambda a, b: a % b if b else a,
    0xA0: lambda a, b: a ^ b,
    0xB0: lambda _, b: b,
}
_SHIFTS: Final = frozenset({0x60, 0x70, _SIGNED_SHIFT})
_JUMPED: Final[Mapping[int, Callable[[int, int], bool]]] = {
    0x10: lambda a, b: a == b,
    0x20: lambda a, b: a > b,
    0x30: lambda a, b: a >= b,
    0x40: lambda a, b: bool(a & b),
    0x50: lambda a, b: a != b,
    0xA0: lambda a, b: a < b,
    0xB0: lambda a, b: a <= b,
}
_SIGNED_JUMPS: Final = {0x60: 0x20, 0x70: 0x30, 0xC0: 0xA0, 0xD0: 0xB0}  # to those that compare without a sign


class UnreadableProgramError(UnseenError):
    """A program that does what no plain device filter does. why: what, as a clause."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the eBPF program that filters its devices cannot be judged: {why}")


class Instruction(Struct, frozen=True):
    """An instruction of eBPF. offset: in instructions for a jump, in bytes for a load."""

    opcode: int
    target: int
    source: int
    offset: int
    value: int


Program = tuple[Instruction, ...]


def parse_program(raw: bytes) -> Program:
    """Parse the instructions as a little-endian kernel gives them. Raises: UnreadableProgramError."""
    if len(raw) % _BYTES or not raw:
        raise UnreadableProgramError(f"its {len(raw)} bytes are no whole instructions")
    parts = struct.iter_unpack("<BBhi", raw)
    return tuple(Instruction(opcode, regs & 15, regs >> 4, offset, value) for opcode, regs, offset, value in parts)


def lets_through(code: Program, access: int, major: int, minor: int) -> bool:
    """Return whether the program lets a character device be used. access: READ, WRITE or both.

    Raises: UnreadableProgramError.
    """
    context = struct.pack("<III", access << 16 | CHARACTER, major, minor)
    try:
        return _run(code, context) != 0
    except (KeyError, IndexError) as error:
        raise UnreadableProgramError(f"it has an instruction that no device filter needs ({error})") from error


def _run(code: Program, context: bytes) -> int:
    """Run the program and return its result. Register 1 holds the context's address, which is 0 here.

    Raises: KeyError, IndexError.
    """
    registers, at = [0] * 11, 0
    for _ in range(STEPS_MAX):
        if at < 0:
            break  # Python would count from the end
        each = code[at]
        at += 1
        kind = each.opcode & 7
        if kind in (_ALU, _ALU64):
            registers[each.target] = _compute(each, registers)
        elif kind in (_JMP, _JMP32):
            operation = each.opcode & 0xF0
            if operation == _EXIT:
                return registers[0] & 0xFFFFFFFF
            if operation == _CALL:
                raise UnreadableProgramError("it calls a function of the kernel")
            if operation == _ALWAYS:
                at += each.offset if kind == _JMP else each.value
            elif _jumps(each, registers):
                at += each.offset
        elif kind == _LDX:
            registers[each.target] = _load(each, registers[each.source], context)
        elif each.opcode == _LOAD_WIDE and not each.source:
            registers[each.target] = each.value & 0xFFFFFFFF | (code[at].value & 0xFFFFFFFF) << 32
            at += 1
        elif each.opcode != _NO_SPECULATION:
            raise UnreadableProgramError("it uses memory or maps")
    raise UnreadableProgramError(f"it leads nowhere, or takes more than {STEPS_MAX} steps")


def _load(each: Instruction, base: int, context: bytes) -> int:
    begin, width = base + each.offset, _WIDTHS[each.opcode & 0x18]
    if each.opcode & _MODE != _MEM or begin < 0 or begin + width > len(context):
        raise UnreadableProgramError("it reads more than the device's numbers")
    return int.from_bytes(context[begin : begin + width], "little")


def _operands(each: Instruction, registers: list[int], bits: int) -> tuple[int, int]:
    mask = (1 << bits) - 1
    right = registers[each.source] if each.opcode & _BY_REGISTER else each.value
    return registers[each.target] & mask, right & mask


def _compute(each: Instruction, registers: list[int]) -> int:
    bits = 64 if each.opcode & 7 == _ALU64 else 32
    mask, operation = (1 << bits) - 1, each.opcode & 0xF0
    left, right = _operands(each, registers, bits)
    if each.offset or operation == _END:  # signed division, moves that extend the sign, byte swaps
        raise UnreadableProgramError("it computes with signs or swaps bytes")
    if operation == _NEGATE:
        return -left & mask
    if operation in _SHIFTS:
        right &= bits - 1
    if operation == _SIGNED_SHIFT:
        return _signed(left, bits) >> right & mask
    return _COMPUTED[operation](left, right) & mask


def _jumps(each: Instruction, registers: list[int]) -> bool:
    bits, operation = 64 if each.opcode & 7 == _JMP else 32, each.opcode & 0xF0
    left, right = _operands(each, registers, bits)
    if operation in _SIGNED_JUMPS:
        left, right, operation = _signed(left, bits), _signed(right, bits), _SIGNED_JUMPS[operation]
    return _JUMPED[operation](left, right)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
