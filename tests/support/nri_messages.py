"""Requests as runtimes send them: every NRI version's own fields, and nothing that a version does not know."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event

REQUEST_TIMEOUT_NS: Final = 2_000_000_000  # what runtimes give a plugin by default


class Flavour(Struct, frozen=True):
    """How one runtime speaks. own_rpcs: events come by their own methods and not by StateChange."""

    configure: Mapping[str, Any]
    known_mask: int
    own_rpcs: bool = False


NRI_0_6: Final = Flavour({"runtime_name": "containerd", "runtime_version": "1.7.24~ds1"}, 0x07FF)
_TIMEOUTS: Final = {"registration_timeout": 5000, "request_timeout": 2000}
NRI_0_8: Final = Flavour({"runtime_name": "containerd", "runtime_version": "2.1.9+unknown", **_TIMEOUTS}, 0x07FF)
# Of containerd 2.2: NRI 0.10 and 0.11 know validation, and do not tell their version.
NRI_0_10: Final = Flavour({"runtime_name": "containerd", "runtime_version": "2.2.0", **_TIMEOUTS}, 0x3FFF)
# It heeds no error answered to a start (its server/container_start.go).
CRI_O: Final = Flavour({"runtime_name": "cri-o", "runtime_version": "1.33.2", **_TIMEOUTS}, 0x07FF)
NRI_0_12: Final = Flavour(
    {"runtime_name": "containerd", "runtime_version": "2.4.0-beta", "NRI_version": "v0.12.1", **_TIMEOUTS},
    0x3FFF,
    own_rpcs=True,
)
FLAVOURS: Final = {"nri 0.6": NRI_0_6, "nri 0.8": NRI_0_8, "nri 0.10": NRI_0_10, "nri 0.12": NRI_0_12}

# Event -> its own method, and whether a container comes with it. Written down a second time on purpose.
OWN_RPC: Final = {
    Event.RUN_POD_SANDBOX: "RunPodSandbox",
    Event.STOP_POD_SANDBOX: "StopPodSandbox",
    Event.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    Event.POST_CREATE_CONTAINER: "PostCreateContainer",
    Event.START_CONTAINER: "StartContainer",
    Event.POST_START_CONTAINER: "PostStartContainer",
    Event.POST_UPDATE_CONTAINER: "PostUpdateContainer",
    Event.POST_UPDATE_POD_SANDBOX: "PostUpdatePodSandbox",
    Event.STOP_CONTAINER: "StopContainer",
    Event.REMOVE_CONTAINER: "RemoveContainer",
}
# What every runtime calls by its own method, however old it is.
ALWAYS_OWN: Final = (Event.STOP_CONTAINER,)


def pod(name: str = "train", **fields: Any) -> pb.PodSandbox:  # noqa: ANN401 - any field of the message
    """A pod; `annotations` are the usual thing to give."""
    given = {"id": f"sandbox-{name}", "name": name, "uid": f"uid-{name}", "namespace": "ml", "pid": 4711}
    return pb.PodSandbox(**{**given, **fields})


def asking(claim: str, name: str = "train") -> pb.PodSandbox:
    """A pod whose containers ask for GPUs."""
    return pod(name, annotations={"gpu.nri.io": claim})


def container(of: pb.PodSandbox, name: str = "main", **fields: Any) -> pb.Container:  # noqa: ANN401 - as above
    """A container as containerd shows it: env, mounts, namespaces, the deny-all rule of its device cgroup."""
    made = pb.Container(
        id=f"container-{of.name}-{name}",
        pod_sandbox_id=of.id,
        name=name,
        args=["/bin/sh", "-c", "sleep 1d"],
        env=["PATH=/usr/local/bin:/usr/bin:/bin", "HOSTNAME=node", "SECRET_TOKEN=hunter2-do-not-log"],
        annotations={"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": name},
        labels={"io.cri-containerd.kind": "container"},
    )
    made.mounts.add(destination="/dev", type="tmpfs", source="tmpfs", options=["nosuid", "mode=755"])
    for destination in ("/proc", "/sys", "/etc/hosts", "/etc/resolv.conf"):
        made.mounts.add(destination=destination, type="bind", source="/somewhere", options=["rbind", "rprivate", "rw"])
    made.linux.resources.devices.add(allow=False, access="rwm")
    made.MergeFrom(pb.Container(**fields))
    return made


def configure(flavour: Flavour, **fields: Any) -> bytes:  # noqa: ANN401 - as above
    """ConfigureRequest."""
    return pb.ConfigureRequest(**{**flavour.configure, **fields}).SerializeToString()


def create(of: pb.PodSandbox, made: pb.Container) -> bytes:
    """CreateContainerRequest."""
    return pb.CreateContainerRequest(pod=of, container=made).SerializeToString()


def validate(of: pb.PodSandbox, made: pb.Container, replies: Mapping[str, pb.CreateContainerResponse]) -> bytes:
    """ValidateContainerAdjustmentRequest of what these plugins (`NN-name`) answered, merged and owned as NRI does it.

    Source: containerd/nri pkg/adaptation/adaptation.go (validateContainerAdjustment), result.go.
    """
    request = pb.ValidateContainerAdjustmentRequest(pod=of, container=made)
    owned = request.owners.owners[made.id].compound
    for plugin, reply in replies.items():
        index, _, name = plugin.partition("-")
        request.plugins.add(name=name, index=index)
        adjust = reply.adjust
        request.adjust.MergeFrom(adjust)
        _remove(request.adjust.linux.devices, "path", owned[pb.Devices].owners, plugin)
        _remove(request.adjust.mounts, "destination", owned[pb.Mounts].owners, plugin)
        for field, keys in (
            (pb.Annotations, adjust.annotations),
            (pb.Mounts, [mount.destination for mount in adjust.mounts]),
            (pb.Devices, [device.path for device in adjust.linux.devices]),
            (pb.CdiDevices, [device.name for device in adjust.CDI_devices]),
            (pb.Env, [pair.key for pair in adjust.env]),
        ):
            for key in keys:
                if not key.startswith("-"):
                    owned[field].owners[key] = plugin
    return request.SerializeToString()


def _remove(entries: Any, key: str, owners: Any, plugin: str) -> None:  # noqa: ANN401 - protobuf's containers
    """Cancel what plugins before this one added, where its reply has a key with a dash."""
    marks = {getattr(each, key)[1:] for each in entries if getattr(each, key).startswith("-")}
    for entry in [each for each in entries if getattr(each, key).removeprefix("-") in marks]:
        if not getattr(entry, key).startswith("-"):
            owners[getattr(entry, key)] = f"-{plugin}"
        entries.remove(entry)


def event(
    kind: Event, of: pb.PodSandbox, made: pb.Container | None = None, *, own_rpc: bool = False
) -> tuple[str, bytes]:
    """Method and payload that tell an event, by its own method or by StateChange. Their fields differ in number."""
    if own_rpc or kind in ALWAYS_OWN:
        return OWN_RPC[kind], pb.StopContainerRequest(pod=of, container=made).SerializeToString()
    return "StateChange", pb.StateChangeEvent(event=int(kind), pod=of, container=made).SerializeToString()  # type: ignore[arg-type] # an enum's number


def synchronize(
    pods: Sequence[pb.PodSandbox] = (), containers: Sequence[pb.Container] = (), parts: int = 1
) -> Iterable[bytes]:
    """SynchronizeRequests: pods and containers spread over the parts, the last without `more`; some may be empty."""
    for part in range(parts):
        yield pb.SynchronizeRequest(
            pods=pods[len(pods) * part // parts : len(pods) * (part + 1) // parts],
            containers=containers[len(containers) * part // parts : len(containers) * (part + 1) // parts],
            more=part < parts - 1,
        ).SerializeToString()


def created(made: pb.Container) -> pb.Container:
    """The same container, listed as created and not started."""
    return _in_state(made, pb.CONTAINER_CREATED)


def restored(of: pb.PodSandbox, **annotations: str) -> pb.Container:
    """A container that containerd makes from a checkpoint, with a name of its own and the checkpoint's annotations."""
    marks = {
        "restored": "true",
        "checkpointedAt": "2026-11-26T07:00:00.1Z",
        "checkpointImage": "localhost/checkpoint:1",
    }
    return container(of, "containerd", annotations={**annotations, **marks})


def running(made: pb.Container, pid: int | None = None) -> pb.Container:
    """The same container, listed as running. pid: of its process; the container's own, or ours."""
    listed = _in_state(made, pb.CONTAINER_RUNNING)
    listed.pid = (made.pid or os.getpid()) if pid is None else pid
    return listed


def adjusted(made: pb.Container, reply: pb.CreateContainerResponse) -> pb.Container:
    """The container with what a plugin's reply added, as later requests show it."""
    after = pb.Container()
    after.CopyFrom(made)
    for key, value in reply.adjust.annotations.items():
        after.annotations[key] = value
    after.env.extend(f"{pair.key}={pair.value}" for pair in reply.adjust.env if not pair.key.startswith("-"))
    after.mounts.extend(reply.adjust.mounts)
    after.linux.devices.extend(reply.adjust.linux.devices)
    return after


def _in_state(made: pb.Container, state: pb.ContainerState) -> pb.Container:
    copy = pb.Container()
    copy.CopyFrom(made)
    copy.state = state
    return copy
