"""The checks of nri-gpu's own files: whoever can write them can give GPUs away, or read the key."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import nri_gpu
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import UNIT_FOLDERS
from nri_gpu.domain.finding import Finding, error, ok, unseen
from nri_gpu.domain.names import CONTROL_SOCKET, DEFAULT_OBSERVE
from nri_gpu.domain.text import listed
from nri_gpu.policy.model import BUILT_IN
from nri_gpu.system.storage import why_untrusted

_SUBJECT: Final = "our files"
_FileFault = tuple[str, str, str]
_SHARED: Final = ("mps",)  # in the state folder
_UNITS: Final = tuple(f"nri-gpu{each}.service" for each in ("", "-guard", "-prepare", "-cdi", "-observe"))


def files_findings(seen: Examined) -> Iterator[Finding]:
    """Report files with secrets that others can read, and files that others can write."""
    faults = tuple(_faults(seen))
    for path, why, rights in faults:
        if why:
            yield error(_SUBJECT, f"{path}: {why}", f"chown root {path} && chmod go-{rights} {path}")
    if denied := tuple(path for path, why, _ in faults if not why):
        yield unseen(_SUBJECT, f"only root can read {listed(denied)}", "sudo nri-gpu doctor")
    elif not faults:
        yield ok(_SUBJECT, "only root can change them, and read what is secret")


def _faults(seen: Examined) -> Iterator[_FileFault]:
    """Yield each path with its fault, and the rights that others must lose; nothing where we cannot look."""
    yield from _secret(seen)
    yield from _logged(seen)
    policy = Path(seen.policy.source)
    stage = seen.policy.driver.stage_dir
    below = [
        stage,
        str(seen.guard_dir),
        str(DEFAULT_OBSERVE),
        *(f"{folder}/{unit}" for folder in UNIT_FOLDERS for unit in _UNITS),
    ]
    below += [f"{stage}/{path.name}" for path in _entries(seen.at(stage))]
    ours = [policy, policy.parent] if seen.policy.source != BUILT_IN else []
    ours += [Path(nri_gpu.__file__).parent] if seen.root == Path("/") else []
    for shown, path in [*((str(each), each) for each in ours), *((each, seen.at(each)) for each in below)]:
        if not _mounted_so(seen, path):
            yield from _untrusted(path, shown)


def _secret(seen: Examined) -> Iterator[_FileFault]:
    """Check the state folder: the key, and what was decided about whom."""
    folder, shown = seen.at(seen.state_dir), str(seen.state_dir)
    group = bool(seen.policy.control.group)
    try:
        found = folder.stat()
    except OSError:
        return  # the daemon's own finding says so
    if why := why_untrusted(found):
        yield shown, why, "w"
    elif stat.S_IMODE(found.st_mode) & (0o067 if group else 0o077):
        yield shown, f"mode {stat.S_IMODE(found.st_mode):04o}: other users can list it", "rwx"
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        yield shown, "", "rwx"
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
            yield f"{shown}/{path.name}", why, "w"
        elif path.name != CONTROL_SOCKET and mode & 0o077:
            yield f"{shown}/{path.name}", f"mode {mode:04o}: other users can read it", "rwx"


def _logged(seen: Examined) -> Iterator[_FileFault]:
    """Check an audit log outside the state folder."""
    folder = seen.policy.audit.dir
    for path in _entries(seen.at(folder)) if folder else ():
        if path.name.startswith("audit") and (mode := stat.S_IMODE(path.lstat().st_mode)) & 0o077:
            yield f"{folder}/{path.name}", f"mode {mode:04o}: other users can read it", "rwx"


def _mounted_so(seen: Examined, path: Path) -> bool:
    """Return whether the kubelet mounted the path in a pod, open to all: a ConfigMap (0777), or an emptyDir (1777)."""
    ours = (path / "..data").is_symlink() or path == seen.at(seen.guard_dir)
    return seen.in_pod and ours and path.is_mount()


def _untrusted(path: Path, shown: str) -> Iterator[_FileFault]:
    try:
        status = path.stat()
        if stat.S_ISCHR(status.st_mode):
            return  # a masked unit leads to /dev/null, which holds nothing and must stay open to all
        if why := why_untrusted(status, path):
            yield shown, why, "w"
    except PermissionError:
        yield shown, "", "rwx"
    except OSError:
        return  # not there


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder))  # noqa: PTH208 - the names are enough
    except OSError:
        return []
