"""Whether nri-gpu's own files are its alone: whoever can write them can give GPUs away, or read the key."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import nri_gpu
from nri_gpu.doctor.finding import DoctorFinding, Examined, error, ok, unseen
from nri_gpu.doctor.units import UNIT_FOLDERS
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.domain.text import listed
from nri_gpu.policy.model import BUILT_IN
from nri_gpu.system.storage import why_untrusted

_SUBJECT: Final = "our files"
_SHARED: Final = ("mps",)  # in the state folder
_UNITS: Final = ("nri-gpu.service", "nri-gpu-guard.service", "nri-gpu-prepare.service", "nri-gpu-cdi.service")


def files_findings(seen: Examined) -> Iterator[DoctorFinding]:
    """Files that others can read, where that is a secret, and files that others can write."""
    faults = tuple(_faults(seen))
    denied = tuple(path for path, why in faults if not why)
    wrong = [(path, why) for path, why in faults if why]
    for path, why in wrong:
        yield error(
            _SUBJECT, f"{path}: {why}", f"chown root {path} && chmod go-{'w' if 'change' in why else 'rwx'} {path}"
        )
    if denied:
        yield unseen(_SUBJECT, f"only root can look at {listed(denied)}", "sudo nri-gpu doctor")
    elif not wrong:
        yield ok(_SUBJECT, "only root can change them, and read what is secret")


def _faults(seen: Examined) -> Iterator[tuple[str, str]]:
    """Each path with what is wrong with it; with nothing where this user cannot look."""
    yield from _secret(seen)
    yield from _logged(seen)
    policy = Path(seen.policy.source)
    stage = seen.policy.driver.stage_dir
    below = [stage, str(seen.guard_dir), *(f"{folder}/{unit}" for folder in UNIT_FOLDERS for unit in _UNITS)]
    below += [f"{stage}/{path.name}" for path in _entries(seen.at(stage))]
    ours = [policy, policy.parent] if seen.policy.source != BUILT_IN else []
    ours += [Path(nri_gpu.__file__).parent] if seen.root == Path("/") else []
    for shown, path in [*((str(each), each) for each in ours), *((each, seen.at(each)) for each in below)]:
        if not _mounted_so(seen, path):
            yield from _untrusted(path, shown)


def _secret(seen: Examined) -> Iterator[tuple[str, str]]:
    """The state folder: the key, and what was decided about whom."""
    folder, shown = seen.at(seen.state_dir), str(seen.state_dir)
    group = bool(seen.policy.control.group)
    try:
        found = folder.stat()
    except OSError:
        return  # the daemon's own finding says so
    if why := why_untrusted(found):
        yield shown, why
    elif stat.S_IMODE(found.st_mode) & (0o067 if group else 0o077):
        yield shown, f"mode {stat.S_IMODE(found.st_mode):04o}: others can look into it"
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        yield shown, ""
        return
    for path in entries:
        try:
            status = path.lstat()
        except FileNotFoundError:  # the daemon writes drafts, and renames them
            continue
        if path.name in _SHARED or (stat.S_ISSOCK(status.st_mode) and path.name != CONTROL_SOCKET):
            continue  # MPS' clients write there; who may connect for metrics is the policy's to say
        mode = stat.S_IMODE(status.st_mode)
        if why := why_untrusted(status) if not (group and path.name == CONTROL_SOCKET) else "":
            yield f"{shown}/{path.name}", why
        elif path.name != CONTROL_SOCKET and mode & 0o077:
            yield f"{shown}/{path.name}", f"mode {mode:04o}: others can read it"


def _logged(seen: Examined) -> Iterator[tuple[str, str]]:
    """An audit log outside the state folder."""
    folder = seen.policy.audit.dir
    for path in _entries(seen.at(folder)) if folder else ():
        if path.name.startswith("audit") and (mode := stat.S_IMODE(path.lstat().st_mode)) & 0o077:
            yield f"{folder}/{path.name}", f"mode {mode:04o}: others can read it"


def _mounted_so(seen: Examined, path: Path) -> bool:
    """Whether a pod has it from the kubelet, open to all: the folder of a ConfigMap (0777), or an emptyDir (1777)."""
    ours = (path / "..data").is_symlink() or path == seen.at(seen.guard_dir)
    return seen.in_pod and ours and path.is_mount()


def _untrusted(path: Path, shown: str) -> Iterator[tuple[str, str]]:
    try:
        if why := why_untrusted(path.stat()):
            yield shown, why
    except PermissionError:
        yield shown, ""
    except OSError:
        return  # not there


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder))  # noqa: PTH208 - the names are enough
    except OSError:
        return []
