"""What a device cgroup really lets through: asked of the kernel's own rules, or of the program it runs in their place.

On cgroup v2 the rules are an eBPF program that the runtime wrote; the kernel gives it back as instructions, and here
they are carried out. Source: Linux Documentation/bpf/standardization/instruction-set.rst, include/uapi/linux/bpf.h.
"""

import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from tests.support import packages
from tests.support.cgroup import Cgroup, device_programs, device_rules

# enum bpf_cgroup_dev_ctx: access in the upper half of its first word, kind of device in the lower.
CHARACTER, READ, WRITE = 2, 2, 4
LDX, ALU, JMP, JMP32, ALU64 = 1, 4, 5, 6, 7  # classes of instructions: opcode & 7
EXIT, ALWAYS = 0x90, 0x00
BY_REGISTER: Final = 0x08
WIDTHS: Final = {0x00: 4, 0x08: 2, 0x10: 1, 0x18: 8}  # bytes, by opcode & 0x18
MASKS: Final = {ALU: 0xFFFFFFFF, JMP32: 0xFFFFFFFF, ALU64: 0xFFFFFFFFFFFFFFFF, JMP: 0xFFFFFFFFFFFFFFFF}
COMPUTED: Final[Mapping[int, Callable[[int, int], int]]] = {
    0x00: lambda a, b: a + b,
    0x10: lambda a, b: a - b,
    0x40: lambda a, b: a | b,
    0x50: lambda a, b: a & b,
    0x60: lambda a, b: a << b,
    0x70: lambda a, b: a >> b,
    0xA0: lambda a, b: a ^ b,
    0xB0: lambda _, b: b,
}
JUMPED: Final[Mapping[int, Callable[[int, int], bool]]] = {
    0x10: lambda a, b: a == b,
    0x20: lambda a, b: a > b,
    0x30: lambda a, b: a >= b,
    0x40: lambda a, b: bool(a & b),
    0x50: lambda a, b: a != b,
    0xA0: lambda a, b: a < b,
    0xB0: lambda a, b: a <= b,
}


class Instruction(Struct, frozen=True):
    """One of eBPF's, eight bytes. offset: in instructions for a jump, in bytes for a load."""

    opcode: int
    target: int
    source: int
    offset: int
    value: int

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        opcode, registers, offset, value = struct.unpack("<BBhi", raw)
        return cls(opcode, registers & 15, registers >> 4, offset, value)


def open_minors(kind: Cgroup, cgroup: Path, major: int, minors: Iterable[int]) -> frozenset[int]:
    """Which of a major's character devices a container in that cgroup may open to read and write."""
    if kind is Cgroup.V1:
        rules = [rule for rule in device_rules(cgroup) if rule.kind in "ac" and {*"rw"} <= {*rule.access}]
        rules = [rule for rule in rules if rule.major in (major, None)]
        return frozenset(minor for minor in minors if any(rule.minor in (minor, None) for rule in rules))
    code = [program(number) for number in device_programs(cgroup)]
    asked = {minor: struct.pack("<III", (READ | WRITE) << 16 | CHARACTER, major, minor) for minor in minors}
    return frozenset(minor for minor, context in asked.items() if all(run(each, context) for each in code))


def program(number: int) -> tuple[Instruction, ...]:
    """A loaded program, by its id, as the kernel's verifier left it."""
    with tempfile.NamedTemporaryFile() as file:
        command: list[str | Path] = [packages.bpftool(), "prog", "dump", "xlated", "id", str(number), "file", file.name]
        subprocess.run(command, check=True, capture_output=True)
        raw = Path(file.name).read_bytes()
    return tuple(Instruction.parse(raw[at : at + 8]) for at in range(0, len(raw), 8))


def run(code: tuple[Instruction, ...], context: bytes) -> int:
    """What the program returns. Raises: KeyError for an instruction that no device filter needs."""
    registers, at = [0] * 11, 0  # the first argument, in register 1, is the context: address 0 here
    while True:
        each = code[at]
        at += 1
        group, operation = each.opcode & 7, each.opcode & 0xF0
        if group == LDX:
            begin = registers[each.source] + each.offset
            registers[each.target] = int.from_bytes(context[begin : begin + WIDTHS[each.opcode & 0x18]], "little")
            continue
        mask = MASKS[group]
        left = registers[each.target] & mask
        right = (registers[each.source] if each.opcode & BY_REGISTER else each.value) & mask
        if group in (ALU, ALU64):
            registers[each.target] = COMPUTED[operation](left, right) & mask
        elif operation == EXIT:
            return registers[0]
        elif operation == ALWAYS or JUMPED[operation](left, right):
            at += each.offset
