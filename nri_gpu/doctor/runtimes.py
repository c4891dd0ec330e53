"""The container runtime that runs on the node, its version and its settings."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.doctor.distributions import (
    DISTRIBUTIONS,
    Distribution,
    distribution_of,
    is_here,
    template_of,
    without_default_runtime,
    written_anew,
)
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import RunningProgram, running, shares_mounts, unit_of
from nri_gpu.doctor.runtime_settings import (
    CONFIGS,
    CRI_PLUGINS,
    IMAGES,
    NRI,
    TEXT_MAX,
    ContainerdSettings,
    CrioSettings,
    FileFault,
    NriSettings,
    containerd_settings,
    crio_settings,
)
from nri_gpu.domain.text import listed
from nri_gpu.system.child import run
from nri_gpu.system.sockets import file_at, file_of, listening
from nri_gpu.system.storage import is_there, text_of, why_untrusted

_UNITS: Final = {"containerd": ("containerd",), "crio": ("crio", "cri-o")}
VERSION_LIMIT_S: Final = 0.5
_VERSION: Final = re.compile(r"\bv?([0-9]+)\.([0-9]+)\.([0-9]+)")
_PROGRAMS: Final = ("/usr/", "/opt/", "/var/lib/rancher/", "/var/lib/k0s/", "/snap/", "/nix/store/")
NRI_BY_DEFAULT: Final = {"containerd": (2,), "crio": (1, 30)}


class ContainerRuntime(Struct, frozen=True, kw_only=True):
    """The runtime that this node has."""

    name: str  # `containerd` or `crio`
    process: RunningProgram | None  # None if none is seen to run
    version: str  # empty if unknown
    config: str  # its main file
    nri: NriSettings
    service: str  # its unit
    distribution: Distribution | None = None
    files: tuple[str, ...] = ()
    written_anew: tuple[str, ...] = ()  # files in which a change is lost
    template: str = ""  # the file that counts instead
    said: Mapping[str, tuple[str, ...]] = {}  # as in ContainerdSettings
    faults: tuple[FileFault, ...] = ()
    containerd: ContainerdSettings | None = None  # its own settings
    default_handler: str = ""  # the OCI runtime of pods that ask for none
    supervisor: int = 0  # the pid of its distribution, if that runs without it
    listens: int = 0  # the inode of its socket where nri-gpu connects, or 0
    beside: tuple[ContainerRuntime, ...] = ()  # the node's other runtimes
    certain: bool = True  # False if two listen there, and whose file it is cannot be seen

    @property
    def dockers(self) -> bool:
        """Return whether Docker configured and started the runtime: without CRI, and for its own containers."""
        return "/run/docker/" in self.config

    @property
    def title(self) -> str:
        return f"{'CRI-O' if self.name == 'crio' else self.name} {self.version or '(version not known)'}"

    def __str__(self) -> str:
        none = f"{self.config}, which cannot be read" if self.faults else f"no file at {self.config}: built-in defaults"
        files = "Docker" if self.dockers else listed(self.files) or none
        return f"{self.title}, pid {self.process.pid}, configured by {files}" if self.process else self.title

    @property
    def release(self) -> tuple[int, ...] | None:
        return release_of(self.version)

    @property
    def kind(self) -> tuple[str, tuple[int, ...] | None]:
        return self.name, self.release

    @property
    def nri_enabled(self) -> bool | None:
        """Return whether NRI is on, or None if neither file nor version tells."""
        if self.nri.disable is not None:
            return not self.nri.disable
        if self.release:
            return self.release >= NRI_BY_DEFAULT[self.name]
        return True if self.containerd and self.containerd.version > 2 else None

    def edit(self, table: str, title: str, line: str) -> tuple[str, ...]:
        """Return where to write a line in the runtime's files, and the restart it takes. table: a key of `said`."""
        missing = self.containerd and not self.files and not self.faults
        new = (f"containerd config default > {self.config}",) if missing else ()
        places = self.places(f"{table}.{line.partition(' ')[0]}")
        where = (f"# in {file}, {title}:" for file in places)
        return (*new, *where, line, *self.lasting(places), *self.restart)

    def default_to_runc(self, seen: Examined) -> tuple[str, ...]:
        """Return where to make runc the default runtime, and the restart that it takes.

        seen: a distribution's own configuration may name another one, and its containerd's file then follows.
        """
        if self.containerd is None:
            return self.edit("runtime", "below [crio.runtime]", 'default_runtime = "crun"')
        (place, *_) = self.said.get("cri.containerd.default_runtime_name", ("",))
        ours = self.distribution
        template = text_of(seen.at(self.template.partition(",")[0]), TEXT_MAX, "utf-8") or ""
        if ours and ours.own and place in self.written_anew and "default_runtime_name" not in template:
            return (*without_default_runtime(seen, ours, self.service), *self.restart_with_cri)
        title = "below the CRI plugin's [containerd] table"
        return (*self.edit("cri.containerd", title, 'default_runtime_name = "runc"')[:-1], *self.restart_with_cri)

    def enable(self, plugins: Iterable[str]) -> tuple[str, ...]:
        """Return the files from which to take disabled plugins, each entry out of all files that have it."""
        where = [(each, file) for each in plugins for file in self.places(f"disabled_plugins.{each}")]
        lines = (f'# in {file}, take "{each}" out of disabled_plugins' for each, file in where)
        return (*lines, *self.lasting(file for _, file in where), *self.restart)

    def lasting(self, places: Iterable[str]) -> tuple[str, ...]:
        """Return where a change of these files outlives the next boot, if they are written anew there."""
        ours = self.distribution
        return (ours.lasts,) if ours and ours.lasts and {*places} & {*self._anew} else ()

    @property
    def _anew(self) -> tuple[str, ...]:
        return self.written_anew or (self.config,) * (not self.files)

    @property
    def upgrade(self) -> str:
        ours = self.distribution
        return f"# upgrade {ours.title}, which brings this {self.name}" if ours else f"apt install {self.name}"

    @property
    def ends_at_start(self) -> bool:
        """Return whether the runtime does not start with its files as they are."""
        return any(not each.unseen for each in self.faults)

    @property
    def restart(self) -> tuple[str, ...]:
        return (self._fix_first,) if self.cri_fault else self.restart_with_cri

    @property
    def _fix_first(self) -> str:
        return f"# fix the configuration of {self.name} first (see above): until then it must not end"

    @property
    def restart_with_cri(self) -> tuple[str, ...]:
        """Return the restart once CRI's fault is mended."""
        if self.ends_at_start:
            return (self._fix_first,)
        if not self.certain:
            return ("# settle first which of the two runtimes nri-gpu is to serve (see above)",)
        return (f"systemctl restart {self.service}    # containers go on running",)

    def places(self, key: str) -> tuple[str, ...]:
        """Return the files in which a setting counts: those that have it last, or its table, or else the main file."""
        while key and key not in self.said:
            key = key.rpartition(".")[0]
        hidden = bool(key and self.release and self.release < (2,))  # by a drop-in with the same plugin
        return tuple(dict.fromkeys(self.place(each, hidden=hidden) for each in self.said.get(key, (self.config,))))

    def place(self, file: str, *, hidden: bool = False) -> str:
        """Return the file, or the one to change instead if the file is written anew.

        hidden: whether a drop-in would hide other settings in that file.
        """
        ours = self.distribution
        if not ours or not ours.template or file not in self._anew:
            return file
        settings = self.containerd or ContainerdSettings()
        for pattern in settings.imports if not hidden else ():
            if pattern.endswith(".toml.d/*.toml"):
                return pattern.replace("*", "nri-gpu")
        return self.template

    @property
    def disabled_cri(self) -> tuple[str, ...]:
        """Return the disabled plugins without which this containerd has no CRI."""
        first = self.release is not None and self.release < (2,)
        needed = CRI_PLUGINS[1:] if first else (*CRI_PLUGINS, IMAGES)
        return tuple(each for each in needed if self.containerd and each in self.containerd.disabled_plugins)

    @property
    def opens_nri(self) -> bool:
        """Return whether the runtime makes an NRI socket when it starts, and removes whatever lies in its place."""
        off = self.nri.disable_connections or (self.containerd and NRI in self.containerd.disabled_plugins)
        return not self.disabled_cri and self.cri_fault is None and self.nri_enabled is True and not off

    @property
    def cri_fault(self) -> FileFault | None:
        return self.containerd.cri_fault if self.containerd and not self.disabled_cri else None


def release_of(version: str) -> tuple[int, ...] | None:
    """Return (2, 1, 9) for `2.1.9`, `v2.1.9~ds1` and so on, or None."""
    match = _VERSION.search(version)
    return tuple(map(int, match.groups())) if match else None


def container_runtime(seen: Examined) -> ContainerRuntime | None:
    """Return the runtime with the NRI socket, else the one whose version the daemon names, else one with CRI and NRI.

    A containerd that starts removes whatever NRI socket lies there; a second one, whose it was, goes on listening.
    """
    processes = [*running(seen.at("/proc"), {"containerd", "crio"})]
    here = [each for each in processes if shares_mounts(seen.at("/proc"), each.pid) or unit_of(seen, each, ("",))]
    found = [_described(seen, process.name, process) for process in here or processes]
    if all(each.disabled_cri for each in found):
        found += _without_theirs(seen, [each.distribution for each in found])
    if not found:
        found = [_described(seen, name, None) for name, path in CONFIGS.items() if is_there(seen.at(path))]
    bound = [each for each in found if each.listens]
    file = file_at(seen.at(seen.policy.plugin.socket))
    owners = [each for each in bound if len(bound) == 1 or (file and file_of(each.listens) == file)]
    told = seen.status.runtime if seen.status else None
    named = [each for each in found if told and (told.name.replace("-", ""), release_of(told.version)) == each.kind]
    if not found:
        return None
    likely = max(
        found, key=lambda each: (not each.disabled_cri, same_socket(seen, each.nri.socket_path), each.opens_nri)
    )
    chosen = (owners or bound or (named if len(named) == 1 else [likely]))[0]
    beside = tuple(each for each in found if each is not chosen)
    if told and not chosen.version and (owners or not beside) and told.name.replace("-", "") == chosen.name:
        chosen = _described(seen, chosen.name, chosen.process, told.version)
    return replace(chosen, beside=beside, certain=bool(owners) or len(bound) < 2)


def _without_theirs(seen: Examined, running_here: Collection[Distribution | None]) -> Iterator[ContainerRuntime]:
    """Yield the containerd of each distribution here that has none running: its file may keep it from starting."""
    for each in DISTRIBUTIONS:
        if each in running_here or each.signs:
            continue
        supervisor = next(running(seen.at("/proc"), each.programs), None)
        if supervisor or is_here(seen, each):
            described = _described(seen, "containerd", None, config=each.config)
            pid = supervisor.pid if supervisor else 0
            yield replace(described, supervisor=pid, service=unit_of(seen, supervisor, each.units))


def _described(
    seen: Examined, name: str, process: RunningProgram | None, told: str = "", config: str = ""
) -> ContainerRuntime:
    """Return the runtime. told: its version, if its program does not say. config: its main file, if no process does."""
    config = config or (process and process.option("-c", "--config", "-config")) or CONFIGS[name]
    distribution = distribution_of(seen, config, unit_of(seen, process, ("",)))
    others = distribution and not distribution.signs
    version = told or ("" if others and not process else program_version(seen, name, process))
    settings: ContainerdSettings | None = None
    found: ContainerdSettings | CrioSettings
    if name == "crio":
        found = crio_settings(seen.root, config)
        handler = found.handler
    else:
        settings = containerd_settings(seen.root, config, release_of(version))
        found, handler = settings, settings.cri.containerd.default_runtime_name
    version_read = settings.version if settings and settings.files else 0
    sockets = listening(seen.at(f"/proc/{process.pid}")) if process else ()
    return ContainerRuntime(
        name=name,
        process=process,
        version=version,
        config=config,
        service=unit_of(seen, process, distribution.units if distribution else _UNITS[name]),
        distribution=distribution,
        written_anew=tuple(written_anew(seen, distribution, config, found.files)),
        template=template_of(seen, distribution, config, version_read) if distribution else "",
        nri=found.nri,
        files=found.files,
        faults=found.faults,
        said=found.said,
        containerd=settings,
        default_handler=handler,
        listens=next((inode for path, inode in sockets if same_socket(seen, path)), 0),
    )


def program_version(seen: Examined, name: str, process: RunningProgram | None) -> str:
    """Return the version that a program prints, or empty if it may not be run.

    Anybody can call a process `containerd`, and in a container give it any file. So only a file of the node is run, of
    that name, in a folder of programs, that root alone can change.
    """
    try:
        path = seen.at(f"/proc/{process.pid}/exe").readlink() if process else Path("/usr/bin", name)
        program = seen.at(path)
        if path.name != name or not str(path).startswith(_PROGRAMS) or why_untrusted(program.stat()):
            return ""
        ended = asyncio.run(run([str(program), "--version"], VERSION_LIMIT_S))
    except (OSError, ValueError):
        return ""
    match = _VERSION.search(ended.output.decode(errors="replace"))
    return match[0].removeprefix("v") if match else ""


def in_path(seen: Examined, process: RunningProgram, program: str) -> str | None:
    """Return where a process's PATH finds a program, or empty if it does not, or None if the PATH cannot be read."""
    text = text_of(seen.at(f"/proc/{process.pid}/environ"), encoding="utf-8")
    if text is None:
        return None
    path = next((each.removeprefix("PATH=") for each in text.split("\0") if each.startswith("PATH=")), "")
    places = (f"{folder}/{program}" for folder in path.split(":") if folder.startswith("/"))
    return next((place for place in places if is_there(seen.at(place))), "")


def same_socket(seen: Examined, path: str) -> bool:
    """Return whether a path leads to the NRI socket that the policy names; /var/run is mostly a link."""
    ours = seen.policy.plugin.socket
    if path.replace("/var/run/", "/run/", 1) == ours.replace("/var/run/", "/run/", 1):
        return True
    return os.path.realpath(seen.at(path)) == os.path.realpath(seen.at(ours))
