"""Containers and pods from protobuf to our types, and replies back to protobuf.

Decoding is most of what passing a container through costs, so `may_concern` looks at the raw bytes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from google.protobuf.message import DecodeError as DecodeError
from msgspec import Struct

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import FRACTION, FRACTION_MIB, GROUP
from nri_gpu.domain.container import MARKERS_MAX, Container, ContainerId, DeviceNumber, DeviceRef, Pod, PodId, PodUid
from nri_gpu.domain.edits import Edits, staged_below
from nri_gpu.domain.errors import TooManyEntriesError
from nri_gpu.domain.mps import CLIENT_VARIABLES, PIPE_FOLDER, PIPE_PLACE, PIPE_VARIABLE, SHM_PLACE
from nri_gpu.domain.names import CHECKPOINTED_KEY, MARKER_PREFIX, NVIDIA_HOOKS, RESTORED_KEY
from nri_gpu.request.environment import CAPABILITIES, CAPABILITIES_MAX
from nri_gpu.request.image_requirements import CUDA_VERSION, DISABLE, JETPACK, TOTAL_MAX, concerns
from nri_gpu.request.image_requirements import PREFIX as REQUIRE

PREFIX: Final = "gpu.nri.io"
# The variables that we add to, override or obey. Only they and an image's requirements are kept: no other can get into
# a log.
READ_ENV: Final = ("LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", CAPABILITIES, *CLIENT_VARIABLES)
_READ_ENV_STARTS: Final = (*(f"{name}=" for name in (*READ_ENV, CUDA_VERSION, DISABLE)), REQUIRE)
VISIBLE_NEEDLE: Final = b"NVIDIA_VISIBLE_DEVICES"
MARKER_NEEDLE: Final = MARKER_PREFIX.encode()
NODE_NEEDLE: Final = b"/dev/nvidia"
_MARKER_CHARS: Final = 512  # of a name, and of a value: several times what they need
# Variables read of a container that exists: what may be a request, and its seat at an MPS daemon.
_KEPT_ENV_STARTS: Final = (*(f"{name}=" for name in ("NVIDIA_VISIBLE_DEVICES", *CLIENT_VARIABLES)), MARKER_PREFIX)
_NOTHING: Final = frozenset[str]()
_NO_RULES: Final = (False, False, frozenset[DeviceNumber]())
_OWN_PLACES: Final = frozenset({"/dev", SHM_PLACE})
EMPTY: Final = b""  # the encoding of every message without content
# Entries of one kind in one container or pod that is being created. Each takes a microsecond to read and two bytes to
# write; a container with the variables of 2,000 services has 14,000.
ENTRIES_MAX: Final = 16_384
# Types of nodes of character devices. A block device may have a GPU's numbers and is no GPU: both are counted apart
# (OCI runtime-spec: config-linux.md, Devices).
CHARACTER: Final = ("c", "u")
# The beginning of a rule that allows a character device. Most containers have neither rules nor nodes of their own.
_OPENS: Final = pb.LinuxDeviceCgroup(allow=True, type="c").SerializeToString()
# Beginnings of rules that may allow everything: next come the access, a type, a major or a minor.
_ALLOWS: Final = tuple(
    pb.LinuxDeviceCgroup(allow=True).SerializeToString() + following
    for following in (b"*", b"\x12\x01a", b"\x1a", b'"')
)


def may_concern(payload: bytes, nvidia_major: int | None, *, environment: bool, stage_dir: str = "") -> bool:
    """Return whether CreateContainer may need more than a pass, and so has to be decoded.

    It may if it has one of our annotations, a marker of a ResourceClaim, a device node of NVIDIA's by name or, if that
    is known, by number, a rule that opens devices, or a mount of driver files that we staged. environment: or the
    variable that policy has us read. A false alarm costs one decoding.
    """
    if PREFIX.encode() in payload or MARKER_NEEDLE in payload or NODE_NEEDLE in payload or _OPENS in payload:
        return True
    return (
        bool(stage_dir and stage_dir.encode() in payload)
        or (environment and VISIBLE_NEEDLE in payload)
        or (nvidia_major is not None and pb.LinuxDevice(major=nvidia_major).SerializeToString() in payload)
    )


def may_ask(payload: bytes, by_environment: Callable[[], bool]) -> bool:
    """Return whether a request may ask for GPUs: by annotation, by claim, or by environment, as every CUDA image does.

    by_environment: whether policy lets anybody ask by environment; called only if it matters.
    """
    if PREFIX.encode() in payload or MARKER_NEEDLE in payload:
        return True
    return VISIBLE_NEEDLE in payload and by_environment()


class Configured(Struct, frozen=True):
    """The runtime's introduction. nri_version: empty below 0.12. request_timeout_ms: 0 below 0.7."""

    runtime: str
    version: str
    nri_version: str
    request_timeout_ms: int
    config: str

    @property
    def from_nri_0_7(self) -> bool:
        """Return whether it has NRI 0.7 or newer, which splits Synchronize and removes mounts.

        Older ones lack both fields.
        """
        return bool(self.request_timeout_ms or self.nri_version)


def register_to_pb(name: str, index: str, nri_version: str) -> bytes:
    return pb.RegisterPluginRequest(plugin_name=name, plugin_idx=index, NRI_version=nri_version).SerializeToString()


def configured_from_pb(payload: bytes) -> Configured:
    message = pb.ConfigureRequest.FromString(payload)
    return Configured(
        runtime=message.runtime_name,
        version=message.runtime_version,
        nri_version=message.NRI_version,
        request_timeout_ms=message.request_timeout,
        config=message.config,
    )


def configured_to_pb(event_mask: int) -> bytes:
    return pb.ConfigureResponse(events=event_mask).SerializeToString()


def synchronize_to_pb(*, more: bool) -> bytes:
    """Encode a SynchronizeResponse without updates."""
    return pb.SynchronizeResponse(more=more).SerializeToString()


def request_from_pb(payload: bytes, stage_dir: str = "") -> Container:
    """Decode a CreateContainerRequest. stage_dir: as of `container_from_pb`. Raises: TooManyEntriesError."""
    message = pb.CreateContainerRequest.FromString(payload)
    _check_entries(message)
    mounting = stage_dir if stage_dir.encode() in payload else ""
    return container_from_pb(message.container, pod_from_pb(message.pod), stage_dir=mounting)


def pod_from_pb(pod: pb.PodSandbox) -> Pod:
    """Convert a pod; if it has no uid (a hand-made one) its sandbox id serves."""
    labels = pod.labels
    return Pod(
        id=PodId(pod.id),
        uid=PodUid(pod.uid or pod.id),
        name=pod.name,
        namespace=pod.namespace,
        annotations=our_annotations(pod.annotations) | _fraction(pod),
        runtime_handler=pod.runtime_handler,
        labels={key: labels[key] for key in labels},
        cgroup_parent=pod.linux.cgroup_parent,
    )


def is_privileged(payload: bytes) -> bool:
    """Return whether the container of a CreateContainer may use every device. It is decoded only if it may be so."""
    if not any(each in payload for each in _ALLOWS):
        return False
    return _rules(pb.CreateContainerRequest.FromString(payload).container.linux.resources.devices)[0]


def container_from_pb(
    container: pb.Container, pod: Pod, *, exists: bool = False, armed: bool = True, stage_dir: str = ""
) -> Container:
    """Convert a container, with as much of it as a decision reads.

    exists: without mounts, and of env with what may be a request alone; the rest is read only of a container that is to
    be created: it is half of the work, and Synchronize has thousands. armed: such variables may be among them.
    stage_dir: where driver files are staged, without symlinks, or empty if nothing of it can be mounted.
    """
    given: Sequence[str] = container.env
    if exists:
        given = [each for each in given if each.startswith(_KEPT_ENV_STARTS)] if armed else ()
    env, env_twice, required = read_env(given)
    linux, resources = container.linux, container.linux.resources
    privileged, wildcard, opened = _rules(rules) if (rules := resources.devices) else _NO_RULES
    return Container(
        id=ContainerId(container.id),
        name=container.name,
        pod=pod,
        annotations=our_annotations(container.annotations),
        env=env,
        env_twice=env_twice,
        requirement_chars=required,
        devices=_characters(devices) if (devices := linux.devices) else (),
        mounts=_NOTHING if exists else _destinations(container.mounts, pod),
        cdi_devices=tuple([device.name for device in named]) if (named := container.CDI_devices) else (),
        nvidia_hooks=frozenset(_nvidia_hooks(container.hooks)) if container.HasField("hooks") else _NOTHING,
        rlimits=frozenset([limit.type for limit in limits]) if (limits := container.rlimits) else _NOTHING,
        pinned=_pinned(resources),
        privileged=privileged,
        opened=opened,
        wildcard=wildcard,
        staged=staged_below(stage_dir, [mount.source for mount in container.mounts]) if stage_dir else _NOTHING,
        uid=_uid(container) if container.HasField("user") else None,
        mps_folder=_mps_folder(container.mounts) if PIPE_VARIABLE in env else "",
        markers=read_markers(given),
        restored=CHECKPOINTED_KEY in container.annotations and container.annotations.get(RESTORED_KEY) == "true",
    )


def reply_to_pb(edits: Edits, container: Container | None = None) -> bytes:
    """Encode a CreateContainerResponse. Mode, uid and gid are always written, so no runtime guesses them.

    container: as the request shows it, with what plugins before ours added. If two plugins set the same variable,
    device or mount, the runtime refuses the container, unless the second removes it first (containerd/nri:
    pkg/adaptation/result.go). What no plugin added is not removed by that.
    """
    reply = pb.CreateContainerResponse()
    adjust = reply.adjust
    if container:
        for variable in sorted(edits.env.keys() & container.env):
            adjust.env.add(key=f"-{variable}")
        for path in sorted(edits.devices.keys() & {device.path for device in container.devices}):
            adjust.linux.devices.add(path=f"-{path}")
        for destination in sorted(edits.mounts.keys() & container.mounts):
            adjust.mounts.add(destination=f"-{destination}")
    for destination, mount in edits.mounts.items():
        adjust.mounts.add(destination=destination, type="bind", source=mount.source, options=mount.options)
    for key, value in edits.env.items():
        adjust.env.add(key=key, value=value)
    for path, node in edits.devices.items():
        device = adjust.linux.devices.add(path=path, type="c", major=node.major, minor=node.minor)
        device.file_mode.value = node.mode
        device.uid.value = node.uid
        device.gid.value = node.gid
    for limit in edits.rlimits.values():
        adjust.rlimits.add(type=limit.type, hard=limit.hard, soft=limit.soft)
    # Only what is set: a message that is there but empty would already claim the container's CPUs for us.
    if edits.cpuset_cpus:
        adjust.linux.resources.cpu.cpus = edits.cpuset_cpus
    if edits.cpuset_mems:
        adjust.linux.resources.cpu.mems = edits.cpuset_mems
    return reply.SerializeToString()


def without_mount_to_pb(destination: str) -> bytes:
    """Encode a CreateContainerResponse that removes a mount (from NRI 0.7).

    It is appended to another response's bytes.
    """
    mount = pb.Mount(destination=f"-{destination}")
    return pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(mounts=[mount])).SerializeToString()


def annotation_to_pb(key: str, value: str) -> bytes:
    """Encode a CreateContainerResponse with one annotation.

    It is appended to another response's bytes: protobuf merges them.
    """
    return pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(annotations={key: value})).SerializeToString()


def _check_entries(message: pb.CreateContainerRequest) -> None:
    """Count the entries before any is read: a request of half a MiB has room for 200,000."""
    pod, container, linux = message.pod, message.container, message.container.linux
    hooks = container.hooks
    counts = {
        "variables": len(container.env),
        "mounts": len(container.mounts),
        "devices": len(linux.devices),
        "device rules": len(linux.resources.devices),
        "CDI devices": len(container.CDI_devices),
        "rlimits": len(container.rlimits),
        "namespaces": len(linux.namespaces),
        "hooks": sum(len(getattr(hooks, stage.name)) for stage in hooks.DESCRIPTOR.fields),
        "annotations": len(container.annotations),
        "annotations on its pod": len(pod.annotations),
        "labels on its pod": len(pod.labels),
    }
    for what, count in counts.items():
        if count > ENTRIES_MAX:
            raise TooManyEntriesError(what, count, ENTRIES_MAX)


def our_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    # By key: a protobuf map yields its keys four times faster than its items.
    return {key: annotations[key] for key in annotations if key.startswith(PREFIX)}


def _fraction(pod: pb.PodSandbox) -> dict[str, str]:
    """Return the annotations by which a scheduler of fractions was asked for a part of a GPU."""
    if not any(key.startswith(GROUP) for key in pod.labels):
        return {}
    return {key: pod.annotations[key] for key in (FRACTION, FRACTION_MIB) if key in pod.annotations}


def read_env(env: Iterable[str]) -> tuple[dict[str, str], frozenset[str], int]:
    """Return the variables we read, the names that come twice, and the characters of all requirements.

    The last of a name wins, as in the program. Requirements past what is checked are counted and not read, and of
    NVIDIA_DRIVER_CAPABILITIES no more than one character beyond what is read of it.
    """
    ours: list[str] = []
    required = 0
    for entry in env:
        if not entry.startswith(_READ_ENV_STARTS):
            continue
        if entry.startswith(REQUIRE) and not entry.startswith(JETPACK):
            required += len(entry) - 1  # without its equals sign
            if required > TOTAL_MAX:
                continue
        ours.append(entry)
    if not ours:
        return {}, _NOTHING, required
    parts = [entry.partition("=") for entry in ours]
    pairs = [(name, value) for name, equals, value in parts if equals and (name in READ_ENV or concerns(name))]
    times = Counter(name for name, _ in pairs)
    read = dict(pairs)
    if CAPABILITIES in read:
        read[CAPABILITIES] = read[CAPABILITIES][: CAPABILITIES_MAX + 1]
    return read, frozenset(name for name, number in times.items() if number > 1), required


def read_markers(env: Iterable[str]) -> dict[str, str]:
    """Return the variables that name devices of ResourceClaims; the last of a name wins.

    A name or value that is too long is cut, and so invalid. One variable more than may be shows that there are too
    many.
    """
    found: dict[str, str] = {}
    for entry in env:
        if entry.startswith(MARKER_PREFIX):
            name, _, value = entry.partition("=")
            found[name[:_MARKER_CHARS]] = value[:_MARKER_CHARS]
            if len(found) > MARKERS_MAX:
                break
    return found


def _nvidia_hooks(hooks: pb.Hooks) -> Iterator[str]:
    """Yield the names of NVIDIA's programs that are run, by path or as the first argument."""
    for stage in hooks.DESCRIPTOR.fields:
        for hook in getattr(hooks, stage.name):
            names = {path.rpartition("/")[2] for path in (hook.path, *hook.args[:1])}
            yield from names & NVIDIA_HOOKS


def _characters(devices: Iterable[pb.LinuxDevice]) -> tuple[DeviceRef, ...]:
    return tuple([DeviceRef(each.path, each.major, each.minor) for each in devices if each.type in CHARACTER])


def _pinned(resources: pb.LinuxResources) -> bool:
    return resources.HasField("cpu") and bool(resources.cpu.cpus or resources.cpu.mems)


def _rules(rules: Iterable[pb.LinuxDeviceCgroup]) -> tuple[bool, bool, frozenset[DeviceNumber]]:
    """Return what a device cgroup allows: everything, character devices by a wildcard, and those by exact number.

    Everything is the one rule that containerd writes for a privileged container
    (internal/cri/server/container_create.go). A rule that only lets nodes be made opens nothing.
    """
    privileged = wildcard = False
    opened: set[DeviceNumber] = set()
    for rule in rules:
        if not rule.allow or (kind := rule.type) not in ("", "a", "c"):
            continue
        major = rule.major.value if rule.HasField("major") else -1
        minor = rule.minor.value if rule.HasField("minor") else -1
        if kind != "c" and major < 0 and minor < 0:
            privileged = True
        elif kind and ("r" in (access := rule.access) or "w" in access):
            if major < 0 or minor < 0:
                wildcard = True
            else:
                opened.add((major, minor))
    return privileged, wildcard and not privileged, frozenset(opened)


def _mps_folder(mounts: Iterable[pb.Mount]) -> str:
    pipes = (mount.source for mount in mounts if mount.destination == PIPE_PLACE)
    return next(pipes, "").removesuffix(f"/{PIPE_FOLDER}")


def _destinations(mounts: Iterable[pb.Mount], pod: Pod) -> frozenset[str]:
    places = [(mount, mount.destination) for mount in mounts]
    return frozenset([place for mount, place in places if place not in _OWN_PLACES or not _usual(mount, pod)])


def _usual(mount: pb.Mount, pod: Pod) -> bool:
    """Return whether the runtime itself mounts this at a place that we may use, too; at /dev also the host's own."""
    if mount.type == "tmpfs" or mount.source == mount.destination:
        return True
    # The pod's own (containerd: internal/cri).
    return mount.destination == SHM_PLACE and mount.source.endswith(f"/{pod.id}/shm")


def _uid(container: pb.Container) -> int | None:
    """Return the user id if it means the same on the host, else None."""
    if any(each.type == "user" for each in container.linux.namespaces):
        return None
    return int(container.user.uid)
