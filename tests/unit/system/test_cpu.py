"""Whether loaders look into the hwcaps folders: by the CPU's flags, and not where nobody tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.node import Loader
from nri_gpu.system.cpu import V2_FLAGS, loader_fault, why_no_hwcaps

KVM64 = "fpu de pse tsc msr cx8 apic sep mmx fxsr sse sse2 ht syscall nx lm pni cx16 x2apic hypervisor lahf_lm"


def cpuinfo(tmp_path: Path, *flags: str) -> Path:
    """A made-up file of CPUs with these flags each."""
    each = (f"processor\t: {number}\nflags\t\t: {text}\nvmx flags\t: vnmi\n\n" for number, text in enumerate(flags))
    (tmp_path / "cpuinfo").write_text("".join(each))
    return tmp_path / "cpuinfo"


def test_a_cpu_that_lacks_a_flag_is_named_with_it(tmp_path: Path) -> None:
    file = cpuinfo(tmp_path, KVM64, KVM64)
    said = "its CPU is no x86-64-v2, since it lacks popcnt, sse4_1, sse4_2, ssse3"
    assert why_no_hwcaps(file, "x86_64") == said
    assert why_no_hwcaps(cpuinfo(tmp_path, " ".join((KVM64, *V2_FLAGS))), "x86_64") == ""


@pytest.mark.parametrize("flag", V2_FLAGS)
def test_each_flag_counts(tmp_path: Path, flag: str) -> None:
    file = cpuinfo(tmp_path, " ".join(each for each in V2_FLAGS if each != flag))
    assert why_no_hwcaps(file, "x86_64").endswith(f"lacks {flag}")


def test_without_flags_a_cpu_counts_as_one_of_today_and_another_machine_has_none(tmp_path: Path) -> None:
    assert why_no_hwcaps(tmp_path / "none", "x86_64") == ""
    assert why_no_hwcaps(cpuinfo(tmp_path), "x86_64") == ""
    assert why_no_hwcaps(tmp_path / "none", "aarch64") == "it is aarch64, for which glibc has no such levels"


def test_only_a_loader_that_needs_them_is_a_finding(tmp_path: Path, on_x86_64: None) -> None:
    file = cpuinfo(tmp_path, KVM64)
    assert {each for each in Loader if loader_fault(each, file)} == {Loader.HWCAPS}
    assert loader_fault(Loader.HWCAPS, file).startswith(
        'driver.loader = "hwcaps" has no effect on this machine: its CPU'
    )
