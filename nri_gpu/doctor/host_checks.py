"""The checks of kernel and host: cgroups, security modules, the clock, and room for our files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from nri_gpu.doctor.examined import TIME_ERROR, Examined
from nri_gpu.doctor.observer_checks import observed_alone
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.finding import Finding, error, note, ok, unseen, warning
from nri_gpu.system.cpu import loader_fault
from nri_gpu.system.selinux import READABLE, label_of
from nri_gpu.system.storage import text_of
from nri_gpu.system.user_namespace import in_user_namespace

MIB: Final = 1 << 20
STATE_ROOM_BYTES: Final = 64 * MIB  # ledger, journal, snapshot and audit log stay below it
STAGE_ROOM_BYTES: Final = 2048 * MIB  # one more driver with all its files, where they have to be copied
INODES: Final = 2000
WRITTEN_S: Final = datetime(2026, 1, 1, tzinfo=UTC).timestamp()  # no clock that is right shows less
_BOOLEAN: Final = "/sys/fs/selinux/booleans/container_use_devices"


def host_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    if in_user_namespace():
        yield ok(
            "user namespace",
            "this machine is an unprivileged container, and its device nodes are its host's; the host's driver files "
            "are given to containers if nobody here can change them",
        )
    yield _cgroups(seen)
    if observed_alone(seen):  # what else is checked is for the files that a daemon keeps and gives to containers
        yield _clock(seen)
        return
    yield _selinux(seen, runtime)
    yield _apparmor(seen)
    yield from loader_findings(seen)
    yield _clock(seen)
    yield from _room(seen)


def loader_findings(seen: Examined) -> Iterator[Finding]:
    if fault := loader_fault(seen.policy.driver.loader, seen.at("/proc/cpuinfo")):
        yield warning(
            "loader",
            f"{fault}; containers get the whole tree and LD_LIBRARY_PATH instead, and one that clears its environment "
            "finds no driver",
            '# driver.loader = "files" serves every loader (docs/loader.md)',
        )


def _cgroups(seen: Examined) -> Finding:
    subject, folder = "cgroups", seen.at("/sys/fs/cgroup")
    if (folder / "cgroup.controllers").exists():
        return ok(subject, "version 2: the runtime's device rules are eBPF programs")
    if (folder / "devices").is_dir():
        return ok(subject, "version 1: the runtime's device rules are in devices.list")
    if folder.is_dir() and any(folder.iterdir()):
        return error(
            subject,
            "there is no cgroup controller for devices, so every container can open every GPU",
            "# on the kernel's command line: no cgroup_disable=devices, or systemd.unified_cgroup_hierarchy=1",
        )
    return unseen(subject, "/sys/fs/cgroup is not mounted here, so the device rules of containers cannot be seen")


def _selinux(seen: Examined, runtime: ContainerRuntime | None) -> Finding:
    subject = "SELinux"
    enforcing = text_of(seen.at("/sys/fs/selinux/enforce"))
    if enforcing is None:
        return ok(subject, "not in this kernel, or switched off")
    if enforcing.strip() != "1":
        return ok(subject, "permissive")
    if runtime and runtime.containerd and not runtime.containerd.cri.enable_selinux:
        return ok(subject, "enforcing, but containerd does not confine containers by it (enable_selinux)")
    library = next(seen.at(seen.policy.driver.stage_dir).glob("*/*/lib64/libcuda.so.*.*"), None)
    label = label_of(library) if library else ""
    if library and not READABLE.intersection(label.split(":")[2:3]):
        return error(
            subject,
            "enforcing, and containers may not read the staged driver files: "
            f"{library.name} is {label or 'unlabelled'}, so no program loads libcuda",
            "systemctl restart nri-gpu    # stages them anew, as container_ro_file_t",
            "ausearch -m avc -ts recent | grep -e nvidia -e nri-gpu    # if that changes nothing: what was denied",
        )
    # The nodes that the runtime makes have the containers' own label. In user namespaces it binds the host's.
    allowed = (text_of(seen.at(_BOOLEAN)) or "").split()[:1] == ["1"]
    more = "" if allowed else "; pods in user namespaces also need `setsebool -P container_use_devices on`"
    return ok(subject, f"enforcing, and containers may read the staged driver files{more}")


def _apparmor(seen: Examined) -> Finding:
    enabled = (text_of(seen.at("/sys/module/apparmor/parameters/enabled")) or "").strip() == "Y"
    state = "enabled; the runtimes' own profiles let containers open their devices" if enabled else "not enabled"
    return ok("AppArmor", state)


def _clock(seen: Examined) -> Finding:
    subject = "clock"
    fix = ("timedatectl set-ntp true    # or enable chrony",)
    if seen.now_s < WRITTEN_S:
        now = datetime.fromtimestamp(seen.now_s, UTC)
        return error(
            subject, f"it shows {now:%Y-%m-%d}: times in the audit log and in status are wrong", *fix, "hwclock -w"
        )
    state = seen.clock()
    if state < 0:
        return unseen(subject, "the kernel does not say whether the clock is synchronized")
    if state == TIME_ERROR:
        wrong = "not synchronized: times in status, log and audit log may not agree with other nodes'"
        if seen.policy.dra.enabled:
            return warning(subject, f"{wrong}, and the API server's certificate may count as expired", *fix)
        return note(subject, wrong, *fix)
    return ok(subject, "synchronized")


def _room(seen: Examined) -> Iterator[Finding]:
    state, stage = seen.state_dir, Path(seen.policy.driver.stage_dir)
    if found := _file_system(seen, state):
        otherwise = "ledger and journal cannot be written, and the next start does not know who holds what"
        yield _free("room for state", state, found, STATE_ROOM_BYTES, otherwise)
    if found := _file_system(seen, stage):
        otherwise = "there may be no room to stage the next driver, and then no GPU is granted"
        yield _free("room for drivers", stage, found, STAGE_ROOM_BYTES, otherwise)
    if found and found.f_flag & os.ST_NOEXEC:
        yield error(
            "stage folder",
            f"{stage} is on a file system mounted noexec: containers cannot load the driver's libraries from there",
            f"mount -o remount,exec {stage}",
            "# or set driver.stage_dir in /etc/nri-gpu/policy.toml to a folder elsewhere",
        )


def _file_system(seen: Examined, folder: Path) -> os.statvfs_result | None:
    """Return the file system of a folder, or of the first above it that exists, or None if that cannot be seen."""
    for each in (folder, *folder.parents):
        try:
            return seen.statvfs(seen.at(each))
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _free(subject: str, folder: Path, found: os.statvfs_result, least: int, otherwise: str) -> Finding:
    free = found.f_bavail * found.f_frsize
    if found.f_files and found.f_favail < INODES:
        left, level = f"{found.f_favail} inodes", warning if found.f_favail else error
    elif found.f_blocks and free < least:
        left, level = f"{free / MIB:.0f} MiB", error if free < MIB else warning
    else:
        return ok(subject, f"{free / MIB:.0f} MiB free at {folder}")
    return level(subject, f"only {left} free at {folder}: {otherwise}", f"df -h {folder}; df -i {folder}")
