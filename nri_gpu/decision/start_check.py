"""Validation of a container that is to be created or started as it is. Decides nothing for it.

It needs what the runtime shows, the key of signed grants and the policy, but no inventory, ledger or driver. So the
guard can validate (`plugin/guard.py`), and the daemon can check what came of its own reply (`plugin/handlers.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from nri_gpu.decision.asked import asks_in_pod, is_ignored, needs_grant
from nri_gpu.domain.bounds import MODESET_MINOR, NVIDIA_MAJOR, NVIDIACTL_MINOR
from nri_gpu.domain.container import Added, AddedNode, Adjusted, Container, DeviceNumber, DeviceRef
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.names import is_nvidia_device
from nri_gpu.domain.text import counted, quoted
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant, verify_grant
from nri_gpu.policy.model import Policy
from nri_gpu.policy.select import shown_source
from nri_gpu.request.values import MIG_PREFIX, shown_key

NVIDIA_PATH: Final = "/dev/nvidia"
CAPABILITY_PATH: Final = f"{NVIDIA_PATH}-caps/nvidia-cap"
NAME_SHOWN_MAX: Final = 120  # characters
TAKEN: Final = Reason(
    Code.GPU_BUSY,
    "this container did not start while it held its GPUs, and they have since been granted to another container",
    cure="create it again",
)
AGAIN: Final = "create it again once `nri-gpu run` serves this node"


def grant_of(container: Container, text: str | None, key: bytes | None) -> SignedGrant | InvalidGrant | None:
    """Return a container's signed grant. key: None if none was made on this node since it booted."""
    if text is None:
        return None
    if key is None:
        return InvalidGrant("there is no key on this node that could have signed it")
    return verify_grant(text, container.pod.uid, container.id, key)


def validate_restored(container: Container, policy: Policy) -> Reason | None:
    """Return why a container must not be created from a checkpoint, or None: its pod asks for GPUs.

    containerd tells no plugin of such a container's start, so its GPUs would go to others while it runs. containerd
    also calls it by a name that does not tell which request is its own.
    """
    key = asks_in_pod(container, policy) if container.restored else ""
    if not key:
        return None
    return Reason(
        Code.RESTORED,
        f"its pod asks for GPUs by {shown_key(key)}, and its image is a checkpoint, which the runtime restores without "
        "telling nri-gpu of the start",
        cure="run it from an image that is no checkpoint, or ask for no GPU in its pod",
    )


def validate_runtime(container: Container, policy: Policy) -> Reason | None:
    """Return why a container must be given no GPU by us, or None: its runtime handler starts a virtual machine."""
    handler = container.pod.runtime_handler
    index = policy.runtimes.refuse.first(handler) if handler and not policy.fault else None
    if index is None:
        return None
    return Reason(
        Code.BAD_RUNTIME,
        f"its pod's runtime handler {quoted(handler)} starts a virtual machine, in which a device node of the host "
        f"leads to no GPU (runtimes.refuse[{index}] in {shown_source(policy)})",
        cure="use another RuntimeClass, or take this handler out of that list if it starts no virtual machine",
    )


def validate_start(container: Container, signed: SignedGrant | InvalidGrant | None, policy: Policy) -> Reason | None:
    """Return why a container must not start, or None: it asks for GPUs and has no valid grant."""
    if isinstance(signed, SignedGrant) or not (key := needs_grant(container, policy, starts=True)):
        return None
    if reason := validate_runtime(container, policy):
        return reason
    if isinstance(signed, InvalidGrant):
        why = f"its signed grant is invalid ({signed.why})"
    else:
        why = "nri-gpu granted it none: it was not connected, or too late, when the container was created"
    return Reason(Code.NOT_GRANTED, f"{key} asks for GPUs, but {why}; {AGAIN}.")


def validate_nodes(container: Container, signed: SignedGrant, adjusted: Adjusted | None = None) -> Reason | None:
    """Return why a granted container must not run, or None: it lacks nodes of GPUs that its grant names.

    adjusted: the container as it will be; None: it is there. Nodes are counted, because nobody can tell here which
    number is whose: one for each GPU; for MIG devices one of their GPU, one of their GPU instance, which they may
    share, and one of each device's own. What the host or a checkpoint gives to a container is not measured.
    """
    parts = sum(uuid.startswith(MIG_PREFIX) for uuid in signed.uuids)
    devices = adjusted.devices if adjusted else container.devices
    enough = len(_gpus(devices)) >= max(len(signed.uuids) - parts, bool(parts))
    enough &= not parts or sum(device.path.startswith(CAPABILITY_PATH) for device in devices) > parts
    if enough or container.privileged or container.restored:
        return None
    return _incomplete(f"nodes of its GPUs (its grant names {len(signed.uuids)})", adjusted, nodes=True)


def validate_staged(adjusted: Adjusted, given: frozenset[str]) -> Reason | None:
    """Return why a container must not be created, or None: it lacks staged driver files. given: those of our reply."""
    if given <= adjusted.staged | adjusted.container.staged:
        return None
    return _incomplete("the mounts of the driver's files", adjusted, nodes=False)


def _incomplete(what: str, adjusted: Adjusted | None, *, nodes: bool) -> Reason:
    """Return the refusal of a container that lacks what its grant gave, with the plugin that removed it, if known."""
    removed = adjusted.removed if adjusted else ()
    part = next((each for each in removed if each.name.startswith(NVIDIA_PATH) is nodes), Added("them", ""))
    return Reason(
        Code.INCOMPLETE_GRANT,
        f"this container lacks {what}",
        f"{_by(part.owner)} removed {part.name[:NAME_SHOWN_MAX]}, which nri-gpu had added",
        "remove that plugin from the node, or have it leave this container alone",
    )


def validate_adjusted(
    adjusted: Adjusted, key: bytes | None, policy: Policy, *, ungranted: bool = True
) -> Reason | None:
    """Return why a container must not be created as plugins adjusted it, or None.

    ungranted: also check what other plugins added to a container without a grant, or to a container that policy
    ignores.
    """
    container = adjusted.container
    if reason := validate_restored(container, policy):
        return reason
    signed = grant_of(container, adjusted.grant.name if adjusted.grant else None, key)
    if reason := validate_start(container, signed, policy):
        return reason
    if isinstance(signed, SignedGrant) and (reason := validate_nodes(container, signed, adjusted)):
        return reason
    if policy.foreign.monitors.match(container.pod.full_name):  # it may open every GPU
        return None
    if not ungranted and (not isinstance(signed, SignedGrant) or (signed.of_nothing and is_ignored(container, policy))):
        return None
    return _validate_added(adjusted, signed)


def _validate_added(adjusted: Adjusted, signed: SignedGrant | InvalidGrant | None) -> Reason | None:
    """Refuse unless the plugin that wrote the grant added all GPU nodes, and no more GPUs than the grant names."""
    ours = adjusted.grant.owner if adjusted.grant and isinstance(signed, SignedGrant) else None
    for added in _of_nvidia(adjusted):
        if ours is None or added.owner != ours:
            return _not_ours(added, "" if ours is None else "its grant is another plugin's")
    if isinstance(signed, SignedGrant) and (number := len(_gpus(adjusted.added_devices))) > len(signed.uuids):
        nodes = f"the nodes of {counted(number, 'GPU')}"
        return Reason(
            Code.UNGRANTED_NODES,
            f"{nodes} were added to this container, but its grant names {len(signed.uuids)}",
            "a bug in nri-gpu or a plugin of the same name and index",
            "see the log of `nri-gpu run`",
        )
    if NVIDIA_MAJOR in adjusted.opened:
        return _not_ours(Added(f"a device rule for major {NVIDIA_MAJOR}", ""), "")
    return None


def _of_nvidia(adjusted: Adjusted) -> Iterator[Added | AddedNode]:
    for node in adjusted.nodes:
        if node.major == NVIDIA_MAJOR or node.name.startswith(NVIDIA_PATH):
            yield node
    yield from (device for device in adjusted.cdi_devices if is_nvidia_device(device.name))


def _gpus(devices: Iterable[DeviceRef]) -> frozenset[DeviceNumber]:
    """Return the GPUs by device number; also by name, because simulated nodes use another major."""
    return frozenset(
        (device.major, device.minor)
        for device in devices
        if (device.major == NVIDIA_MAJOR and device.minor not in (MODESET_MINOR, NVIDIACTL_MINOR))
        or device.path.removeprefix(NVIDIA_PATH).isdecimal()
    )


def _by(owner: str) -> str:
    return f"NRI plugin {owner[:NAME_SHOWN_MAX]}" if owner else "an NRI plugin"


def _not_ours(added: Added | AddedNode, why: str) -> Reason:
    return Reason(
        Code.UNGRANTED_NODES,
        f"{_by(added.owner)} added {added.name[:NAME_SHOWN_MAX]} to this container, and {why or 'no grant names it'}",
        "nri-gpu alone assigns the GPUs of this node",
        "remove that plugin from the node, or its request from the container",
    )
