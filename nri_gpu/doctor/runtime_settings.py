"""The effective NRI settings of containerd and CRI-O, from their configuration files.

Sources: containerd cmd/containerd/server/config/config.go (imports), internal/nri/config.go (NRI); CRI-O
internal/config/nri/nri.go. Only the settings that are named here are kept: these files may have passwords.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from nri_gpu.system.storage import stat_of, text_of

CONFIGS: Final = {"containerd": "/etc/containerd/config.toml", "crio": "/etc/crio/crio.conf"}
NRI_SOCKET: Final = "/var/run/nri/nri.sock"
NRI: Final = "io.containerd.nri.v1.nri"
CRI_PLUGINS: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")  # version 3, 2 and 1
FILES_MAX: Final = 64
TEXT_MAX: Final = 1 << 20  # bytes of a file
_DURATION: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:h|ms|us|ns|m|s))+")
_AMOUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|us|ns|m|s)")
_UNITS_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# CRI-O's words for containerd's.
_CRIO_NRI: Final = {
    "nri_disable_connections": "disable_connections",
    "nri_listen": "socket_path",
    "nri_plugin_registration_timeout": "plugin_registration_timeout",
    "nri_plugin_request_timeout": "plugin_request_timeout",
}
_CRIO_VALIDATOR: Final = {
    "nri_enable_default_validator": "enable",
    "nri_validator_required_plugins": "required_plugins",
}
T = TypeVar("T")
Toml = dict[str, object]


class FileFault(Struct, frozen=True):
    """What is wrong with a file. denied: nothing but that this user may not read it."""

    sentence: str
    denied: bool = False


class Validator(Struct, frozen=True):
    """NRI's default validator, from containerd 2.2 on."""

    enable: bool = False
    required_plugins: tuple[str, ...] = ()


class NriSettings(Struct, frozen=True, kw_only=True):
    """One runtime's NRI. disable: None where the file does not say, and the version decides. Timeouts as written."""

    disable: bool | None = None
    disable_connections: bool = False
    socket_path: str = NRI_SOCKET
    plugin_registration_timeout: str = "5s"
    plugin_request_timeout: str = "2s"
    default_validator: Validator = Validator()


class _RuncOptions(Struct, frozen=True):
    systemd_cgroup: bool = field(default=False, name="SystemdCgroup")


class _RuntimeHandler(Struct, frozen=True):
    options: _RuncOptions = _RuncOptions()


class _Handlers(Struct, frozen=True):
    default_runtime_name: str = "runc"
    runtimes: Mapping[str, _RuntimeHandler] = {}


class CriSettings(Struct, frozen=True):
    """The CRI plugin of containerd."""

    containerd: _Handlers = _Handlers()
    enable_selinux: bool = False
    enable_experimental_restore_via_create: bool = False

    @property
    def systemd_cgroup(self) -> bool:
        handler = self.containerd.runtimes.get(self.containerd.default_runtime_name, _RuntimeHandler())
        return handler.options.systemd_cgroup


class ContainerdSettings(Struct, frozen=True, kw_only=True):
    """containerd's files together. files: those read. faults: why one of them was not."""

    version: Annotated[int, Meta(ge=1)] = 2
    root: str = "/var/lib/containerd"
    nri: NriSettings = NriSettings()
    cri: CriSettings = CriSettings()
    disabled_plugins: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    faults: tuple[FileFault, ...] = ()


def containerd_settings(root: Path, path: str, release: tuple[int, ...] | None) -> ContainerdSettings:
    """Those of a containerd that was started with this file. release: (2, 1, 4); None where unknown.

    From 2.0 on, imported files are merged into the tables before; in 1.x they replace a plugin's whole table.
    """
    files: list[str] = []
    faults: list[FileFault] = []
    version: object = None
    together: Toml = {}
    pending = [path]
    while pending and len(files) < FILES_MAX:
        name = pending.pop(0)
        if name in files or (content := _toml(root, name, faults, required=bool(files))) is None:
            continue
        version = content.get("version", 1) if not files else version
        files.append(name)
        merges = release >= (2,) if release else version not in (1, 2)
        plugins = {**_table(together.get("plugins")), **_table(content.get("plugins"))}
        together = _deep(together, content) | ({} if merges else {"plugins": plugins})
        pending += _imports(root, name, content)
    plugins = _table(together.get("plugins"))
    cri = next((plugins[name] for name in CRI_PLUGINS if name in plugins), {})
    nri = _read(plugins.get(NRI, {}), NriSettings, NRI, faults)
    handlers = _read(cri, CriSettings, "the CRI plugin", faults)
    rest: Toml = {key: together[key] for key in ("root", "disabled_plugins") if key in together}
    rest["version"] = version or 2
    whole = _read(rest, ContainerdSettings, path, faults)
    return msgspec.structs.replace(whole, nri=nri, cri=handlers, files=tuple(files), faults=tuple(faults))


def crio_settings(root: Path, path: str, faults: list[FileFault]) -> tuple[NriSettings, str, tuple[str, ...]]:
    """CRI-O's NRI settings in containerd's words, its default OCI runtime, and the files that they are from."""
    names = [path, *_matches(root, f"{path}.d/*")]
    nri: Toml = {}
    validator: Toml = {}
    read: list[str] = []
    handler = ""
    for name in names:
        if (content := _toml(root, name, faults, required=False)) is not None:
            read.append(name)
            crio = _table(content.get("crio"))
            table = _table(crio.get("nri"))
            handler = str(_table(crio.get("runtime")).get("default_runtime", handler))
            validator |= _table(table.get("default_validator"))
            nri |= table
    words: Toml = {ours: nri[theirs] for theirs, ours in _CRIO_NRI.items() if theirs in nri}
    if isinstance(enabled := nri.get("enable_nri"), bool):
        words["disable"] = not enabled
    words["default_validator"] = {ours: validator[each] for each, ours in _CRIO_VALIDATOR.items() if each in validator}
    return _read(words, NriSettings, "[crio.nri]", faults), handler, tuple(read)


def seconds(duration: str) -> float | None:
    """A duration as Go writes it, `2s` or `1m30s`; None where it is none."""
    if not _DURATION.fullmatch(duration):
        return None
    return sum(float(amount) * _UNITS_S[unit] for amount, unit in _AMOUNT.findall(duration))


def _toml(root: Path, name: str, faults: list[FileFault], *, required: bool) -> Toml | None:
    path = root / name.lstrip("/")
    fault = FileFault(f"{name} cannot be read by this user", denied=True)
    try:
        if stat_of(path) is None:
            if not required:
                return None
            fault = FileFault(f"{name} is imported and does not exist, so containerd does not start")
        elif not path.is_file():
            fault = FileFault(f"{name} is not a regular file")
        elif (text := text_of(path, TEXT_MAX, "utf-8")) is not None:
            return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        fault = FileFault(f"{name} is not TOML: {error}")
    except OSError:
        pass  # as said above
    faults.append(fault)
    return None


def _imports(root: Path, name: str, content: Toml) -> Iterator[str]:
    listed = content.get("imports")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, str):
            path = each if each.startswith("/") else f"{Path(name).parent}/{each}"
            yield from _matches(root, path) if "*" in path else (path,)


def _matches(root: Path, pattern: str) -> list[str]:
    try:
        return sorted(f"/{path.relative_to(root)}" for path in root.glob(pattern.lstrip("/")))[:FILES_MAX]
    except (OSError, ValueError):
        return []


def _deep(before: Toml, after: Toml) -> Toml:
    """Tables by key, lists one after the other, everything else replaced."""
    merged = dict(before)
    for key, value in after.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _deep(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            merged[key] = [*old, *(each for each in value if each not in old)]
        else:
            merged[key] = value
    return merged


def _table(value: object) -> Toml:
    return value if isinstance(value, dict) else {}


def _read(value: object, kind: type[T], where: str, faults: list[FileFault]) -> T:
    """The settings that we know; the defaults, and a fault, where one has a wrong type."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        faults.append(FileFault(f"{where}: {error}"))
        return kind()
