"""Device filters of every shape in the real kernel: what it lets a process open is what `verify` says it would."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from nri_gpu.verify.bpf_program import READ, WRITE
from nri_gpu.verify.in_kernel import Kernel
from tests.support.bpf import Words, assembled, attached

pytestmark = pytest.mark.containerd  # as root

NUMBERS: Final = [(major, minor) for major in (195, 511) for minor in (0, 1, 254)]
ACCESS: Final = {READ: os.O_RDONLY, WRITE: os.O_WRONLY, READ | WRITE: os.O_RDWR}
OPENER: Final = """
import json, os, sys
for line in sys.stdin:
    answers = []
    for path, flags in json.loads(line):
        try:
            os.close(os.open(path, flags))
            answers.append(0)
        except OSError as error:
            answers.append(error.errno)
    print(json.dumps(answers), flush=True)
"""
MKNOD: Final = 1
MOV, EXIT = 0xB4, (0x95, 0, 0, 0, 0)


class Opener:
    """A process in a cgroup v2 of its own, which opens device nodes there."""

    def __init__(self, base: Path, cgroup: Path) -> None:
        self.cgroup = cgroup
        self.nodes = [base / f"{major}-{minor}" for major, minor in NUMBERS]
        for path, number in zip(self.nodes, NUMBERS, strict=True):
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*number))
        command = [sys.executable, "-c", OPENER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        (cgroup / "cgroup.procs").write_text(str(self.process.pid))

    def opened(self) -> list[bool]:
        """By the kernel's word: each number, with each access."""
        asked = [(str(path), flags) for path in self.nodes for flags in ACCESS.values()]
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answers = json.loads(self.process.stdout.readline())
        assert {*answers} <= {errno.EPERM, errno.ENXIO}  # nobody serves these numbers
        return [answer == errno.ENXIO for answer in answers]

    def said(self) -> list[bool]:
        """By `verify`'s."""
        found = Kernel().device_filter(self.process.pid, self.cgroup.name)
        return [found.lets_through(access, number) for number in NUMBERS for access in ACCESS]


@pytest.fixture(scope="module")
def opener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    root = next(Path(each.place) for each in Kernel().mounts if each.kind == "cgroup2")
    cgroup = Path(tempfile.mkdtemp(prefix="nri-gpu-test-", dir=root))
    try:
        made = Opener(tmp_path_factory.mktemp("nodes"), cgroup)
        with made.process:
            yield made
            made.process.kill()
    finally:
        cgroup.rmdir()


class Filter(Struct, frozen=True):
    """A rule: what it names is let through, or not. None: any."""

    major: int | None
    minor: int | None
    access: int
    allow: bool


FILTERS = st.builds(
    Filter,
    st.sampled_from([None, 195, 511]),
    st.sampled_from([None, 0, 1, 254]),
    st.sampled_from([READ, WRITE, READ | WRITE, READ | WRITE | MKNOD]),
    st.booleans(),
)


def compiled(rules: Sequence[Filter], *, otherwise: bool, narrow: bool, wide: bool) -> bytes:
    """The rules, the first that fits holds. narrow: half words are loaded. wide: with 64 bits, tests by register."""
    jump, mask, move = (0x55, 0x57, 0xBF) if wide else (0x56, 0x54, 0xBC)
    code: list[Words] = [
        *([(0x69, 2, 1, 0, 0), (0x69, 3, 1, 2, 0)] if narrow else []),
        *([] if narrow else [(0x61, 2, 1, 0, 0), (0x54, 2, 0, 0, 0xFFFF), (0x61, 3, 1, 0, 0), (0x74, 3, 0, 0, 16)]),
        (0x61, 4, 1, 4, 0),
        (0x61, 5, 1, 8, 0),
    ]
    for rule in rules:
        body: list[Words] = [(jump, 2, 0, 0, 2)]  # a character device
        body += [(move, 6, 3, 0, 0), (mask, 6, 0, 0, rule.access), (jump | 8, 6, 3, 0, 0)]  # and no other access
        if rule.major is not None:
            body.append((jump, 4, 0, 0, rule.major))
        if rule.minor is not None:
            body.append((jump, 5, 0, 0, rule.minor))
        body += [(MOV, 0, 0, 0, int(rule.allow)), EXIT]
        past = len(body)
        code += [
            (op, dst, src, past - at - 1 if op in (jump, jump | 8) else off, imm)
            for at, (op, dst, src, off, imm) in enumerate(body)
        ]
    return assembled(*code, (MOV, 0, 0, 0, int(otherwise)), EXIT)


@settings(max_examples=60, deadline=None)
@given(st.lists(FILTERS, max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_one_filter(opener: Opener, rules: list[Filter], otherwise: bool, narrow: bool, wide: bool) -> None:
    with attached(opener.cgroup, compiled(rules, otherwise=otherwise, narrow=narrow, wide=wide)):
        assert opener.said() == opener.opened()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(FILTERS, min_size=1, max_size=3), min_size=2, max_size=3))
def test_several_filters_of_a_cgroup(opener: Opener, programs: list[list[Filter]]) -> None:
    with ExitStack() as stack:
        for rules in programs:
            stack.enter_context(attached(opener.cgroup, compiled(rules, otherwise=True, narrow=False, wide=False)))
        assert opener.said() == opener.opened()


def test_no_filter(opener: Opener) -> None:
    assert opener.said() == opener.opened() == [True] * len(NUMBERS) * len(ACCESS)
