"""A .tar.gz for a bug report: what `doctor` saw, without secrets and without environments.

Text that users wrote freely is never copied: of configuration files only the settings that `doctor` knows, of processes
only those that it names, without their command lines. Of the state folder only names, sizes and modes.
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import stat
import tarfile
from collections.abc import Iterator
from typing import Final

import msgspec

from nri_gpu import __version__
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.errors import cause_of
from nri_gpu.domain.names import DEFAULT_OBSERVE
from nri_gpu.host.components import components
from nri_gpu.host.facts import look
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.host.modules import module_versions
from nri_gpu.plugin.guard_status import read_guard_status
from nri_gpu.system.storage import text_of

_KERNEL_FILES: Final = (
    "proc/devices",
    "proc/sys/kernel/osrelease",
    "proc/driver/nvidia/version",
    "proc/driver/nvidia/params",
    "proc/driver/nvidia-caps/mig-minors",
    "etc/os-release",
)
_GPUS: Final = "proc/driver/nvidia/gpus/*/information"
_TEXT_MAX: Final = 1 << 20


def bundle(seen: Examined, runtime: ContainerRuntime | None, reports: dict[str, str]) -> bytes:
    """Return the archive. reports: `doctor`'s own, by file name."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in {**reports, **dict(_documents(seen, runtime)), **dict(_kernel(seen))}.items():
            entry = tarfile.TarInfo(f"nri-gpu-doctor/{name}")
            data = text.encode()
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(seen.now_s)
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=int(seen.now_s))


def _documents(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[tuple[str, str]]:
    """Yield what we know of each part, as JSON."""
    versions = {"nri_gpu": __version__, "python": platform.python_version(), "machine": platform.machine()}
    yield "versions.json", _json(versions)
    yield "policy.json", _json(seen.policy)
    if seen.status:
        yield "status.json", _json(seen.status)
    if seen.observer:
        yield "observer.json", _json(seen.observer)
    if guard := read_guard_status(seen.at(seen.guard_dir)):
        yield "guard.json", _json(guard)
    if runtime:
        yield "runtime.json", _json(msgspec.structs.replace(runtime, process=None, beside=()))
    yield "modules.json", _json(module_versions(seen.at("/sys")))
    yield "components.json", _json(tuple(components(seen.root, seen.policy.kubelet.dir)))
    facts = look(HostFolders(dev=seen.at("/dev"), proc=seen.at("/proc"), sys=seen.at("/sys"), host=seen.root))
    yield "dev.txt", "".join(f"/dev/{path}: {entry}\n" for path, entry in sorted(facts.entries.items()))
    yield "files.txt", "".join(_listing(seen))


def _listing(seen: Examined) -> Iterator[str]:
    """List the state folder and the staged drivers: names, sizes, modes and owners."""
    for shown in (str(seen.state_dir), seen.policy.driver.stage_dir, str(seen.guard_dir), str(DEFAULT_OBSERVE)):
        try:
            entries = sorted(seen.at(shown).iterdir())
        except OSError as error:
            yield f"{shown}: {cause_of(error)}\n"
            continue
        for path in entries:
            try:
                found = path.lstat()
            except FileNotFoundError:  # a draft, renamed since
                continue
            yield f"{shown}/{path.name}: {stat.filemode(found.st_mode)} {found.st_uid}:{found.st_gid} {found.st_size}\n"


def _kernel(seen: Examined) -> Iterator[tuple[str, str]]:
    """Yield files of the kernel and the driver, which have no secrets."""
    for path in (*(seen.root / name for name in _KERNEL_FILES), *sorted(seen.root.glob(_GPUS))):
        if (text := text_of(path, _TEXT_MAX, "utf-8")) is not None:
            yield str(path.relative_to(seen.root)), text


def _json(value: object) -> str:
    return json.dumps(_shortened(msgspec.to_builtins(value, enc_hook=str)), indent=1) + "\n"


def _shortened(value: object) -> object:
    """Return the value with lists of patterns as written, without what is made of them."""
    if isinstance(value, dict):
        return value["patterns"] if "patterns" in value else {key: _shortened(each) for key, each in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, list) else value
