"""What the tests ask of a runtime: a pod, a container, with defaults for all that a test does not care about."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nri_gpu._pb import cri_pb2 as pb
from tests.support import image

# The node's network needs no CNI plugin, and shares the node's host name with it; the rest is as a kubelet asks.
NAMESPACES: Final = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)


@dataclass(frozen=True, slots=True)
class PodSpec:
    """What a pod is asked for. log_directory: absolute, on the host; none, no logs."""

    name: str = "pod"
    namespace: str = "default"
    uid: str = ""  # empty: a fresh one, so that names may repeat
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    privileged: bool = False
    log_directory: str = ""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a container is asked for. memory_bytes: its limit, 0 for none; command empty: the image's own.

    devices, mounts: path in the container -> path on the host.
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
    cdi_devices: Sequence[str] = ()
    memory_bytes: int = 0
    user: int | None = None
    readonly_rootfs: bool = False


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
            security_context=pb.LinuxSandboxSecurityContext(namespace_options=NAMESPACES, privileged=spec.privileged),
        ),
    )


def container_to_pb(spec: ContainerSpec) -> pb.ContainerConfig:
    security = pb.LinuxContainerSecurityContext(
        namespace_options=NAMESPACES, privileged=spec.privileged, readonly_rootfs=spec.readonly_rootfs
    )
    if spec.user is not None:
        security.run_as_user.value = spec.user
    return pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name=spec.name, attempt=spec.attempt),
        image=pb.ImageSpec(image=spec.image),
        command=spec.command,
        envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in spec.env.items()],
        mounts=[pb.Mount(container_path=inside, host_path=host) for inside, host in spec.mounts.items()],
        devices=[
            pb.Device(container_path=inside, host_path=host, permissions="rwm") for inside, host in spec.devices.items()
        ],
        labels=spec.labels,
        annotations=spec.annotations,
        log_path=f"{spec.name}_{spec.attempt}.log",
        linux=pb.LinuxContainerConfig(
            resources=pb.LinuxContainerResources(memory_limit_in_bytes=spec.memory_bytes), security_context=security
        ),
        CDI_devices=[pb.CDIDevice(name=name) for name in spec.cdi_devices],
    )
