"""What the tests ask of a runtime: a pod, a container, with defaults for all that a test does not care about."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from tests.support import image
from tests.support._pb import cri_tests_pb2 as pb

# The node's network needs no CNI plugin, and shares the node's host name with it; the rest is as a kubelet asks.
NAMESPACES: Final = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)
# A kubelet gives each pod 65536 ids of its own. The node's network is not to be had in a user namespace.
IDS: Final = pb.IDMapping(host_id=100000, container_id=0, length=65536)
USER_NAMESPACES: Final = pb.NamespaceOption(
    network=pb.POD,
    pid=pb.CONTAINER,
    ipc=pb.POD,
    userns_options=pb.UserNamespace(mode=pb.POD, uids=[IDS], gids=[IDS]),
)


class PodSpec(Struct, frozen=True):
    """What a pod is asked for. log_directory: absolute, on the host; none, no logs.

    user_namespace: one of its own; takes a pod network. host_pid: its processes are in the node's PID namespace.
    runtime_handler: as a RuntimeClass names it; empty: the runtime's default.
    """

    name: str = "pod"
    namespace: str = "default"
    uid: str = ""  # empty: a fresh one, so that names may repeat
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    privileged: bool = False
    log_directory: str = ""
    user_namespace: bool = False
    host_pid: bool = False
    runtime_handler: str = ""


class ContainerSpec(Struct, frozen=True):
    """What a container is asked for. command empty: the image's own.

    cpuset_cpus: as the kubelet's static CPU manager sets it; empty: every CPU.
    devices, mounts: path in the container -> path on the host. read_only: of mounts. without_rights: no capability but
    those of `rights`.
    """

    name: str = "main"
    image: str = image.NAME
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    privileged: bool = False
    devices: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    read_only: frozenset[str] = frozenset()
    without_rights: bool = False
    rights: Sequence[str] = ()
    cdi_devices: Sequence[str] = ()
    cpuset_cpus: str = ""
    user: int | None = None
    readonly_rootfs: bool = False
    user_namespace: bool = False  # as its pod
    host_pid: bool = False  # as its pod


def _namespaces(spec: PodSpec | ContainerSpec) -> pb.NamespaceOption:
    if spec.host_pid:
        return pb.NamespaceOption(network=pb.NODE, pid=pb.NODE, ipc=pb.POD)
    return USER_NAMESPACES if spec.user_namespace else NAMESPACES


def pod_to_pb(spec: PodSpec, cgroup_parent: str) -> pb.PodSandboxConfig:
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(
            name=spec.name, uid=spec.uid or str(uuid.uuid4()), namespace=spec.namespace, attempt=spec.attempt
        ),
        log_directory=spec.log_directory,
        labels=spec.labels,
        annotations=spec.annotations,
        linux=pb.LinuxPodSandboxConfig(
            cgroup_parent=cgroup_parent,
            security_context=pb.LinuxSandboxSecurityContext(
                namespace_options=_namespaces(spec), privileged=spec.privileged
            ),
        ),
    )


def container_to_pb(spec: ContainerSpec) -> pb.ContainerConfig:
    security = pb.LinuxContainerSecurityContext(
        namespace_options=_namespaces(spec), privileged=spec.privileged, readonly_rootfs=spec.readonly_rootfs
    )
    if spec.user is not None:
        security.run_as_user.value = spec.user
    if spec.without_rights:
        security.capabilities.drop_capabilities.append("ALL")
    security.capabilities.add_capabilities.extend(spec.rights)
    return pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name=spec.name, attempt=spec.attempt),
        image=pb.ImageSpec(image=spec.image),
        command=spec.command,
        envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in spec.env.items()],
        mounts=[
            pb.Mount(container_path=inside, host_path=host, readonly=inside in spec.read_only)
            for inside, host in spec.mounts.items()
        ],
        devices=[
            pb.Device(container_path=inside, host_path=host, permissions="rwm") for inside, host in spec.devices.items()
        ],
        labels=spec.labels,
        annotations=spec.annotations,
        log_path=f"{spec.name}_{spec.attempt}.log",
        linux=pb.LinuxContainerConfig(
            resources=pb.LinuxContainerResources(cpuset_cpus=spec.cpuset_cpus),
            security_context=security,
        ),
        CDI_devices=[pb.CDIDevice(name=name) for name in spec.cdi_devices],
    )
