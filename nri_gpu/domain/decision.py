"""The decision for a container: pass, inject or refuse, each a type of its own."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

from msgspec import Struct

from nri_gpu.domain.container import Container, ContainerId, PodId, PodUid
from nri_gpu.domain.edits import Edits
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.value import Recorded

# The runtime's own prefix and the kubelet's event both grow around it; an event message holds 1024 bytes.
REFUSAL_MAX: Final = 700  # characters


class Grant(Recorded, frozen=True, kw_only=True):
    """The GPUs one container holds."""

    container_id: ContainerId
    container_name: str
    pod_id: PodId
    pod_uid: PodUid
    pod_name: str
    namespace: str
    uuids: tuple[GpuUuid, ...]
    mode: Mode | None  # None for a grant that keeps no GPU from others: of none (`none`), or for monitoring
    # Of the driver it was made with, and behind a `+` that of a CUDA compatibility package, if it has one.
    generation: str
    seat: Seat | None = None  # its share of an MPS daemon, or None in other modes

    @property
    def pod(self) -> str:
        """Return `namespace/name`."""
        return f"{self.namespace}/{self.pod_name}"

    @property
    def held(self) -> tuple[GpuUuid, ...]:
        """Return the GPUs that the grant keeps from others."""
        return self.uuids if self.mode else ()

    @property
    def generations(self) -> tuple[str, ...]:
        """Return the names of the staged folders that the grant needs."""
        return tuple(self.generation.split("+"))

    @classmethod
    def to(
        cls,
        container: Container,
        uuids: tuple[GpuUuid, ...],
        mode: Mode | None,
        generation: str,
        seat: Seat | None = None,
    ) -> Self:
        """Return a grant of these GPUs to a container."""
        return cls(
            container_id=container.id,
            container_name=container.name,
            pod_id=container.pod.id,
            pod_uid=container.pod.uid,
            pod_name=container.pod.name,
            namespace=container.pod.namespace,
            uuids=uuids,
            mode=mode,
            generation=generation,
            seat=seat,
        )


class Code(StrEnum):
    """The kinds of refusals. Stable: operators grep for them, alerts are built on them."""

    BAD_REQUEST = "bad-request"  # the annotation cannot be understood
    NOT_ALLOWED = "not-allowed"  # policy says no
    BAD_RUNTIME = "bad-runtime"  # its pod is in a virtual machine, where what we give leads to no GPU
    NO_SUCH_GPU = "no-such-gpu"  # names a GPU this node does not have, or has none that match
    GPU_UNAVAILABLE = "gpu-unavailable"  # it is there and cannot be granted: lost, MIG mode
    REQUIREMENT_NOT_MET = "requirement-not-met"  # the image requires a driver or GPU that it would not get
    OVER_LIMIT = "over-limit"  # policy grants so many, and this would be more
    GPU_BUSY = "gpu-busy"  # held in a way that excludes this request
    NODE_NOT_READY = "node-not-ready"  # driver, modules or inventory are missing
    BAD_POLICY = "bad-policy"  # the policy file is broken and no good one is kept
    HELD_BY_OTHERS = "held-by-others"  # the container already has GPU nodes of another component
    VOLUME_IN_THE_WAY = "volume-in-the-way"  # the pod mounts a volume where a GPU's node goes
    RESTORED = "restored"  # its pod asks, and the runtime restores it from a checkpoint, of whose start it tells nobody
    NOT_GRANTED = "not-granted"  # it asks, but was created without us: it must not start
    REQUEST_TOO_LARGE = "request-too-large"  # itself or its answer, or with too many entries
    LIST_TOO_LARGE = "list-too-large"  # with it, the runtime could not list this node's containers to us any more
    UNGRANTED_NODES = "ungranted-nodes"  # a plugin added GPU nodes that no grant of ours names
    INCOMPLETE_GRANT = "incomplete-grant"  # a plugin removed GPU nodes or driver files that its grant gave


PERMISSION_CODES: Final = frozenset({Code.NOT_ALLOWED})


class Reason(Struct, frozen=True):
    """A refusal. If it comes from elsewhere, such as a fault of the node, its `what` may say the rest, too."""

    code: Code
    what: str  # is wrong, and where
    why: str = ""  # that is so, where `what` needs it
    cure: str = ""
    aside: str = ""  # what else to know, in brackets behind the rest

    @property
    def sentence(self) -> str:
        """Return `what: cure.`, or `what: why; cure (aside).`."""
        text = f"{self.what}: {self.why}" if self.why else self.what
        text += f"{'; ' if self.why else ': '}{self.cure}" if self.cure else ""
        text = f"{text} ({self.aside})" if self.aside else text
        return text if text.endswith((".", "?", "!")) else f"{text}."

    def __str__(self) -> str:
        """Return it as the client sees it: ASCII, at most REFUSAL_MAX characters, no line breaks."""
        text = self._text
        text = "".join(c if " " <= c <= "~" else "?" for c in text)
        return text if self.fits else text[: REFUSAL_MAX - 3] + "..."

    @property
    def fits(self) -> bool:
        """Return whether the client sees all of it."""
        return len(self._text) <= REFUSAL_MAX

    @property
    def _text(self) -> str:
        return f"nri-gpu [{self.code}]: {self.sentence}"


NOT_ASKED: Final = "no gpu annotation"


class Refused(Struct, frozen=True, kw_only=True):
    """A refusal, as it is published. number: 1 for the first. at_s: seconds since the epoch. what: was refused.

    container: empty where a pod was refused.
    """

    number: int
    at_s: float
    what: str
    code: str
    reason: str
    namespace: str
    pod: str
    container: str = ""


class Pass(Struct, frozen=True):
    """The decision to grant no GPU, as the container asked for none or policy ignores that it asked."""

    edits: Edits  # usually none; policy may disarm an image's NVIDIA_VISIBLE_DEVICES
    why: str = NOT_ASKED
    note: str = ""  # something an operator should know of this container; mostly empty
    ignored: bool = False  # the container asked, and policy ignores that


class Inject(Struct, frozen=True):
    """The decision to grant: what to add, and what the ledger remembers."""

    edits: Edits
    grant: Grant
    rule: str = ""  # the policy rule that allowed it
    note: str = ""  # something an operator should know of this grant; mostly empty
    compat: str = ""  # which newer CUDA than the driver's it gets, or why none; empty if it wants none
    completes: tuple[GpuUuid, ...] = ()  # GPUs of another component that the edits are for; the grant then names none
    why: str = ""  # why it gets no GPU although an annotation of its pod asks for some; mostly empty
    left_out: str = ""  # what NVIDIA_DRIVER_CAPABILITIES names beyond what the container gets, and why; mostly empty


class Refuse(Struct, frozen=True):
    """The decision that the container must not be created."""

    reason: Reason


Decision = Pass | Inject | Refuse
