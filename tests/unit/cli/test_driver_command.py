"""`nri-gpu driver`: files and CUDA compatibility packages, for people and for programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from tests.support import compat
from tests.support.driver_root import make_driver_root, put_libraries
from tests.unit.cli.conftest import NriGpuCall

V, NEWER = "580.95.05", "600.10.01"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_driver_root(tmp_path / "root", V, everything=True)


def test_drivers_that_are_not_used_are_named(root: Path, nri_gpu: NriGpuCall) -> None:
    put_libraries(root, "usr/lib", "470.256.02")
    done = nri_gpu("driver", "--driver-root", root)
    assert done.code == Exit.OK
    assert "\nother drivers, not used: " in done.out
    assert done.out.endswith("\n  470.256.02 in usr/lib\n")


def test_folders_of_the_policy(root: Path, tmp_path: Path, nri_gpu: NriGpuCall) -> None:
    (root / "lib64").rename(root / "odd")
    policy = tmp_path / "policy.toml"
    policy.write_text('[driver]\nlibrary_dirs = ["/odd"]\n')
    done = nri_gpu("driver", "--driver-root", root)
    assert done.code == Exit.UNAVAILABLE
    assert f"{root}/usr/lib64" in done.err
    done = nri_gpu("driver", "--policy", policy, "--driver-root", root)
    assert done.code == Exit.OK
    assert f"odd/libcuda.so.{V}" in done.out


def test_compatibility_packages(root: Path, tmp_path: Path, nri_gpu: NriGpuCall) -> None:
    packages, policy = tmp_path / "packages", tmp_path / "policy.toml"
    compat.make_package(packages, "14.0", NEWER, compat.note("14.0", (550, 580)))
    compat.make_package(packages, "14.1", "610.10.01", compat.note("14.1", (550,)))
    policy.write_text(f'[compat]\ndir = "{packages}"\n')
    options = ("driver", "--policy", policy, "--driver-root", root)
    done = nri_gpu(*options)
    assert done.code == Exit.OK
    assert f"  CUDA 14.0   libcuda {NEWER}, for drivers 550, 580\n" in done.out
    assert (
        "  CUDA 14.1   libcuda 610.10.01, for drivers 550; NOT on this one: it is not made for driver 580" in done.out
    )
    found = nri_gpu(*options, "-o", "json").document["compat"]
    keys = ("cuda", "version", "drivers", "not_with_this_driver")
    assert [tuple(each[key] for key in keys) for each in found["packages"]] == [
        ("14.0", NEWER, [550, 580], ""),
        ("14.1", "610.10.01", [550], "it is not made for driver 580"),
    ]
    assert found["left_out"] == []
    (packages / "14.1").rename(packages / "15.0")
    done = nri_gpu(*options)
    assert done.code == Exit.FINDING
    assert "\n  15.0: its libcuda is for CUDA 14.1, which the folder is not named for" in done.out
    packages.rename(tmp_path / "elsewhere")
    done = nri_gpu(*options)
    assert done.code == Exit.UNAVAILABLE
    assert f"compatibility packages in {packages} cannot be read" in done.err
