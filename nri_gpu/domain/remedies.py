"""Cause and fix of every refusal. `docs/messages.md` is made of it; `log_remedies` has those of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from nri_gpu.domain.decision import Code


class Remedy(NamedTuple):
    """One sentence each."""

    cause: str
    fix: str


# What stands in brackets in a refusal.
REFUSALS: Final[Mapping[str, Remedy]] = {
    Code.BAD_REQUEST: Remedy(
        "The annotation cannot be understood, or its clauses exclude one another.",
        "Correct the value where the sentence points; `nri-gpu explain pod.yaml` checks it without a cluster.",
    ),
    Code.NOT_ALLOWED: Remedy(
        "The node's policy does not allow the request, or does not allow this pod to make it.",
        "Ask for what the sentence says is allowed, or change the rule that it names in the policy.",
    ),
    Code.NO_SUCH_GPU: Remedy(
        "This node has no GPU of that name, or none that matches the selectors.",
        "Name one that `nri-gpu gpus` lists, or send the pod to a node that has one.",
    ),
    Code.GPU_UNAVAILABLE: Remedy(
        "The GPU is there and cannot be granted: lost, unhealthy, in MIG mode or in a compute mode that forbids it.",
        "Ask for another GPU, or clear what `nri-gpu status` says is wrong with this one.",
    ),
    Code.REQUIREMENT_NOT_MET: Remedy(
        "The image demands a driver, CUDA version or GPU that it would not get here.",
        "Upgrade the node's driver, use an older image, or send the pod to another node.",
    ),
    Code.OVER_LIMIT: Remedy(
        "The policy grants so many GPUs to that pod, namespace or node, and this would be more.",
        "Wait until others end, ask for fewer, or raise the limit that the sentence names.",
    ),
    Code.GPU_BUSY: Remedy(
        "The GPU is held in a way that excludes this request.",
        "Wait until the pod that the sentence names ends, or let both use mode=shared.",
    ),
    Code.NODE_NOT_READY: Remedy(
        "The driver, its modules, its files or a part of this node is missing or not up yet.",
        "Mend what the sentence names; `nri-gpu check` and `nri-gpu prepare` help.",
    ),
    Code.BAD_POLICY: Remedy(
        "The policy file has a fault, and no good one is kept from before.",
        "Mend the file until `nri-gpu check` is content, then reload nri-gpu.",
    ),
    Code.HELD_BY_OTHERS: Remedy(
        "Another component has given the container GPUs already.",
        "Remove the annotation, or the request to the other component.",
    ),
    Code.VOLUME_IN_THE_WAY: Remedy(
        "The pod mounts a volume where a node or folder that the GPU needs would be.",
        "Mount the volume elsewhere in the container.",
    ),
    Code.NOT_GRANTED: Remedy(
        "The container asks for GPUs and was created without nri-gpu, so it has none and must not start.",
        "Delete the pod once `nri-gpu status` says that nri-gpu serves the node, so that it is made anew.",
    ),
    Code.REQUEST_TOO_LARGE: Remedy(
        "The runtime's description of the container is larger than plugin.request_bytes, or has too many entries.",
        "Set enableServiceLinks: false, or mount as a volume what comes by envFrom.",
    ),
    Code.LIST_TOO_LARGE: Remedy(
        "With this container the runtime could not list the node's containers to nri-gpu any more.",
        "Make its environment and annotations smaller, or first remove the pods that the sentence names.",
    ),
    Code.UNGRANTED_NODES: Remedy(
        "Another NRI plugin added GPU nodes that no signed grant names.",
        "Remove that plugin from the node, or its request from the container.",
    ),
    "internal": Remedy(
        "A bug in nri-gpu.",
        "Report it with the traceback that the log has under `bug in a handler`.",
    ),
    "late": Remedy(
        "The request waited past the runtime's deadline, so nothing was granted.",
        "Try again; if it comes often, look for what takes this node's CPU or memory.",
    ),
    "malformed": Remedy(
        "The request is not the protobuf message that it should be.",
        "Report it with the runtime's version: nri-gpu and the runtime do not understand each other.",
    ),
    "out-of-order": Remedy(
        "The runtime sent a request that cannot come at this point.",
        "Report it with the runtime's version.",
    ),
}

# The phrases of a refusal's line in the log, which has its code and sentence as fields.
REFUSED: Final[Mapping[str, Remedy]] = {
    "container refused": Remedy(
        "The daemon, or the guard on CRI-O and Docker, refused to let the container be created.",
        "See the code that the line has.",
    ),
    "pod refused": Remedy(
        "With this pod the runtime could not list the node's containers any more.",
        "See the code that the line has.",
    ),
    "container rejected": Remedy(
        "The guard, or the daemon itself, validated what all plugins made of the container, and found it wrong.",
        "See the code that the line has: not-granted or ungranted-nodes.",
    ),
    "start refused": Remedy(
        "The container exists and asks for GPUs, but what it needs is not there any more or never was.",
        "Delete the pod so that it is made anew; the code that the line has says more.",
    ),
    "Allocate refused": Remedy(
        "The kubelet asked for GPUs for a pod that cannot have them now; the pod fails with UnexpectedAdmissionError.",
        "Mend what the reason names; a controller of the pod makes it anew.",
    ),
}

# What the guard, the daemon's validation and a start refuse, by words of the sentence.
VALIDATION: Final[Mapping[str, Remedy]] = {
    "nri-gpu granted it none": Remedy(
        "The daemon was not connected, or too late, when the container was created.",
        "Delete the pod once `nri-gpu status` says that nri-gpu serves the node.",
    ),
    "created while nri-gpu was not connected": Remedy(
        "The daemon was away when the container was created, and came back before its start.",
        "Delete the pod so that it is made anew.",
    ),
    "its signed grant is invalid": Remedy(
        "The grant was signed with a key that is not used any more, or somebody forged it.",
        "Delete the pod so that it is made anew; find out who writes gpu.nri.io/grant if it comes again.",
    ),
    "no grant names it": Remedy(
        "Another NRI plugin gave the container a GPU that nri-gpu did not grant.",
        "Remove that plugin, or disable the guard by name if it may give GPUs (docs/guard.md).",
    ),
    "its grant is another plugin's": Remedy(
        "The grant was written by another plugin than the one that added the nodes.",
        "Let one nri-gpu alone run on the node.",
    ),
    "GPUs were added to this container and its grant names": Remedy(
        "More GPUs were added than were granted: a bug, or a second plugin of the same name and index.",
        "Remove the second plugin, or report it with the log.",
    ),
    "a device rule for major": Remedy(
        "Another plugin opened NVIDIA's device numbers to the container.",
        "Remove that plugin from the node.",
    ),
    "not started within the grace": Remedy(
        "The container was created and not started for ledger.created_grace_s, and its GPUs went to another.",
        "Delete the pod so that it is made anew.",
    ),
    "the user id of this container's process cannot be read": Remedy(
        "A container in mode=mps starts, and nri-gpu may not see its process.",
        "Install the systemd drop-in mps.conf (docs/mps.md).",
    ),
    "is not up yet": Remedy(
        "A container in mode=mps starts before the GPU's MPS daemon is up.",
        "Nothing: the kubelet makes the container anew in a moment.",
    ),
}
