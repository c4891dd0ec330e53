"""The same edits as a CDI specification, without a hook: for Docker, podman and whatever else NRI does not reach.

The planner is asked for each GPU alone, and once for a GPU that does not exist. What all of them get, that one too, is
common to the whole specification; what a GPU gets beyond that belongs to its device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Final

from msgspec.structs import replace

from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.edits import DeviceNode, Edits, Mount
from nri_gpu.domain.gpu import Capabilities, Gpu, GpuUuid, MigPart, PciBusId, Unit, whole
from nri_gpu.domain.node import DriverTree, Inventory, Loader
from nri_gpu.injection.env import LIBRARY_PATH
from nri_gpu.injection.plan import Injection, plan

KIND: Final = "nvidia.com/gpu"
ALL: Final = "all"
# What the content needs and no more, so that old runtimes read it too: device names that open with a digit came with
# 0.5.0 (cncf-tags/container-device-interface: specs-go/version.go). Annotations would need 0.6.0.
VERSION: Final = "0.5.0"
PERMISSIONS: Final = "rw"  # as NRI's own rule; CDI's default would let a container make more nodes
# cncf-tags/container-device-interface: pkg/parser/parser.go. One bad name, and runtimes drop the whole file.
DEVICE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")

# Who will ask is not known yet, so there is no environment to add to and no volume to make room for.
_ANYBODY: Final = Container(
    id=ContainerId(""), name="", pod=Pod(id=PodId(""), uid=PodUid(""), name="", namespace="default")
)

# One thing added, under what a runtime would call a conflict: ("device", path), ("mount", destination), ("env", name).
Key = tuple[str, str]
Thing = DeviceNode | Mount | str
Things = Mapping[Key, Thing]


def specification(
    gpus: Sequence[Unit], *, capabilities: Capabilities, inventory: Inventory, tree: DriverTree | None, loader: Loader
) -> dict[str, Any]:
    """The specification as JSON values; at least one device, for CDI has no empty ones.

    gpus: GPUs and MIG devices to be had, in NVML order. capabilities: closed. tree: the staged driver files, None on
    a simulated node that has none. loader: how they are found, as far as mounts do it.
    """
    # With void, because a list of UUIDs cannot be put together from the devices a container asks for.
    everything = Injection(
        container=_ANYBODY,
        gpus=tuple(gpus),
        capabilities=capabilities,
        inventory=inventory,
        tree=tree,
        loader=loader,
        void=True,
    )
    plans = [_things(plan(replace(everything, gpus=(gpu,)))) for gpu in (*gpus, _ghost(gpus))]
    common = _in_all(plans)
    own = [_without(things, {*common, *_disputed(plans)}) for things in plans[:-1]]
    devices = [(name, things) for gpu, things in zip(gpus, own, strict=True) for name in _names(gpu)]
    devices.append((ALL, reduce(lambda one, other: {**one, **other}, own, {})))
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "containerEdits": _edits_json(common),
        "devices": [{"name": name, "containerEdits": _edits_json(things)} for name, things in devices],
    }


def _names(unit: Unit) -> Iterator[str]:
    place = unit.place if isinstance(unit, MigPart) else str(unit.index)
    return filter(DEVICE_NAME.fullmatch, (place, unit.uuid))


def _ghost(units: Iterable[Unit]) -> Gpu:
    """A GPU like the first with an identity of its own: what even it would get belongs to no GPU."""
    known = tuple(map(whole, units))
    return replace(
        known[0],
        index=max(gpu.index for gpu in known) + 1,
        minor_number=max(gpu.minor_number for gpu in known) + 1,
        uuid=GpuUuid("GPU-of-nobody"),
        pci_bus_id=PciBusId("ffff:ff:1f.7"),
        drm=(),
    )


def _things(edits: Edits) -> Things:
    # The loader's path is the image's, which CDI cannot add to, only overwrite; there, libraries are found by where
    # they are mounted alone. Annotations have no place in CDI.
    env = {name: value for name, value in edits.env.items() if name != LIBRARY_PATH}
    parts: Mapping[str, Mapping[str, Thing]] = {"device": edits.devices, "mount": edits.mounts, "env": env}
    return {(part, name): thing for part, things in parts.items() for name, thing in things.items()}


def _in_all(plans: Sequence[Things]) -> Things:
    return {key: thing for key, thing in plans[0].items() if all(other.get(key) == thing for other in plans)}


def _disputed(plans: Sequence[Things]) -> Iterator[Key]:
    """What two devices would set differently: who asks for both would silently get the last one's."""
    keys = dict.fromkeys(key for things in plans for key in things)
    return (key for key in keys if len({things[key] for things in plans if key in things}) > 1)


def _without(things: Things, keys: set[Key]) -> Things:
    return {key: thing for key, thing in things.items() if key not in keys}


def _edits_json(things: Things) -> dict[str, Any]:
    nodes = [_node_json(thing) for thing in things.values() if isinstance(thing, DeviceNode)]
    mounts = [_mount_json(thing) for thing in things.values() if isinstance(thing, Mount)]
    env = [f"{name}={thing}" for (_, name), thing in things.items() if isinstance(thing, str)]
    return {key: value for key, value in {"env": env, "deviceNodes": nodes, "mounts": mounts}.items() if value}


def _node_json(node: DeviceNode) -> dict[str, Any]:
    # All of it written: what is left out, runtimes fill in from the host's node and from the container's own user.
    return {
        "path": node.path,
        "type": "c",
        "major": node.major,
        "minor": node.minor,
        "fileMode": node.mode,
        "permissions": PERMISSIONS,
        "uid": node.uid,
        "gid": node.gid,
    }


def _mount_json(mount: Mount) -> dict[str, Any]:
    return {
        "hostPath": mount.source,
        "containerPath": mount.destination,
        "type": "bind",
        "options": list(mount.options),
    }
