"""The questions that `nri-gpu dra` asks on the daemon's socket `dra.sock`, one a connection, and the answers.

    driver process: one JSON document and a line break          daemon: one JSON document, then it closes

The daemon decides and keeps everything: what is offered, which claims are prepared, the key that signs their markers.
The driver process carries it to the API server and to the kubelet, and can be restarted at any time.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from nri_gpu.domain.decision import Code
from nri_gpu.domain.resource_claim import AllocatedClaim, ClaimUid

DRA_SOCKET: Final = "dra.sock"  # in the state folder, for root alone
VIEW_WAIT_S: Final = 20.0  # for how long the daemon keeps a question for a view that has not changed
SHARES: Final = "shares"  # the capacity of a shared device of which each claim consumes one, or more if it says so


class Version(Struct, frozen=True, tag=True):
    """An attribute of the type `version`, as semver: `580.95.5`."""

    text: str


Attribute = bool | int | str | Version


class Taint(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A taint, which keeps claims from a device, as ResourceSlices have it."""

    key: str
    value: str = ""
    effect: str = ""  # NoSchedule, or NoExecute, which also evicts pods
    time_added: str | None = None  # the API server's, where we set no time


class Capacity(Struct, frozen=True):
    """The capacity of a device for something, in bytes or as a number."""

    amount: int
    share: int = 0  # what one of several claims consumes of it


class OfferedDevice(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device as it is published. The devices of an offer are in the order in which to use them."""

    name: str
    attributes: dict[str, Attribute]
    capacity: dict[str, Capacity]
    taints: tuple[Taint, ...] = ()
    shared: bool = False  # several claims may have it at once
    counter_set: str = ""  # name of its GPU's
    counters: dict[str, int] = {}  # what it consumes of that set, or empty
    fault: str = ""  # why no claim can have it, or the claim on it has another GPU; or empty


class PreparedName(Struct, frozen=True):
    """A claim that is prepared on this node. reread: its pods may have changed, so it has to be prepared again."""

    uid: ClaimUid
    namespace: str
    name: str
    reread: bool = False


class GpuCondition(Struct, frozen=True):
    """A whole GPU of the node, whichever pool it is in, and whether it can be granted."""

    uuid: str
    index: int  # NVML's
    withheld: str = ""  # `bad`, `recovering` or `unavailable`; empty if it can be granted
    why: str = ""
    since_s: float | None = None  # when its health came into that state; seconds since the epoch


class NodeView(Struct, frozen=True, kw_only=True, tag=True):
    """The view of the node that the driver process needs."""

    number: int  # changes whenever anything in the view does
    driver: str  # this and the folders: of the policy
    dir: str
    registry_dir: str
    cdi_dir: str
    known: bool = False  # whether the inventory has been taken; before that nothing is published or withdrawn
    devices: tuple[OfferedDevice, ...] = ()
    counter_sets: dict[str, dict[str, int]] = {}  # name -> counter -> amount
    claims: tuple[PreparedName, ...] = ()
    gpus: tuple[GpuCondition, ...] | None = None  # None before NVML has answered
    driver_version: str = ""  # NVIDIA's, or empty if unknown


class DriverReport(Struct, frozen=True):
    """The driver process's report of itself, for `nri-gpu status`.

    published: devices in the slices on the API server. missing: feature gates that the server lacks for what policy
    wants, `DRADeviceTaints`. fault: what does not work now, a sentence; empty where all is well. unwritten: why a CDI
    specification of a prepared claim is missing or wrong. restored: how many were, and were written again. node: this
    node's name in Kubernetes.
    """

    published: int = 0
    missing: tuple[str, ...] = ()
    fault: str = ""
    unwritten: str = ""
    restored: int = 0
    node: str = ""


class AskView(Struct, frozen=True, tag=True):
    """A question for the view, once its number is not `after`. report: None: as it was."""

    after: int = 0
    report: DriverReport | None = None


class AskPrepare(Struct, frozen=True, tag=True):
    """An order to reserve a claim's GPUs for its pods. The same claim again: the same answer, with the pods of now."""

    claim: AllocatedClaim


class AskUnprepare(Struct, frozen=True, tag=True):
    """An order to release what was reserved for a claim; a claim that is not prepared is no fault."""

    uid: ClaimUid


Question = AskView | AskPrepare | AskUnprepare


class Prepared(Struct, frozen=True, tag=True):
    """The answer that a claim's GPUs are reserved."""

    markers: tuple[tuple[str, str], ...]  # for each result in its order, the variable that stands for it: name, value
    required: bool  # whether the mount that keeps a container from starting without our reply belongs beside them


class Unprepared(Struct, frozen=True, tag=True):
    """The answer that a claim holds nothing any more."""


class ClaimFault(Struct, frozen=True, tag=True):
    """The answer that says why not."""

    sentence: str  # which `kubectl describe pod` shows
    passing: bool = False  # the fault may be over in less than a second
    holders: tuple[PreparedName, ...] = ()  # claims that hold the GPU; once the API server has all end, it may be free
    code: str = Code.NODE_NOT_READY.value
    uuid: str = ""  # of the GPU or MIG device that it cannot have, or empty


Answer = NodeView | Prepared | Unprepared | ClaimFault
