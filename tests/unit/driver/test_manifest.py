"""A complete generation of the module's version serves whatever the package manager does, also after a restart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.gpu import Capability
from nri_gpu.driver.manifest import MANIFEST, staged_driver, staged_library, why_unfit
from tests.support.driver_root import put_libraries
from tests.support.log import Log
from tests.unit.driver.host import NEW, OLD, DriverHost

KEPT = "driver files do not fit the kernel module: containers get the staged ones that do"


@pytest.fixture
def host(tmp_path: Path) -> DriverHost:
    host = DriverHost(tmp_path)
    host.driver()
    return host


def removed(host: DriverHost, *libraries: str) -> None:
    for path in (host.root / "lib64").glob("*"):
        if path.name.partition(".so")[0] in (libraries or (path.name.partition(".so")[0],)):
            path.unlink()


def half_new(host: DriverHost) -> None:
    removed(host, "libcuda")
    put_libraries(host.root, "lib64", NEW, ("libcuda",))


def a_part_gone(host: DriverHost) -> None:
    removed(host, "libnvidia-ptxjitcompiler")


# The states of the driver root while a package manager works.
WINDOW: dict[str, Callable[[DriverHost], object]] = {
    "libcuda is new, libnvidia-ml old": half_new,
    "no files": removed,
    "no libnvidia-ml yet": lambda host: removed(host, "libnvidia-ml"),
    "a library that is not unpacked yet": a_part_gone,
    "no root": lambda host: host.root.unlink(),
    "all new": lambda host: host.install(NEW),
}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("change", WINDOW.values(), ids=WINDOW)
def test_files_of_the_loaded_module_serve_until_it_changes(
    host: DriverHost, change: Callable[[DriverHost], object], log: Log, *, restarts: bool
) -> None:
    before = host.driver()
    change(host)
    if restarts:
        host = host.restarted()
    for _ in range(3):  # by then something else was staged, and the old pruned
        host.now += 60
        assert host.driver() == before
    assert host.look().driver_fault == ""
    assert len(log.said(KEPT)) == 1
    host.install(NEW)
    assert host.driver() == before
    host.module = NEW
    assert host.driver().version == NEW
    assert len(host.staged()) == 1


def test_files_that_return_are_taken_with_what_was_added(host: DriverHost) -> None:
    before = host.driver()
    a_part_gone(host)
    host.driver()
    put_libraries(host.root, "lib64", OLD, ("libnvidia-ptxjitcompiler", "libnvidia-encode"))
    after = host.driver()
    assert after.version == before.version
    assert after.generation != before.generation


def test_a_program_that_only_the_host_runs_counts(host: DriverHost) -> None:
    """As the MPS daemon's."""
    found = host.driver()
    staged = replace(found, host_binaries=("nvidia-of-the-host",))
    assert why_unfit(found, staged) == "they have no nvidia-of-the-host any more"
    assert why_unfit(staged, found) == ""


def truncated(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-1])


# What keeps a generation from being taken up. The path: a library in it.
SPOILED: dict[str, Callable[[Path], object]] = {
    "a file is shorter": truncated,
    "a file is gone": lambda file: file.unlink(),
    "a file is a stranger's": lambda file: os.chown(file, 1000, 0),
    "a file can be changed by strangers": lambda file: file.chmod(0o777),
    "a link is a stranger's": lambda file: os.lchown(file.with_name("libcuda.so.1"), 1000, 0),
    "a link leads elsewhere": lambda file: file.with_name("libcuda.so.1").replace(file.with_name("libcuda.so")),
    "a folder is a stranger's": lambda file: os.chown(file.parent, 1000, 0),
    "no manifest": lambda file: (file.parents[2] / MANIFEST).unlink(),
    "a manifest that is a stranger's": lambda file: os.chown(file.parents[2] / MANIFEST, 1000, 0),
    "a manifest cut short": lambda file: truncated(file.parents[2] / MANIFEST),
    "another generation's manifest": lambda file: file.parents[2].rename(file.parents[3] / f"{OLD}-00000000"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("restarts", [False, True])
def test_an_incomplete_generation_is_not_taken_up(
    host: DriverHost, spoil: Callable[[Path], object], *, restarts: bool
) -> None:
    library = Path(host.driver().trees[frozenset({Capability.COMPUTE})].path, f"lib64/libcuda.so.{OLD}")
    removed(host)
    spoil(library)
    if restarts:
        host = host.restarted()
    host.controller.look_again()
    assert host.look().driver is None
    assert "no libcuda.so.V or libnvidia-ml.so.V" in host.look().driver_fault


def test_of_two_generations_the_whole_one_serves(host: DriverHost) -> None:
    first = host.driver()
    host.held = frozenset({first.generation})
    os.utime(host.root / f"lib64/libcuda.so.{OLD}", ns=(0, 0))
    second = host.driver()
    removed(host)
    after = host.restarted()
    assert after.driver() == second  # the last one made
    shutil.rmtree(host.stage_dir / second.generation)
    assert after.driver() == first


def test_nothing_is_removed_while_the_module_is_of_another_version(host: DriverHost) -> None:
    old = host.driver()
    host.install(NEW)
    host.module = ""
    host.look()
    host.module = "590.10"
    assert host.driver().version == NEW
    assert old.generation in host.staged()
    host.module = OLD
    assert host.driver() == old


def test_the_files_of_another_daemon_are_not_taken_up(host: DriverHost, tmp_path: Path) -> None:
    removed(host)
    assert "belongs to another nri-gpu" in host.another(tmp_path / "other").look().driver_fault


def test_the_library_of_a_complete_generation(host: DriverHost) -> None:
    files = host.driver()
    library = staged_library(host.stage_dir, OLD, "libnvidia-ml.so.1")
    assert library
    assert library.is_relative_to(host.stage_dir / files.generation)
    assert staged_library(host.stage_dir, OLD, "libc.so.6") is None
    assert staged_library(host.stage_dir, "570.2", "libnvidia-ml.so.1") is None
    host.stage_dir.chmod(0o777)
    assert staged_driver(host.stage_dir, OLD) is None
