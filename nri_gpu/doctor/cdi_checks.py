"""The CDI specification of `nri-gpu cdi generate`, by which Docker and others that NRI does not reach get GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

from nri_gpu.cdi.spec_file import MASK, READ_MAX, STANDARD, names_of, overlaps, spec_files
from nri_gpu.cdi.specification import KIND
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import UNIT_FOLDERS, RunningProgram, is_enabled, is_installed, running, unit_of
from nri_gpu.doctor.runtimes import program_version, release_of
from nri_gpu.domain.finding import Finding, error, ok, warning
from nri_gpu.domain.text import listed
from nri_gpu.host.modules import PROC, module_version
from nri_gpu.system.storage import stat_of, text_of

_SETTINGS: Final = "/etc/docker/daemon.json"
KUBELETS: Final = frozenset({"kubelet", "k3s-server", "k3s-agent", "rke2", "kubelite"})
_WRITE: Final = (
    "systemctl enable --now nri-gpu-cdi.path && systemctl start nri-gpu-cdi",
    "journalctl -u nri-gpu-cdi -e    # if there is none then: says why",
)
_SETTINGS_MAX: Final = 256 << 10  # bytes
# Docker reads specifications from 25 on, and without being told to from 28.2 on (Docker's release notes).
_READS, _READS_BY_DEFAULT = (25,), (28, 2)


class DockerSettings(Struct, frozen=True):
    """Docker's daemon.json, as far as it decides who gets GPUs."""

    default_runtime: str = field(default="runc", name="default-runtime")
    features: Mapping[str, bool] = {}
    cdi_spec_dirs: tuple[str, ...] = field(default=tuple(map(str, STANDARD)), name="cdi-spec-dirs")


class _Node(Struct, frozen=True):
    path: str
    major: int = 0
    minor: int = 0


class _Mount(Struct, frozen=True):
    source: str = field(name="hostPath")


class _Edits(Struct, frozen=True):
    nodes: tuple[_Node, ...] = field(default=(), name="deviceNodes")
    mounts: tuple[_Mount, ...] = ()
    hooks: tuple[object, ...] = ()


class _Device(Struct, frozen=True):
    edits: _Edits = field(default=_Edits(), name="containerEdits")


class _Specification(Struct, frozen=True):
    kind: str
    devices: tuple[_Device, ...]
    edits: _Edits = field(default=_Edits(), name="containerEdits")

    @property
    def all_edits(self) -> tuple[_Edits, ...]:
        return (self.edits, *(each.edits for each in self.devices))


def serves_by_cdi(seen: Examined) -> bool:
    own = seen.at(UNIT_FOLDERS[0]) / "nri-gpu-cdi.path"  # the packages have theirs, used or not, elsewhere
    return is_enabled(seen, own.name) or own.exists() or any(_specifications(seen))


def serves_by_cdi_alone(seen: Examined) -> bool:
    """Return whether the node is made as docs/quickstart/docker.md says: nobody means to run the daemon here."""
    meant = is_enabled(seen, "nri-gpu.service") or not is_installed(seen, "nri-gpu.service") or seen.status
    return not meant and not any(running(seen.at("/proc"), KUBELETS)) and serves_by_cdi(seen)


class DockerEngine(Struct, frozen=True):
    """Docker, as it runs or would run. path: of its settings. settings: None if the file cannot be read."""

    process: RunningProgram | None
    unit: str
    path: str
    settings: DockerSettings | None


def docker_engine(seen: Examined) -> DockerEngine:
    """Return the node's Docker, whose settings are the defaults if it has no file. The snap's lie elsewhere."""
    process = next(running(seen.at("/proc"), {"dockerd"}), None)
    path = (process.option("--config-file") if process else "") or _SETTINGS
    unit = unit_of(seen, process, ("docker", "snap.docker.dockerd"))
    try:
        text = None if stat_of(seen.at(path)) is None else text_of(seen.at(path), _SETTINGS_MAX, "utf-8") or ""
        settings = DockerSettings() if text is None else msgspec.json.decode(text, type=DockerSettings)
    except (OSError, ValueError, RecursionError):
        settings = None
    return DockerEngine(process, unit, path, settings)


def cdi_findings(seen: Examined) -> Iterator[Finding]:
    """Check whether the specification is there, current and alone with its names, and whether Docker reads it."""
    found = dict(_specifications(seen))
    lost = tuple(_overlapping(seen, found))
    yield from lost
    if not found:
        yield _missing(seen)
    for path, specification in found.items():
        if stale := next(_stale(seen, specification), ""):
            yield error("CDI specification", f"{path} is out of date: {stale}", *_WRITE)
        elif not lost:
            yield ok("CDI specification", f"{path} names this node's GPUs and its driver's files")
    yield from _docker(seen, {str(Path(path).parent) for path in found if not lost})


def _missing(seen: Examined) -> Finding:
    """Return the finding without a file of ours: another program's may serve, and ours is not written beside it."""
    others = [f"{folder}/{path.name}" for folder in STANDARD for path in spec_files(seen.at(folder)) if names_of(path)]
    if others:
        return warning(
            "CDI specification",
            f"nri-gpu's is not there, and containers get GPUs by {listed(others)} instead",
            *_alone(*others),
            *_WRITE,
        )
    return error(
        "CDI specification",
        f"there is none of {KIND} in {listed(map(str, STANDARD))}, so no container can name a GPU",
        *_WRITE,
    )


def _overlapping(seen: Examined, found: Iterable[str]) -> Iterator[Finding]:
    """Yield the names that runtimes do not take from our files, each pair of files once."""
    folders = [seen.at(folder) for folder in STANDARD]
    every = [
        each for own in map(seen.at, found) for each in overlaps(own, names_of(own), folders) if each.counts != own
    ]
    for each in {frozenset(each.files): each for each in every}.values():
        meaning, other = (str(text).replace(f"{seen.root}/", "/") for text in (each, each.files[1]))
        yield (warning if each.counts else error)("CDI specification", meaning, *_alone(other))


def _alone(*others: str) -> tuple[str, ...]:
    return (
        f"{MASK}    # if it keeps that file; with toolkit 1.18 or 1.19: disable --now",
        f"rm {' '.join(others)}",
    )


def _specifications(seen: Examined) -> Iterator[tuple[str, _Specification]]:
    """Yield each specification of whole GPUs without hooks; nri-gpu's others, and NVIDIA's, are of other kinds."""
    for folder in STANDARD:
        for path in spec_files(seen.at(folder)):
            try:
                found = msgspec.json.decode(text_of(path, READ_MAX, "utf-8") or "", type=_Specification)
            except (ValueError, RecursionError):
                continue
            if found.kind == KIND and not any(each.hooks for each in found.all_edits):
                yield f"{folder}/{path.name}", found


def _stale(seen: Examined, specification: _Specification) -> Iterator[str]:
    """Yield each thing that the specification names and that is no longer so."""
    version = module_version(seen.at("/sys"), seen.at(PROC))
    for each in specification.all_edits:
        for node in each.nodes:
            there = stat_of(seen.at(node.path))
            if there is None or there.st_rdev != os.makedev(node.major, node.minor):
                yield f"{node.path} is not device {node.major}:{node.minor}"
        for mount in each.mounts:
            if stat_of(seen.at(mount.source)) is None:
                yield f"{mount.source} does not exist"
            if version and f"/{version}-" not in mount.source and "/nri-gpu/" in mount.source:
                yield f"module nvidia is {version}, and it mounts {mount.source}"


def _docker(seen: Examined, folders: set[str]) -> Iterator[Finding]:
    subject, engine = "Docker and CDI", docker_engine(seen)
    path, settings = engine.path, engine.settings
    if engine.process is None and stat_of(seen.at(path)) is None:
        return
    if settings is None:
        yield warning(subject, f"{path} is not what Docker reads", f"dockerd --validate --config-file {path}")
        return
    version = program_version(seen, "dockerd", engine.process)
    release = release_of(version)
    restart = f"systemctl restart {engine.unit}    # and with it its containers"
    switch = (f"# in {path}:", '"features": {"cdi": true}', restart)
    said = settings.features.get("cdi")
    read = {each.replace("/var/run/", "/run/") for each in settings.cdi_spec_dirs}
    unread = sorted(each for each in folders if each.replace("/var/run/", "/run/") not in read)
    if release and release < _READS:
        yield error(subject, f"Docker {version} reads no CDI specifications: it needs 25 or newer", "# upgrade it")
    elif said is False:
        yield error(subject, f"{path} switches CDI off, so `--device {KIND}=0` is refused", *switch)
    elif said is None and not (release and release >= _READS_BY_DEFAULT):
        what = f"Docker {version} reads" if version else "Docker 25 to 28.1 read"
        yield warning(subject, f"{what} CDI specifications only if {path} enables them, which it does not", *switch)
    elif unread:
        yield error(
            subject,
            f"{path} has Docker look in {listed(sorted(settings.cdi_spec_dirs))} (cdi-spec-dirs), and not in "
            f"{listed(unread)}",
            f"# in {path}, add to cdi-spec-dirs:",
            *(f'"{each}"' for each in unread),
            restart,
        )
    elif folders:
        yield ok(subject, f"Docker {version or '(version not known)'} reads it: `docker run --device {KIND}=0`")
