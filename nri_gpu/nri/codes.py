"""Refusal or exception -> status code and sentence: the one table."""

from __future__ import annotations

from typing import Final, TypeAlias

from nri_gpu.domain.decision import PERMISSION_CODES, Reason
from nri_gpu.ttrpc.frames import Status, StatusCode

Reply: TypeAlias = bytes | Status  # how a request is answered: with a message, or with why not

# At each of these the runtime fails that container and shows the sentence to its client. RESOURCE_EXHAUSTED is never
# answered: in Synchronize the runtime reads it as "message too big" and tries again in smaller parts.
INTERNAL: Final = Status(StatusCode.INTERNAL, "nri-gpu [internal]: a bug in nri-gpu; its log has the traceback.")
LATE: Final = Status(
    StatusCode.DEADLINE_EXCEEDED,
    "nri-gpu [late]: the request had waited past its deadline when its turn came; nothing was granted. Try again.",
)
MALFORMED: Final = Status(
    StatusCode.INVALID_ARGUMENT, "nri-gpu [malformed]: the request is not the protobuf it should be."
)


def unknown_method(service: str, method: str, ours: str) -> Status:
    """Return UNIMPLEMENTED: at this code for an event's own RPC, the runtime falls back to StateChange."""
    return Status(StatusCode.UNIMPLEMENTED, f"method {method}" if service == ours else f"service {service}")


def out_of_order(what: str) -> Status:
    """Return the status of a request that cannot come at this point of a session."""
    return Status(StatusCode.FAILED_PRECONDITION, f"nri-gpu [out-of-order]: {what}.")


def status_of(reason: Reason) -> Status:
    """Return a refusal as the client will see it, behind the runtime's own prefix."""
    code = StatusCode.PERMISSION_DENIED if reason.code in PERMISSION_CODES else StatusCode.FAILED_PRECONDITION
    return Status(code, str(reason))
