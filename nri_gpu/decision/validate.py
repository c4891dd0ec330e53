"""The judgement: whether a container may be created or started as it stands. Pure; nothing is decided here for it.

It needs what the runtime shows, the marks' key and the policy: no inventory, no ledger, no driver. So a process that
knows nothing else can pass it (`plugin/guard.py`), and whoever decided can be checked by it (`plugin/handlers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.allocation.grant import InvalidGrant, SignedGrant, verify_grant
from nri_gpu.decision.claim import needs_grant
from nri_gpu.domain.container import Added, AddedNode, Adjusted, Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.policy.model import Policy

# /dev/nvidiaN, nvidiactl and nvidia-modeset: NVIDIA's for good (Linux: Documentation/admin-guide/devices.txt).
NVIDIA_MAJOR: Final = 195
NOT_GPUS: Final = frozenset({254, 255})  # minors of nvidia-modeset and nvidiactl
NVIDIA_PATH: Final = "/dev/nvidia"
VENDOR: Final = "nvidia.com"  # vendors of CDI devices of NVIDIA's end in it
NAME_SHOWN_MAX: Final = 120  # characters
AGAIN: Final = "create it again once `nri-gpu run` serves this node"


def grant_of(container: Container, text: str | None, key: bytes | None) -> SignedGrant | InvalidGrant | None:
    """A container's mark. key: None where nobody has ever signed one on this node since it booted."""
    if text is None:
        return None
    if key is None:
        return InvalidGrant("there is no key on this node that could have signed it")
    return verify_grant(text, container.pod.uid, container.id, key)


def validate_start(container: Container, mark: SignedGrant | InvalidGrant | None, policy: Policy) -> Reason | None:
    """Why a container must not start: it asked, and nobody granted. None where it may."""
    if isinstance(mark, SignedGrant) or not (key := needs_grant(container, policy, starts=True)):
        return None
    if isinstance(mark, InvalidGrant):
        why = f"the grant written on it does not hold ({mark.why})"
    else:
        why = "nobody granted it any: nri-gpu was away or late when it was created"
    return Reason(Code.NOT_GRANTED, f"{key} asks for GPUs, but {why}; {AGAIN}.")


def validate_adjusted(
    adjusted: Adjusted, key: bytes | None, policy: Policy, *, strangers: bool = True
) -> Reason | None:
    """Why a container must not be created with what plugins made of it. None where it may.

    strangers: whether it matters what others gave to a container that nri-gpu granted nothing.
    """
    container = adjusted.container
    mark = grant_of(container, adjusted.mark.name if adjusted.mark else None, key)
    if reason := validate_start(container, mark, policy):
        return reason
    return _judge_added(adjusted, mark) if strangers or isinstance(mark, SignedGrant) else None


def _judge_added(adjusted: Adjusted, mark: SignedGrant | InvalidGrant | None) -> Reason | None:
    """Whether GPU nodes came from whoever signed the mark, and no more of them than it names."""
    ours = adjusted.mark.owner if adjusted.mark and isinstance(mark, SignedGrant) else None
    for added in _of_nvidia(adjusted):
        if ours is None or added.owner != ours:
            return _not_ours(added, "" if ours is None else "its grant is another plugin's")
    if isinstance(mark, SignedGrant) and (number := len(_gpus(adjusted.nodes))) > len(mark.uuids):
        return Reason(
            Code.UNGRANTED_NODES,
            f"the nodes of {number} GPUs were added to this container and its grant names {len(mark.uuids)}: a bug in "
            "nri-gpu or a plugin of the same name and index; look into the log of `nri-gpu run`.",
        )
    if NVIDIA_MAJOR in adjusted.opened:
        return _not_ours(Added(f"a device rule for major {NVIDIA_MAJOR}", ""), "")
    return None


def _of_nvidia(adjusted: Adjusted) -> Iterator[Added | AddedNode]:
    for node in adjusted.nodes:
        if node.major == NVIDIA_MAJOR or node.name.startswith(NVIDIA_PATH):
            yield node
    for device in adjusted.cdi_devices:
        if f".{device.name.partition('/')[0]}".endswith(f".{VENDOR}"):
            yield device


def _gpus(nodes: tuple[AddedNode, ...]) -> frozenset[tuple[int, int]]:
    """By number; by name too, because simulated nodes have a major of their own."""
    return frozenset(
        (node.major, node.minor)
        for node in nodes
        if (node.major == NVIDIA_MAJOR and node.minor not in NOT_GPUS)
        or node.name.removeprefix(NVIDIA_PATH).isdecimal()
    )


def _not_ours(added: Added | AddedNode, why: str) -> Reason:
    by = f"NRI plugin {added.owner[:NAME_SHOWN_MAX]}" if added.owner else "an NRI plugin"
    return Reason(
        Code.UNGRANTED_NODES,
        f"{by} added {added.name[:NAME_SHOWN_MAX]} to this container, and {why or 'no grant names it'}: GPUs of this "
        "node are given out by nri-gpu alone; take that plugin off the node, or leave this one container to it.",
    )
