"""ValidateContainerAdjustment (NRI 0.10): a container as plugins made it, in our types, and the verdict back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.bounds import NVIDIA_MAJOR
from nri_gpu.domain.container import Added, AddedNode, Adjusted
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.edits import staged_below
from nri_gpu.nri.convert import CHARACTER, EMPTY, PREFIX, container_from_pb, pod_from_pb

# Every request that needs more than a pass has one of these: our annotations, a node of NVIDIA's by name or number,
# a device rule for that number, a CDI device of NVIDIA's. A false alarm costs one decoding.
_NEEDLES: Final = (
    PREFIX.encode(),
    b"/dev/nvidia",
    b"nvidia.com",
    pb.LinuxDevice(major=NVIDIA_MAJOR).SerializeToString(),
    pb.LinuxDeviceCgroup(major=pb.OptionalInt64(value=NVIDIA_MAJOR)).SerializeToString(),
)
_REMOVED: Final = "-"


def concerns_us(payload: bytes) -> bool:
    """Return whether a ValidateContainerAdjustmentRequest has to be decoded at all."""
    return any(needle in payload for needle in _NEEDLES)


def names_twice(payload: bytes, name: str) -> bool:
    """Return whether the runtime may have asked two plugins of this name; a pod's text can look like that, too."""
    return payload.count(pb.PluginInstance(name=name).SerializeToString()) > 1


def adjusted_from_pb(payload: bytes, grant_key: str, stage_dir: str = "") -> Adjusted:
    """Decode a ValidateContainerAdjustmentRequest. grant_key: the annotation that a grant is written in.

    stage_dir: where driver files are staged, without symlinks, or empty if that does not matter.
    """
    message = pb.ValidateContainerAdjustmentRequest.FromString(payload)
    owners = (
        message.owners.owners[message.container.id].compound if message.container.id in message.owners.owners else {}
    )
    adjust = message.adjust
    grant = adjust.annotations.get(grant_key)
    return Adjusted(
        container=container_from_pb(message.container, pod_from_pb(message.pod), stage_dir=stage_dir),
        grant=None if grant is None else Added(grant, _owner(owners, pb.Annotations, grant_key)),
        nodes=tuple(
            AddedNode(node.path, _owner(owners, pb.Devices, node.path), node.major, node.minor)
            for node in adjust.linux.devices
            if node.type in CHARACTER
        ),
        cdi_devices=tuple(
            Added(device.name, _owner(owners, pb.CdiDevices, device.name)) for device in adjust.CDI_devices
        ),
        opened=frozenset(_opened(adjust.linux.resources)),
        removed=tuple(_removed(owners)),
        staged=staged_below(stage_dir, [mount.source for mount in adjust.mounts]) if stage_dir else frozenset(),
        asked=tuple(f"{each.index}-{each.name}" for each in message.plugins),
    )


def verdict_to_pb(reason: Reason | None) -> bytes:
    if reason is None:
        return EMPTY
    return pb.ValidateContainerAdjustmentResponse(reject=True, reason=str(reason)).SerializeToString()


def _owner(owners: Mapping[int, pb.CompoundFieldOwners], field: int, name: str) -> str:
    return owners[field].owners.get(name, "") if field in owners else ""


def _removed(owners: Mapping[int, pb.CompoundFieldOwners]) -> Iterator[Added]:
    """Yield what a plugin removed: its owner is then `-NN-name` (containerd/nri: pkg/api/owners.go, ClearDevice)."""
    for field in (pb.Devices, pb.Mounts):
        for name, owner in sorted(owners[field].owners.items()) if field in owners else ():
            if owner.startswith(_REMOVED):
                yield Added(name, owner.removeprefix(_REMOVED))


def _opened(resources: pb.LinuxResources) -> Iterator[int]:
    """Yield the majors that rules allow. A rule for every major is left out: it makes the container privileged."""
    for rule in resources.devices:
        if rule.allow and rule.type in ("", "a", "c") and rule.HasField("major"):
            yield rule.major.value
