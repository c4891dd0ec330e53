"""cgroups, security modules, clock and room: one fault a test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.doctor.examined import TIME_ERROR, clock_state
from nri_gpu.domain.finding import Level
from nri_gpu.domain.node import Loader
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.model import DriverSettings
from nri_gpu.system.selinux import READ_ONLY, set_label
from tests.unit.doctor.node import CONFIG, HEALTHY_POLICY, VERSION, DoctorNode, free

CONFINED = CONFIG.replace("[plugins", '[plugins."io.containerd.cri.v1.runtime"]\nenable_selinux = true\n[plugins')
BOOLEAN = "sys/fs/selinux/booleans/container_use_devices"


def test_cgroups_of_version_1_and_none(node: DoctorNode) -> None:
    node.remove("sys/fs/cgroup/cgroup.controllers")
    assert node.only().level is Level.UNSEEN
    node.write("sys/fs/cgroup/memory/tasks", "")
    finding = node.only()
    assert (finding.level, "every container can open every GPU" in finding.meaning) == (Level.ERROR, True)
    node.write("sys/fs/cgroup/devices/devices.list", "")
    assert node.found() == {}


def test_selinux_that_keeps_containers_from_the_driver(node: DoctorNode) -> None:
    library = node.write(f"var/lib/nri-gpu/drivers/{VERSION}-0123abcd/compute/lib64/libcuda.so.{VERSION}", "")
    node.write("sys/fs/selinux/enforce", "1")
    assert node.found() == {}  # containerd does not confine containers
    node.write("etc/containerd/config.toml", CONFINED)
    for label in ("", "system_u:object_r:var_lib_t:s0"):
        set_label(library, label)
        finding = node.only()
        assert (finding.level, f"libcuda.so.{VERSION} is {label or 'unlabelled'}, " in finding.meaning) == (
            Level.ERROR,
            True,
        )
    set_label(library, READ_ONLY)
    assert node.found() == {}
    set_label(library, "system_u:object_r:var_lib_t:s0")
    node.write("sys/fs/selinux/enforce", "0")
    assert node.found() == {}


def test_selinux_asks_for_the_boolean_with_user_namespaces_alone(node: DoctorNode) -> None:
    node.write("sys/fs/selinux/enforce", "1")
    node.write("etc/containerd/config.toml", CONFINED)
    for written, wanted in (("0 0", True), ("1 1", False)):
        node.write(BOOLEAN, written)
        assert node.found() == {}
        said = [each.meaning for each in node.examine().findings if each.subject == "SELinux"]
        assert ("setsebool -P container_use_devices on" in said[0]) is wanted


def test_apparmor_needs_nothing(node: DoctorNode) -> None:
    node.write("sys/module/apparmor/parameters/enabled", "Y\n")
    assert any("enabled; the runtimes' own profiles" in each.meaning for each in node.examine().findings)


@pytest.mark.usefixtures("on_x86_64")
def test_a_loader_that_this_cpu_does_not_serve(node: DoctorNode) -> None:
    node.write("proc/cpuinfo", "flags : sse sse2\n")
    assert node.found() == {}
    policy = replace(HEALTHY_POLICY, driver=DriverSettings(loader=Loader.HWCAPS))
    finding = node.found(policy=policy)["loader"]
    assert (finding.level, "its CPU is no x86-64-v2" in finding.meaning) == (Level.WARNING, True)


@pytest.mark.parametrize(("state", "level"), [(TIME_ERROR, Level.WARNING), (-1, Level.UNSEEN)])
def test_a_clock_that_is_not_synchronized(node: DoctorNode, state: int, level: Level) -> None:
    policy = replace(HEALTHY_POLICY, dra=DraSettings(enabled=True))
    assert node.found(clock=lambda: state, policy=policy)["clock"].level is level


def test_without_a_certificate_to_check_the_clock_is_a_note(node: DoctorNode) -> None:
    found = node.found(clock=lambda: TIME_ERROR)
    assert (found["clock"].level, found["clock"].fix[0].split()[0]) == (Level.NOTE, "timedatectl")


def test_a_clock_of_long_ago(node: DoctorNode) -> None:
    finding = node.only(now_s=86400.0)
    assert (finding.level, "it shows 1970-01-02" in finding.meaning) == (Level.ERROR, True)


def test_the_kernel_is_asked_for_its_clock() -> None:
    assert clock_state() in range(-1, TIME_ERROR + 1)


ROOM = {
    "little": (free(100 << 20), Level.WARNING, {"room for drivers"}),
    "none": (free(0), Level.ERROR, {"room for state", "room for drivers"}),
    "no inodes": (free(8 << 30, inodes=0), Level.ERROR, {"room for state", "room for drivers"}),
    "noexec": (free(8 << 30, flags=os.ST_NOEXEC), Level.ERROR, {"stage folder"}),
}


@pytest.mark.parametrize(("found", "level", "subjects"), ROOM.values(), ids=ROOM)
def test_room(node: DoctorNode, found: os.statvfs_result, level: Level, subjects: set[str]) -> None:
    findings = node.found(statvfs=lambda _: found)
    assert findings.keys() == subjects
    assert {each.level for each in findings.values()} == {level}
    assert all(each.fix for each in findings.values())


def test_a_folder_to_come_is_judged_by_the_one_above_it(node: DoctorNode) -> None:
    asked: list[Path] = []

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)
        return os.statvfs(path)

    node.found(statvfs=statvfs)
    assert asked[-1] == node.root / "var"
