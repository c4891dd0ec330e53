"""The edits of the NRI plugin as a CDI specification without hooks, for Docker, podman and others.

The plan is made for each GPU alone, and once for a GPU that does not exist. What all plans have in common becomes the
specification's own edits; what a GPU gets beyond that belongs to its device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.edits import DeviceNode, Edits, Mount
from nri_gpu.domain.gpu import Capabilities, Gpu, GpuUuid, PciBusId, Unit, gpus_of
from nri_gpu.domain.node import DriverTree, Inventory, Loader
from nri_gpu.injection.driver_mounts import LIBRARY_PATH
from nri_gpu.injection.inject import Injection, plan

KIND: Final = "nvidia.com/gpu"
ALL: Final = "all"
# The oldest version that the content needs, for old runtimes: device names that begin with a digit came with 0.5.0
# (cncf-tags/container-device-interface: specs-go/version.go). Annotations would need 0.6.0.
VERSION: Final = "0.5.0"
PERMISSIONS: Final = "rw"  # as over NRI; CDI's default would let a container make device nodes
# cncf-tags/container-device-interface: pkg/parser/parser.go. With one bad name runtimes ignore the whole file.
DEVICE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")

# A container without environment and volumes, since the real one is not known yet.
_ANY_CONTAINER: Final = Container(
    id=ContainerId(""), name="", pod=Pod(id=PodId(""), uid=PodUid(""), name="", namespace="default")
)

# ("device", path), ("mount", destination) or ("env", name), which a runtime takes once -> what is added.
Key = tuple[str, str]
Addition = DeviceNode | Mount | str
Additions = Mapping[Key, Addition]


def specification(
    gpus: Sequence[Unit], *, capabilities: Capabilities, inventory: Inventory, tree: DriverTree | None, loader: Loader
) -> dict[str, object]:
    """Return the specification as JSON values.

    gpus: GPUs and MIG devices, at least one, in NVML order. capabilities: closed. tree: the staged driver files, or
    None on a simulated node that has none. loader: how libraries are found, as far as mounts do it.
    """
    # With void: a list of UUIDs cannot be put together from the devices that a container asks for.
    everything = Injection(
        container=_ANY_CONTAINER,
        gpus=tuple(gpus),
        capabilities=capabilities,
        inventory=inventory,
        tree=tree,
        loader=loader,
        void=True,
    )
    plans = [_additions(plan(replace(everything, gpus=(gpu,)))) for gpu in (*gpus, _no_gpu(gpus))]
    common = _in_all(plans)
    own = [_without(additions, {*common, *_conflicting(plans)}) for additions in plans[:-1]]
    names = [filter(DEVICE_NAME.fullmatch, (gpu.place, gpu.uuid)) for gpu in gpus]
    devices = [(name, additions) for each, additions in zip(names, own, strict=True) for name in each]
    devices.append((ALL, reduce(lambda one, other: {**one, **other}, own, {})))
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "containerEdits": _edits_json(common),
        "devices": [{"name": name, "containerEdits": _edits_json(additions)} for name, additions in devices],
    }


def _no_gpu(units: Iterable[Unit]) -> Gpu:
    """Return a copy of the first GPU under an identity no GPU has. Edits planned for it are common to all GPUs."""
    known = gpus_of(units)
    return replace(
        known[0],
        index=max(gpu.index for gpu in known) + 1,
        minor_number=max(gpu.minor_number for gpu in known) + 1,
        uuid=GpuUuid("GPU-of-nobody"),
        pci_bus_id=PciBusId("ffff:ff:1f.7"),
        drm=(),
    )


def _additions(edits: Edits) -> Additions:
    # CDI can only overwrite the image's loader path, not add to it, so libraries are found by their mount alone. It
    # has no annotations either.
    env = {name: value for name, value in edits.env.items() if name != LIBRARY_PATH}
    parts: Mapping[str, Mapping[str, Addition]] = {"device": edits.devices, "mount": edits.mounts, "env": env}
    return {(part, name): addition for part, additions in parts.items() for name, addition in additions.items()}


def _in_all(plans: Sequence[Additions]) -> Additions:
    return {key: addition for key, addition in plans[0].items() if all(other.get(key) == addition for other in plans)}


def _conflicting(plans: Sequence[Additions]) -> Iterator[Key]:
    """Return the keys that devices set differently.

    A container with two such devices would silently get the last one's value.
    """
    keys = dict.fromkeys(key for additions in plans for key in additions)
    return (key for key in keys if len({additions[key] for additions in plans if key in additions}) > 1)


def _without(additions: Additions, keys: set[Key]) -> Additions:
    return {key: addition for key, addition in additions.items() if key not in keys}


def _edits_json(additions: Additions) -> dict[str, object]:
    nodes = [_node_json(addition) for addition in additions.values() if isinstance(addition, DeviceNode)]
    mounts = [mount_json(addition) for addition in additions.values() if isinstance(addition, Mount)]
    env = [f"{name}={addition}" for (_, name), addition in additions.items() if isinstance(addition, str)]
    return {key: value for key, value in {"env": env, "deviceNodes": nodes, "mounts": mounts}.items() if value}


def _node_json(node: DeviceNode) -> dict[str, object]:
    # All fields: runtimes fill in missing ones from the host's node and from the container's user.
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


def mount_json(mount: Mount) -> dict[str, object]:
    return {
        "hostPath": mount.source,
        "containerPath": mount.destination,
        "type": "bind",
        "options": list(mount.options),
    }
