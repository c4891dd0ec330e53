"""The owner of a process or a container: what is ended at once, and what ends it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from shlex import quote
from typing import Final

from msgspec import Struct

from nri_gpu.blockers.blocker import BlockerKind
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.text import shown
from nri_gpu.mps.mps_daemon import CONTROL, SERVER
from nri_gpu.stray.judge import container_of
from nri_gpu.stray.uses import Use
from nri_gpu.verify.oci_bundles import NAME_MAX, Bundle

PIDS_MAX: Final = 32  # in a line to copy
_DELETED: Final = " (deleted)"  # follows the path of a program that was replaced (proc(5), exe)
OUR_UNIT: Final = "nri-gpu.service"  # our MPS daemons outlive it (KillMode=process)
_DOCKER: Final = "moby"  # Docker's namespace in containerd
# Programs of which more is known than their unit, by their names.
_PROGRAMS: Final = {
    **dict.fromkeys((CONTROL, SERVER), BlockerKind.MPS),
    **dict.fromkeys(
        ("Xorg", "Xwayland", "X", "gnome-shell", "kwin_wayland", "kwin_x11", "weston", "sway", "mutter", "plasmashell"),
        BlockerKind.DISPLAY,
    ),
    **dict.fromkeys(("nv-hostengine", "dcgm-exporter"), BlockerKind.MONITOR),
    **dict.fromkeys(("nv-fabricmanager", "nvlsm", "nvidia-imex"), BlockerKind.FABRIC),
    "nvidia-persistenced": BlockerKind.PERSISTENCE,
}
# What stops a container that no containerd here knows, by a word in the names of its cgroups.
_ENGINES: Final = {
    "docker": ("docker stop {}",),
    "libpod": ("podman stop {}",),
    "crio": ("crictl inspect {}", "# that names its pod: have kubectl end it"),
}


class MpsProcess(Struct, frozen=True):
    """A process of MPS. daemon: the pid of its control daemon, or its own. pipe: that daemon's folder."""

    daemon: int
    pipe: str


class BlockerOwner(Struct, frozen=True, kw_only=True):
    """A thing that is ended at once. name: for people. The rest says how it is ended, and is empty where unused."""

    kind: BlockerKind
    name: str
    namespace: str = ""  # of a pod
    pod: str = ""
    stop: tuple[str, ...] = ()  # what stops a container or an MPS daemon
    unit: str = ""
    manifest: str = ""  # of a static pod
    cgroups: tuple[str, ...] = ()  # of processes that belong to nothing else


class Containers:
    """The containers that have a bundle. manifests: of static pods, by the names there."""

    def __init__(self, bundles: Iterable[Bundle], manifests: Mapping[str, str]) -> None:
        self.bundles = {ContainerId(bundle.id): bundle for bundle in bundles}
        self._manifests = manifests
        self._paths = {f"/{bundle.namespace}/{bundle.id}": ContainerId(bundle.id) for bundle in self.bundles.values()}

    def knows(self, container_id: ContainerId) -> bool:
        return container_id in self.bundles

    def id_of(self, use: Use) -> ContainerId | None:
        """Return the container that a process is in, which `ctr run` may have given any id."""
        prefixes = ("/".join(path.split("/")[:3]) for path in use.cgroups)
        return container_of(use.cgroups, self) or next(
            (self._paths[each] for each in prefixes if each in self._paths), None
        )

    def owner(self, bundle: Bundle) -> BlockerOwner:
        """Return a container's pod, or itself."""
        if not bundle.pod_name:
            id_, namespace = _word(bundle.id), _word(bundle.namespace)
            stop = f"docker stop {id_}" if bundle.namespace == _DOCKER else f"ctr -n {namespace} task rm -f {id_}"
            return BlockerOwner(kind=BlockerKind.CONTAINER, name=f"{bundle.pod} {bundle.name}", stop=(stop,))
        namespace, name = bundle.pod_namespace, bundle.pod_name
        if bundle.static:
            known = sorted((each for each in self._manifests if name.startswith(f"{each}-")), key=len)
            manifest = self._manifests[known[-1]] if known else ""
            return BlockerOwner(
                kind=BlockerKind.STATIC_POD, name=bundle.pod, namespace=namespace, pod=name, manifest=manifest
            )
        return BlockerOwner(kind=BlockerKind.POD, name=bundle.pod, namespace=namespace, pod=name)


def owner_of(use: Use, containers: Containers, mps: Mapping[int, MpsProcess]) -> BlockerOwner:
    """Return what a process belongs to: a container first, then what is known of its program, then its unit."""
    if id_ := containers.id_of(use):
        bundle = containers.bundles.get(id_)
        return containers.owner(bundle) if bundle else _unknown_container(use, id_)
    program = use.program.removesuffix(_DELETED).rpartition("/")[2]
    kind, unit = _PROGRAMS.get(program), _unit(use.cgroups)
    if kind is BlockerKind.MPS and (daemon := mps.get(use.pid)) and (unit in ("", OUR_UNIT)):
        stop = f"echo quit | CUDA_MPS_PIPE_DIRECTORY={_word(daemon.pipe)} {CONTROL}"
        return BlockerOwner(kind=kind, name=f"with pid {daemon.daemon}", stop=(stop,))
    if unit:
        return BlockerOwner(kind=kind or BlockerKind.UNIT, name=_shown(unit), unit=unit)
    name = next(_sessions(use.cgroups), "") if kind is None else program
    apart = () if name else use.cgroups
    return BlockerOwner(kind=kind or BlockerKind.PROCESS, name=name or _shown(use.program), cgroups=apart)


def _unknown_container(use: Use, id_: ContainerId) -> BlockerOwner:
    """Return a container of Podman, CRI-O or another runtime than containerd; a user's is ended by its processes."""
    parts = [part for path in use.cgroups for part in path.split("/")]
    words = (word for word in _ENGINES if any(part == word or part.startswith(f"{word}-") for part in parts))
    stop = _ENGINES.get(next(words, ""), ())
    user = next(_sessions(use.cgroups), "")
    name = f"{id_[:12]} of {user}" if user else id_[:12]
    return BlockerOwner(
        kind=BlockerKind.CONTAINER, name=name, stop=() if user else tuple(each.format(id_) for each in stop)
    )


def _unit(cgroups: Iterable[str]) -> str:
    """Return the system's unit of a process, or empty. A service may give any name to the cgroups below its own."""
    for path in cgroups:
        top, *parts = path.removeprefix("/").split("/")
        unit = next((part for part in parts if not part.endswith(".slice")), "")
        if top == "system.slice" and unit.endswith((".service", ".scope")):
            return unit
    return ""


def _sessions(cgroups: Iterable[str]) -> Iterator[str]:
    """Yield `session 3 of user 1000` or `user 1000`, for a process of a user's."""
    for path in cgroups:
        match path.split("/"):
            case ["", "user.slice", user, *below] if user.startswith("user-"):
                name = f"user {_shown(user.removeprefix('user-').removesuffix('.slice'))}"
                scope = below[0] if below else ""
                session = scope.removeprefix("session-").removesuffix(".scope") if scope.startswith("session-") else ""
                yield f"session {_shown(session)} of {name}" if session else name


def endings(owner: BlockerOwner, processes: Iterable[Use]) -> tuple[str, ...]:
    """Return the lines that end it: commands to copy, and what to know beside them."""
    found = tuple(processes)
    stuck = [str(use.pid) for use in found if use.waits]
    more = (
        f"# pid {', '.join(stuck[:PIDS_MAX])} waits in the kernel: if it does not end, only a reboot ends it",
    ) * bool(stuck)
    return (*_commands(owner, found), *more)


def _commands(owner: BlockerOwner, processes: tuple[Use, ...]) -> Iterator[str]:
    if owner.kind is BlockerKind.POD:
        namespace, pod = f"-n {_word(owner.namespace)}", f"pod {_word(owner.pod)}"
        yield f"kubectl {namespace} get {pod} -o jsonpath='{{.metadata.ownerReferences}}'"
        yield "# scale down what owns it, or drain the node; if nothing owns it:"
        yield f"kubectl {namespace} delete {pod}"
    elif owner.kind is BlockerKind.STATIC_POD and owner.manifest:
        yield f"mv {_word(owner.manifest)} /root/"
        yield "# the kubelet ends a static pod whose manifest is gone"
    elif owner.kind is BlockerKind.STATIC_POD:
        yield "# move its manifest out of the kubelet's staticPodPath, which /var/lib/kubelet/config.yaml names"
    elif owner.stop:
        yield from owner.stop
    elif owner.unit == OUR_UNIT:
        yield "# it waits for events of GPUs that containers hold, and lets go once none does;"
        yield '# if it does not: events = "held" below [health] in the policy, and systemctl reload nri-gpu'
    elif owner.unit:
        yield f"systemctl stop {_word(owner.unit)}"
    elif owner.kind is BlockerKind.DISPLAY:
        yield "# this ends all graphical sessions, and what runs in them:"
        yield "systemctl isolate multi-user.target"
    elif processes:
        pids = [str(use.pid) for use in processes]
        yield f"kill {' '.join(pids[:PIDS_MAX])}"
        if len(pids) > PIDS_MAX:
            yield f"# and {len(pids) - PIDS_MAX} more: look again then"


def _shown(text: str) -> str:
    return shown(text, NAME_MAX)


def _word(text: str) -> str:
    """Return a word for a shell, of a name that anybody may have chosen."""
    return quote(_shown(text))
