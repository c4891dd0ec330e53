"""What `nri-gpu dra` asks the daemon on its socket `dra.sock`, and what the daemon answers. One question a connection.

    driver process: one JSON document and a line break          daemon: one JSON document, then it closes

The daemon decides and keeps everything: what is offered, which claims are prepared, the key that signs their markers.
The driver process carries it to the API server and to the kubelet, and can be restarted at any time.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from nri_gpu.domain.resource_claim import AllocatedClaim, ClaimUid

DRA_SOCKET: Final = "dra.sock"  # in the state folder, for root alone
VIEW_WAIT_S: Final = 20.0  # for how long the daemon keeps a question for a view that has not changed


class Version(Struct, frozen=True, tag=True):
    """An attribute of the type `version`, as semver: `580.95.5`."""

    text: str


Attribute = bool | int | str | Version


class Taint(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Keeps claims from a device, as ResourceSlices have it. effect: NoSchedule, or NoExecute, which also evicts pods.

    time_added: the API server's, where we set none.
    """

    key: str
    value: str = ""
    effect: str = ""
    time_added: str | None = None


class Capacity(Struct, frozen=True):
    """What a device has of something, in bytes or as a number. share: what one of several claims consumes of it."""

    amount: int
    share: int = 0


class OfferedDevice(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device as it is published. The devices of an offer are in the order in which to use them.

    shared: several claims may have it at once. counters: what it consumes of its GPU's counter set; empty for none.
    counter_set: name of that set. fault: why no claim can have it, or empty.
    """

    name: str
    attributes: dict[str, Attribute]
    capacity: dict[str, Capacity]
    taints: tuple[Taint, ...] = ()
    shared: bool = False
    counter_set: str = ""
    counters: dict[str, int] = {}
    fault: str = ""


class PreparedName(Struct, frozen=True):
    """A claim that is prepared on this node. reread: its pods may have changed, so it is to be prepared again."""

    uid: ClaimUid
    namespace: str
    name: str
    reread: bool = False


class NodeView(Struct, frozen=True, kw_only=True, tag=True):
    """What the driver process needs to know of the node.

    number: another one whenever anything in it changed. driver, dir, registry_dir, cdi_dir: of the policy.
    counter_sets: name -> counter -> amount. known: whether the inventory has been taken; before that nothing is
    published or withdrawn.
    """

    number: int
    driver: str
    dir: str
    registry_dir: str
    cdi_dir: str
    known: bool = False
    devices: tuple[OfferedDevice, ...] = ()
    counter_sets: dict[str, dict[str, int]] = {}
    claims: tuple[PreparedName, ...] = ()


class DriverReport(Struct, frozen=True):
    """What the driver process says of itself, for `nri-gpu status`.

    published: devices in the slices on the API server. missing: feature gates that the server lacks for what policy
    wants, `DRADeviceTaints`. fault: what does not work now, a sentence; empty where all is well. unwritten: why a CDI
    specification of a prepared claim is missing or wrong. restored: how many were, and were written again.
    """

    published: int = 0
    missing: tuple[str, ...] = ()
    fault: str = ""
    unwritten: str = ""
    restored: int = 0


class AskView(Struct, frozen=True, tag=True):
    """The view, once its number is another one than `after`. report: None: as it was."""

    after: int = 0
    report: DriverReport | None = None


class AskPrepare(Struct, frozen=True, tag=True):
    """Reserve the claim's GPUs for its pods. The same claim again: the same answer, with the pods of now."""

    claim: AllocatedClaim


class AskUnprepare(Struct, frozen=True, tag=True):
    """Release what was reserved for the claim; one that is not prepared is no fault."""

    uid: ClaimUid


Question = AskView | AskPrepare | AskUnprepare


class Prepared(Struct, frozen=True, tag=True):
    """The claim's GPUs are reserved.

    markers: for each result in its order, the variable that stands for it: name and value. required: whether the mount
    that keeps a container from starting without our reply belongs beside them.
    """

    markers: tuple[tuple[str, str], ...]
    required: bool


class Unprepared(Struct, frozen=True, tag=True):
    """It holds nothing any more."""


class ClaimFault(Struct, frozen=True, tag=True):
    """Why not: one sentence, which `kubectl describe pod` shows. passing: it may be over in less than a second.

    holders: it may be over as soon, if the API server says that all of these claims, which hold the GPU, are ending.
    """

    sentence: str
    passing: bool = False
    holders: tuple[PreparedName, ...] = ()


Answer = NodeView | Prepared | Unprepared | ClaimFault
