"""The effective NRI settings of containerd and CRI-O, from their configuration files.

Sources: containerd cmd/containerd/server/config/config.go (imports), internal/nri/config.go (NRI); CRI-O
internal/config/nri/nri.go. Only the settings that are named here are kept: these files may have passwords.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from nri_gpu.doctor.releases import EACH_MIGRATED, READINGS
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
_TABLES: Final = frozenset({"containerd", "runtimes", "options", "default_validator"})
_KEYS: Final = frozenset(
    {*_CRIO_NRI, *_CRIO_NRI.values(), *_CRIO_VALIDATOR, *_CRIO_VALIDATOR.values()}
    | {"disable", "enable_nri", "default_runtime", "default_runtime_name", "SystemdCgroup"}
)
T = TypeVar("T")
Toml = dict[str, object]


class FileFault(Struct, frozen=True):
    """A fault of a file with which the runtime does not start."""

    sentence: str
    fix: str = ""  # a comment, or empty if the runtime itself says more
    unseen: bool = False  # the runtime may start; we cannot read the file
    where: str = ""  # a file, or a part of the settings


class Validator(Struct, frozen=True):
    """NRI's default validator, from containerd 2.2 on."""

    enable: bool = False
    required_plugins: tuple[str, ...] = ()


class NriSettings(Struct, frozen=True, kw_only=True):
    """A runtime's NRI. disable: None if the file does not say, and the version decides. Timeouts are as written."""

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
    """The settings of containerd's files together."""

    version: Annotated[int, Meta(ge=1)] = 2
    nri: NriSettings = NriSettings()
    nri_table: str = NRI  # what these files call NRI
    cri: CriSettings = CriSettings()
    disabled_plugins: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()  # the main file's
    # The files where a setting (`nri.disable`), a table (`nri`) or a list's entry (`disabled_plugins.cri`) is to be
    # changed: the last that has it, or all that have the entry.
    said: Mapping[str, tuple[str, ...]] = {}
    files: tuple[str, ...] = ()  # those read
    faults: tuple[FileFault, ...] = ()  # why a file was not read


def containerd_settings(root: Path, path: str, release: tuple[int, ...] | None) -> ContainerdSettings:
    """Return the settings of a containerd that was started with this file. release: (2, 1, 4), or None if unknown."""
    faults: list[FileFault] = []
    files = _containerd_files(root, path, faults)
    versions = [each.version for each in files]
    # 1.x has no version above 2; a file of such a version is of a later release.
    replaces = release < (2,) if release else max(versions, default=3) <= 2
    # Before 2.0 a file of version 1 has the plugins by their short names, and other names mean nothing.
    short = release is not None and release < (2,) and next(filter(None, reversed(versions)), 1) < 2
    name = "nri" if short else NRI
    nri = [(each.name, each.plugins[name]) for each in files if name in each.plugins]
    cri = _cri_tables(files, release, replaces=replaces, short_names=short)
    if replaces:
        nri, cri = nri[-1:], cri[-1:]
    odd = (each.name for each in files if not isinstance(each.content.get("plugins", {}), dict))
    faults += (FileFault(f"{name} has `plugins` that are no table", where=name) for name in odd)
    faults += _refused(files, release)
    tops = [_read(each.top, ContainerdSettings, each.name, faults) for each in files]
    disabled = [(entry, file.name) for file, top in zip(files, tops, strict=True) for entry in top.disabled_plugins]
    said: dict[str, tuple[str, ...]] = {key: (name,) for key, name in (*_said("nri", nri), *_said("cri", cri))}
    for entry, _ in disabled:
        said[f"disabled_plugins.{entry}"] = tuple(name for each, name in disabled if each == entry)
    return ContainerdSettings(
        version=tops[0].version if tops else 2,
        nri=_read(_together(nri), NriSettings, name, faults),
        nri_table=name,
        cri=_read(_together(cri), CriSettings, "the CRI plugin", faults),
        disabled_plugins=tuple(dict.fromkeys(entry for entry, _ in disabled)),
        imports=tuple(_texts(files[0].content.get("imports"))) if files else (),
        said=said,
        files=tuple(each.name for each in files),
        faults=tuple(faults),
    )


class _File(Struct, frozen=True):
    name: str
    content: Toml

    @property
    def version(self) -> int:
        """Return the version, or 0 if the file has none, which stands for 1."""
        version = self.content.get("version")
        return version if isinstance(version, int) else 0

    @property
    def top(self) -> Toml:
        """Return the settings that belong to no plugin."""
        top: Toml = {key: self.content[key] for key in ("disabled_plugins", "imports") if key in self.content}
        return top | {"version": self.content.get("version") or 1}

    @property
    def plugins(self) -> Toml:
        return _table(self.content.get("plugins"))


Layers = list[tuple[str, object]]  # the files' tables of one plugin, the one that counts most last


def _containerd_files(root: Path, path: str, faults: list[FileFault]) -> list[_File]:
    files: dict[str, _File] = {}
    pending = [path]
    while pending and len(files) < FILES_MAX:
        name = pending.pop(0)
        if name not in files and (content := _toml(root, name, faults, required=bool(files))) is not None:
            files[name] = _File(name, content)
            pending += _imports(root, name, content)
    if any(name not in files for name in pending):
        faults.append(
            FileFault(
                f"{path} imports more than {FILES_MAX} files; the rest is not read",
                "# import fewer",
                unseen=True,
                where=path,
            )
        )
    return list(files.values())


def _refused(files: list[_File], release: tuple[int, ...] | None) -> Iterator[FileFault]:
    """Yield why a release does not start with these files, as far as their versions decide it."""
    reading = next((each for each in READINGS if release and release >= each.release), None)
    written = [each for each in files if each.version > 0]
    if reading is None or release is None or not written:
        return
    what = f"containerd {'.'.join(map(str, release))} does not start"
    main = written[0]
    for each in [each for each in written if each.version > 1 or release < (2,)][-reading.last :]:
        if each.version > reading.newest:
            sentence = (
                f"{each.name} is of version {each.version}, and {reading.newest} is the newest that is read: {what}"
            )
            yield FileFault(sentence, _rewrite(each, reading.newest), where=each.name)
    for each in written:
        if reading.root and each.version > main.version:
            sentence = f"{each.name} is of version {each.version}, and {main.name}, which imports it, of {main.version}"
            yield FileFault(f"{sentence}: {what}", _rewrite(each, main.version), where=each.name)
    for each in files:
        if (written[-1] if reading.named else each).version < 2:
            continue  # the plugins of version 1 have short names
        names = [*_texts(each.content.get("disabled_plugins")), *_texts(each.content.get("required_plugins"))]
        for name in [*names, *(each.plugins if reading.named else ())]:
            if not reading.uri.fullmatch(name):
                full = f'"{CRI_PLUGINS[1]}" for "cri", for instance'
                sentence = f'{each.name} calls a plugin "{name}", not by its URI: {what}'
                yield FileFault(sentence, f"# write {full}", where=each.name)


def _rewrite(file: _File, version: int) -> str:
    name = CRI_PLUGINS[0 if version > 2 else 1]
    return f'# write {file.name} for version {version}, in which the CRI plugin\'s tables begin with "{name}"'


def _cri_tables(files: list[_File], release: tuple[int, ...] | None, *, replaces: bool, short_names: bool) -> Layers:
    """Return the CRI plugin's tables: its names differ by version, and each release migrates files in its own way.

    From 2.3 on each file below version 4 is migrated by itself. 2.0 to 2.2 migrate all of them together, as of the last
    version that a file has: from 3 on tables with older names mean nothing, and below they count less.
    """
    new, old, short = CRI_PLUGINS

    def tables(each: _File, *names: str) -> Layers:
        known = [name for name in names if name != short or each.version < 2]
        return [(each.name, each.plugins[name]) for name in known if name in each.plugins]

    if replaces:
        return [table for each in files for table in tables(each, *((short,) if short_names else (short, old)))]
    if release and release < EACH_MIGRATED:
        last = next((each.version for each in reversed(files) if each.version > 1), 3)
        older = [table for each in files for table in tables(each, short, old)] if last == 2 else []
        return older + [table for each in files for table in tables(each, new)]
    return [table for each in files for table in tables(each, *((short, old) if each.version < 4 else ()), new)]


def _together(layers: Layers) -> object:
    """Merge tables by key, and replace all else, lists too. Return a value that is no table, for its fault."""
    merged: Toml = {}
    for _, table in layers:
        if not isinstance(table, dict):
            return table
        merged = _deep(merged, table)
    return merged


def _said(prefix: str, layers: Layers) -> Iterator[tuple[str, str]]:
    """Yield each table and setting that `doctor` speaks of with the file that has it; the last file counts."""
    for name, table in layers:
        yield prefix, name
        for key, value in _table(table).items():
            if isinstance(value, dict) and (key in _TABLES or prefix.endswith(".runtimes")):
                yield from _said(f"{prefix}.{key}", [(name, value)])
            elif key in _KEYS:
                yield f"{prefix}.{key}", name


class CrioSettings(Struct, frozen=True, kw_only=True):
    """CRI-O's files together, NRI's part in containerd's words. handler: its default OCI runtime. said: as above."""

    nri: NriSettings
    handler: str
    files: tuple[str, ...]
    said: Mapping[str, tuple[str, ...]]
    faults: tuple[FileFault, ...]


def crio_settings(root: Path, path: str) -> CrioSettings:
    faults: list[FileFault] = []
    names = [path, *_matches(root, f"{path}.d/*")]
    found = [(name, content) for name in names if (content := _toml(root, name, faults, required=False)) is not None]
    crio = [(name, _table(content.get("crio"))) for name, content in found]
    tables: Layers = [(name, each["nri"]) for name, each in crio if "nri" in each]
    runtimes: Layers = [(name, each["runtime"]) for name, each in crio if "runtime" in each]
    nri = _table(_together(tables))
    validator = _table(nri.get("default_validator"))
    words: Toml = {ours: nri[theirs] for theirs, ours in _CRIO_NRI.items() if theirs in nri}
    if isinstance(enabled := nri.get("enable_nri"), bool):
        words["disable"] = not enabled
    words["default_validator"] = {ours: validator[each] for each, ours in _CRIO_VALIDATOR.items() if each in validator}
    return CrioSettings(
        nri=_read(words, NriSettings, "[crio.nri]", faults),
        handler=str(_table(_together(runtimes)).get("default_runtime", "")),
        files=tuple(name for name, _ in found),
        said={key: (name,) for key, name in (*_said("nri", tables), *_said("runtime", runtimes))},
        faults=tuple(faults),
    )


def seconds(duration: str) -> float | None:
    """Return the seconds of a duration as Go writes it, `2s` or `1m30s`, or None if it is none."""
    if not _DURATION.fullmatch(duration):
        return None
    return sum(float(amount) * _UNITS_S[unit] for amount, unit in _AMOUNT.findall(duration))


def _toml(root: Path, name: str, faults: list[FileFault], *, required: bool) -> Toml | None:
    path = root / name.lstrip("/")
    fault = FileFault(f"{name} cannot be read by this user", unseen=True, where=name)
    try:
        if stat_of(path) is None:
            if not required:
                return None
            fault = FileFault(f"{name} is imported and does not exist, so containerd does not start", where=name)
        elif not path.is_file():
            fault = FileFault(f"{name} is not a regular file", where=name)
        elif (text := text_of(path, TEXT_MAX, "utf-8")) is not None:
            return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        fault = FileFault(f"{name} is not TOML: {error}", where=name)
    except OSError:
        pass  # as said above
    faults.append(fault)
    return None


def _imports(root: Path, name: str, content: Toml) -> Iterator[str]:
    """Yield the files that a file imports, each under one name, however it is written: a file may import itself."""
    for each in _texts(content.get("imports")):
        path = os.path.normpath(Path(name).parent / each)
        # In Go's patterns `**` is `*`.
        yield from _matches(root, re.sub(r"\*+", "*", path)) if "*" in path else (path,)


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _matches(root: Path, pattern: str) -> list[str]:
    try:
        return sorted(f"/{path.relative_to(root)}" for path in root.glob(pattern.lstrip("/")))[:FILES_MAX]
    except (OSError, ValueError):
        return []


def _deep(before: Toml, after: Toml) -> Toml:
    merged = dict(before)
    for key, value in after.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _deep(old, value)
        else:
            merged[key] = value
    return merged


def _table(value: object) -> Toml:
    return value if isinstance(value, dict) else {}


def _read(value: object, kind: type[T], where: str, faults: list[FileFault]) -> T:
    """Return the settings that we know; if one has a wrong type, note a fault and return the defaults."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        faults.append(FileFault(f"{where}: {error}", where=where))
        return kind()
