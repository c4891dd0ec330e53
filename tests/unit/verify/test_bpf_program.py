"""eBPF device filters, carried out: written here in the kernel's own encoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.verify.bpf_program import READ, STEPS_MAX, WRITE, UnreadableProgramError, lets_through, parse_program
from tests.support.bpf import Words, assembled

EXIT = (0x95, 0, 0, 0, 0)
NUMBERS = st.integers(0, 2**32 - 1)
LOADED = [  # what every device filter begins with: type in r2, access in r3, major in r4, minor in r5
    (0x61, 2, 1, 0, 0),
    (0x54, 2, 0, 0, 0xFFFF),
    (0x61, 3, 1, 0, 0),
    (0x74, 3, 0, 0, 16),
    (0x61, 4, 1, 4, 0),
    (0x61, 5, 1, 8, 0),
]


def judged(*instructions: Words, access: int = READ | WRITE, number: tuple[int, int]) -> bool:
    return lets_through(parse_program(assembled(*instructions)), access, *number)


def returned(*instructions: Words) -> bool:
    return judged(*instructions, EXIT, number=(195, 1))


ONE_DEVICE = (
    *LOADED,
    (0x55, 2, 0, 6, 2),  # not a character device: to the end
    (0xBC, 1, 3, 0, 0),  # r1 = access
    (0x54, 1, 0, 0, 6),  # without mknod
    (0x5D, 1, 3, 3, 0),  # more than read and write: to the end
    (0x55, 4, 0, 2, 195),
    (0x55, 5, 0, 1, 1),
    (0x05, 0, 0, 2, 0),
    (0xB4, 0, 0, 0, 0),
    EXIT,
    (0xB4, 0, 0, 0, 1),
    EXIT,
)


@given(NUMBERS, NUMBERS, st.integers(1, 7))
def test_a_rule_for_one_device(major: int, minor: int, access: int) -> None:
    """As runc writes `c 195:1 rw`."""
    assert judged(*ONE_DEVICE, access=READ | WRITE, number=(195, 1))
    expected = (major, minor) == (195, 1) and not access & 1
    assert judged(*ONE_DEVICE, access=access, number=(major, minor)) is expected


@pytest.mark.parametrize(
    ("opcode", "left", "right", "expected"),
    [
        (0x04, -1, 1, 0),  # 32 bits wrap
        (0x14, 3, 3, 0),
        (0x14, 0, 1, 0xFFFFFFFF),
        (0x24, 3, 5, 15),
        (0x34, 7, 2, 3),
        (0x34, 7, 0, 0),
        (0x44, 5, 2, 7),
        (0x54, 5, 4, 4),
        (0x64, 1, 33, 2),  # a shift takes its operand modulo the width
        (0x74, 8, 2, 2),
        (0x84, 1, 0, 0xFFFFFFFF),
        (0x94, 7, 4, 3),
        (0x94, 7, 0, 7),
        (0xA4, 5, 1, 4),
        (0xB4, 9, 4, 4),
        (0xC4, -8, 1, 0xFFFFFFFC),
    ],
)
def test_arithmetic_is_the_kernels_of_32_bits(opcode: int, left: int, right: int, expected: int) -> None:
    signed = expected - 2**32 if expected >> 31 else expected
    for by_register in (0, 8):
        operand = (opcode | by_register, 0, 2, 0, 0 if by_register else right)
        program = ((0xB4, 0, 0, 0, left), (0xB4, 2, 0, 0, right), operand, (0x16, 0, 0, 2, signed))
        assert returned(*program, (0xB4, 0, 0, 0, 0), EXIT, (0xB4, 0, 0, 0, 1))


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1), st.sampled_from([0x05, 0x06]))
def test_comparisons_are_the_kernels_of_both_widths(left: int, right: int, kind: int) -> None:
    bits = 64 if kind == 0x05 else 32
    a, b = left & (1 << bits) - 1, right & (1 << bits) - 1
    expected = {
        0x10: a == b,
        0x20: a > b,
        0x30: a >= b,
        0x40: bool(a & b),
        0x50: a != b,
        0x60: left > right,
        0x70: left >= right,
        0xA0: a < b,
        0xB0: a <= b,
        0xC0: left < right,
        0xD0: left <= right,
    }
    for operation, holds in expected.items():
        jump = (operation | kind, 3, 0, 1, right)
        made = ((0xB7, 3, 0, 0, left), (0xB4, 0, 0, 0, 1), jump, (0xB4, 0, 0, 0, 0))
        assert returned(*made) is holds, hex(operation)


def test_wide_constants_and_long_jumps() -> None:
    wide = ((0x18, 3, 0, 0, 5), (0, 0, 0, 0, 1))
    assert returned(*wide, (0x77, 3, 0, 0, 32), (0xBF, 0, 3, 0, 0))
    assert returned((0xC2, 0, 0, 0, 0), (0xB4, 0, 0, 0, 1), (0x06, 0, 0, 0, 1), (0xB4, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ([(0x85, 0, 0, 0, 1)], "calls a function"),
        ([(0x18, 1, 1, 0, 3), (0, 0, 0, 0, 0)], "maps"),
        ([(0x7B, 10, 1, -8, 0)], "memory"),
        ([(0x61, 0, 1, 12, 0)], "reads more than"),
        ([(0x61, 0, 1, -4, 0)], "reads more than"),
        ([(0x81, 0, 1, 0, 0)], "reads more than"),  # a load that extends the sign
        ([(0x05, 0, 0, -1, 0)], f"more than {STEPS_MAX} steps"),
        ([(0x05, 0, 0, -5, 0)], "leads nowhere"),
        ([(0xDC, 0, 0, 0, 16)], "swaps bytes"),
        ([(0x3C, 0, 2, 1, 0)], "with signs"),
        ([(0xB4, 0, 0, 0, 1)], "no device filter needs"),  # runs off its end
        ([(0xE5, 0, 0, 0, 1)], "no device filter needs"),
    ],
)
def test_what_no_device_filter_does_is_not_judged(program: list[Words], why: str) -> None:
    with pytest.raises(UnreadableProgramError, match=why):
        judged(*program, number=(195, 0))


@pytest.mark.parametrize("raw", [b"", b"1234567", b"123456789"])
def test_what_is_no_program(raw: bytes) -> None:
    with pytest.raises(UnreadableProgramError, match="no whole instructions"):
        parse_program(raw)
