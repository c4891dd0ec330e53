"""What a device cgroup lets through, as `nri-gpu verify` judges it.

tests/conformance/test_verify_kernel.py holds that against what the kernel itself lets a process open.
"""

from collections.abc import Iterable
from pathlib import Path

from nri_gpu.verify import bpf
from nri_gpu.verify.bpf_program import READ, WRITE, parse_program
from nri_gpu.verify.in_kernel import DeviceFilter
from tests.support.cgroup import Cgroup, device_rules


def open_minors(kind: Cgroup, cgroup: Path, major: int, minors: Iterable[int]) -> frozenset[int]:
    """Which of a major's character devices a container in that cgroup may open to read and write."""
    if kind is Cgroup.V1:
        found = DeviceFilter(tuple(device_rules(cgroup)))
    else:
        programs = bpf.effective_programs(cgroup)
        found = DeviceFilter(programs=tuple(parse_program(bpf.instructions(number)) for number in programs))
    return frozenset(minor for minor in minors if found.lets_through(READ | WRITE, (major, minor)))
