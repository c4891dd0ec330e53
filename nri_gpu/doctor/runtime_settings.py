"""The effective NRI settings of containerd and CRI-O, from their configuration files.

Sources: containerd cmd/containerd/server/config/config.go (imports), internal/nri/config.go (NRI); CRI-O
internal/config/nri/nri.go. Only the settings that are named here are kept: these files may have passwords.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from nri_gpu.doctor.go_toml import (
    BURNT_SUSHI,
    DEPTH,
    GO_TOML_1,
    GO_TOML_2,
    Toml,
    TomlLibrary,
    merged,
    parse_toml,
    seconds,
    spelled,
)
from nri_gpu.doctor.releases import EACH_MIGRATED, NUMBERS_REFUSED, READINGS
from nri_gpu.system.storage import bytes_of, stat_of

CONFIGS: Final = {"containerd": "/etc/containerd/config.toml", "crio": "/etc/crio/crio.conf"}
NRI_SOCKET: Final = "/var/run/nri/nri.sock"
NRI: Final = "io.containerd.nri.v1.nri"
CRI_PLUGINS: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")  # version 3, 2 and 1
IMAGES: Final = "io.containerd.cri.v1.images"  # without which 2.x has no CRI, too
FILES_MAX: Final = 64
TEXT_MAX: Final = 1 << 20  # bytes of a file
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
    "nri_validator_tolerate_missing_plugins_annotation": "tolerate_missing_plugins_annotation",
}
_TABLES: Final = frozenset({"containerd", "default_runtime", "runtimes", "options", "default_validator"})
_KEYS: Final = frozenset(
    {*_CRIO_NRI, *_CRIO_NRI.values(), *_CRIO_VALIDATOR, *_CRIO_VALIDATOR.values()}
    | {"disable", "enable_nri", "default_runtime", "default_runtime_name", "SystemdCgroup"}
)
_CRIO_NAMES: Final = {each.lower(): each for each in (*_KEYS, *_TABLES, "crio", "nri", "runtime")}
_NAMES: Final = {
    key.lower(): key
    for key in (*_KEYS, *_TABLES, "enable_selinux", "enable_experimental_restore_via_create", "runtime_type")
}
T = TypeVar("T")


class FileFault(Struct, frozen=True):
    """A fault of a file with which the runtime, or its CRI plugin, does not start."""

    sentence: str
    fix: str = ""  # a comment, or empty if the runtime itself says more
    unseen: bool = False  # the runtime may start; we cannot read the file
    where: str = ""  # a file, or a part of the settings


class Validator(Struct, frozen=True):
    """NRI's default validator, from containerd 2.2 on."""

    enable: bool = False
    required_plugins: tuple[str, ...] = ()
    tolerate_missing_plugins_annotation: str = ""  # a pod with it may be created without any of them


class Duration(str):
    """A duration as written, a number with the unit that it stands for."""

    __slots__ = ()


class NriSettings(Struct, frozen=True, kw_only=True):
    """A runtime's NRI. disable: None if the file does not say, and the version decides. A timeout of 0: the default."""

    disable: bool | None = None
    disable_connections: bool = False
    socket_path: str = NRI_SOCKET
    plugin_registration_timeout: Duration = Duration("5s")
    plugin_request_timeout: Duration = Duration("2s")
    default_validator: Validator = Validator()


class _RuncOptions(Struct, frozen=True):
    systemd_cgroup: bool = field(default=False, name="SystemdCgroup")


class _RuntimeHandler(Struct, frozen=True):
    runtime_type: str = ""
    options: _RuncOptions = _RuncOptions()


class _Handlers(Struct, frozen=True):
    default_runtime_name: str = "runc"
    default_runtime: _RuntimeHandler = _RuntimeHandler()  # its own table, before 2.0
    runtimes: Mapping[str, _RuntimeHandler] | None = None


class CriSettings(Struct, frozen=True):
    """The CRI plugin of containerd."""

    containerd: _Handlers = _Handlers()
    enable_selinux: bool = False
    enable_experimental_restore_via_create: bool = False

    @property
    def systemd_cgroup(self) -> bool:
        handlers = self.containerd.runtimes or {}
        return handlers.get(self.containerd.default_runtime_name, _RuntimeHandler()).options.systemd_cgroup


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
    cri_fault: FileFault | None = None  # why the CRI plugin does not start


class _Top(Struct, frozen=True):
    """The settings of a file that belong to no plugin, as far as a fault in them is ours to tell."""

    version: Annotated[int, Meta(ge=0)] = 1  # 0 stands for 1
    root: str = ""
    state: str = ""
    oom_score: int = 0
    imports: tuple[str, ...] = ()
    required_plugins: tuple[str, ...] = ()
    disabled_plugins: tuple[str, ...] = ()


_TOP_NAMES: Final = {each: each for each in (*_Top.__struct_fields__, "plugins")}


def containerd_settings(root: Path, path: str, release: tuple[int, ...] | None) -> ContainerdSettings:
    """Return the settings of a containerd that was started with this file. release: (2, 1, 4), or None if unknown."""
    faults: list[FileFault] = []
    first = release is not None and release < (2,)
    library = GO_TOML_1 if first else GO_TOML_2
    files = _containerd_files(root, path, library, faults)
    versions = [each.version for each in files]
    # 1.x has no version above 2; a file of such a version is of a later release.
    replaces = release < (2,) if release else max(versions, default=3) <= 2
    # Before 2.0 a file of version 1 has the plugins by their short names, and other names mean nothing.
    short = first and next(filter(None, reversed(versions)), 1) < 2
    name = "nri" if short else NRI
    nri = [(each.name, each.plugins[name]) for each in files if name in each.plugins]
    cri = _cri_tables(files, release, replaces=replaces, short_names=short)
    hidden = ""
    if {*CRI_PLUGINS[:2]} <= {plugin for each in files for plugin in each.plugins}:
        hidden = f': beside its newer name, its older one, "{CRI_PLUGINS[1]}", counts less or not at all'
    if replaces and len(cri) > 1:
        hidden = f": before 2.0 all settings of that plugin in {cri[-1][0]} take the place of those in other files"
    if replaces:
        nri, cri = nri[-1:], cri[-1:]
    odd = (each.name for each in files if not isinstance(each.content.get("plugins", {}), dict))
    faults += (FileFault(f"{name} has `plugins` that are no table", where=name) for name in odd)
    faults += _refused(files, release)
    tops = [_read(each.content, _Top, each.name, faults) for each in files]
    disabled = [(entry, file.name) for file, top in zip(files, tops, strict=True) for entry in top.disabled_plugins]
    said: dict[str, tuple[str, ...]] = {
        key: (name,)
        for prefix, layers in (("nri", nri), ("cri", cri))
        for key, name in _said(prefix, [(name, _spelled(table, library)) for name, table in layers])
    }
    for entry, _ in disabled:
        said[f"disabled_plugins.{entry}"] = tuple(name for each, name in disabled if each == entry)
    numbers = not release or not NUMBERS_REFUSED[0] <= release < NUMBERS_REFUSED[1]
    cri_table = _spelled(_together(cri), library)
    cri_read = _read(cri_table, CriSettings, "the CRI plugin", faults)
    return ContainerdSettings(
        version=tops[0].version or 1 if tops else 2,
        nri=_read(_spelled(_together(nri), library), NriSettings, name, faults, numbers=numbers),
        nri_table=name,
        cri=cri_read,
        cri_fault=_without_handler(cri_read.containerd, cri, first=first, hidden=hidden),
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
    def plugins(self) -> Toml:
        return _table(self.content.get("plugins"))


Layers = list[tuple[str, object]]  # the files' tables of one plugin, the one that counts most last


def _containerd_files(root: Path, path: str, library: TomlLibrary, faults: list[FileFault]) -> list[_File]:
    files: dict[str, _File] = {}
    pending = [path]
    while pending and len(files) < FILES_MAX:
        name = pending.pop(0)
        if name not in files and (read := _toml(root, name, library, faults, required=bool(files))) is not None:
            content = spelled(read, _TOP_NAMES, library, depth=0)
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
    version that a file has: from 3 on tables with older names mean nothing.
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
        return _migrated(older, [table for each in files for table in tables(each, new)])
    by_file = ((tables(each, short, old) if each.version < 4 else [], tables(each, new)) for each in files)
    return [table for older, newer in by_file for table in _migrated(older, newer)]


def _migrated(older: Layers, newer: Layers) -> Layers:
    """Return tables of older names, as far as those of the newer name lack their settings, and these.

    Source: containerd plugins/cri/runtime/plugin.go (migrateConfig).
    """
    have = _table(_together(newer))
    return [*((name, _lacking(table, have)) for name, table in older), *newer]


def _lacking(table: object, have: Toml) -> object:
    """Return a table without the settings that another has; its handlers are one setting."""
    if not isinstance(table, dict):
        return table
    lacking = {key: value for key, value in table.items() if key not in have}
    return lacking | {key: _lacking(table[key], _table(have.get(key))) for key in ("containerd",) if key in table}


def _together(layers: Layers) -> object:
    """Merge the tables. Return a value that is no table, for its fault."""
    together: Toml = {}
    for _, table in layers:
        if not isinstance(table, dict):
            return table
        together = merged(together, table)
    return together


def _spelled(table: object, library: TomlLibrary) -> object:
    return spelled(table, _NAMES, library) if isinstance(table, dict) else table


def _without_handler(handlers: _Handlers, layers: Layers, *, first: bool, hidden: str) -> FileFault | None:
    """Return why containerd starts without CRI: its default handler has no table.

    first: by a containerd before 2.0, where `runc` is built in only if a file has no handlers. hidden: what hides
    tables, if anything does.
    """
    built_in = set() if first and handlers.runtimes is not None else {"runc"}
    name = handlers.default_runtime_name
    if name in built_in.union(handlers.runtimes or ()) or (first and handlers.default_runtime.runtime_type):
        return None
    what = f'the default runtime "{name}" (default_runtime_name) has no table below runtimes of the CRI plugin{hidden}'
    return FileFault(what, where=layers[-1][0])


def _said(prefix: str, layers: Layers, depth: int = DEPTH) -> Iterator[tuple[str, str]]:
    """Yield each table and setting that `doctor` speaks of with the file that has it; the last file counts."""
    for name, table in layers:
        yield prefix, name
        for key, value in _table(table).items():
            if depth and isinstance(value, dict) and (key in _TABLES or prefix.endswith(".runtimes")):
                yield from _said(f"{prefix}.{key}", [(name, value)], depth - 1)
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
    read = [(name, _toml(root, name, BURNT_SUSHI, faults, required=False)) for name in names]
    found = [(name, spelled(content, _CRIO_NAMES, BURNT_SUSHI)) for name, content in read if content is not None]
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


def _toml(root: Path, name: str, library: TomlLibrary, faults: list[FileFault], *, required: bool) -> Toml | None:
    path = root / name.lstrip("/")
    fault = FileFault(f"{name} cannot be read by this user", unseen=True, where=name)
    try:
        if stat_of(path) is None:
            if not required:
                return None
            fault = FileFault(f"{name} is imported and does not exist, so containerd does not start", where=name)
        elif not path.is_file():
            fault = FileFault(f"{name} is not a regular file", where=name)
        elif (content := bytes_of(path, TEXT_MAX)) is not None:
            return parse_toml(content, library)
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
        # In Go's patterns `**` is `*`, and `[^a]` is `[!a]`.
        yield from _matches(root, re.sub(r"\*+", "*", path).replace("[^", "[!")) if "*" in path else (path,)


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _matches(root: Path, pattern: str) -> list[str]:
    try:
        found = sorted(root.glob(pattern.lstrip("/")), key=lambda path: path.parts)  # as Go's Glob
        return [f"/{path.relative_to(root)}" for path in found[:FILES_MAX]]
    except (OSError, ValueError):
        return []


def _table(value: object) -> Toml:
    return value if isinstance(value, dict) else {}


def _read(value: object, kind: type[T], where: str, faults: list[FileFault], *, numbers: bool = True) -> T:
    """Return the settings that we know; if one has a wrong type, note a fault and return the defaults.

    numbers: whether a number is a duration, of nanoseconds.
    """

    def duration(_: type, value: object) -> Duration:
        text = f"{value}ns" if type(value) is int and (numbers or value == 0) else value
        if not isinstance(text, str) or seconds(text) is None:
            raise ValueError(f'{value!r} is no duration, such as "2s"')
        return Duration(text)

    try:
        return msgspec.convert(value, kind, dec_hook=duration)
    except msgspec.ValidationError as error:
        faults.append(FileFault(f"{where}: {error}", where=where))
        return kind()
