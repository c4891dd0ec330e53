"""The plugin's log lines, written after its replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from loguru import logger

from nri_gpu.decision.asked import needs_grant
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Decision, Inject, Pass, Reason, Refuse, Refused
from nri_gpu.domain.edits import Edits
from nri_gpu.domain.node import Node
from nri_gpu.ledger.grant_text import InvalidGrant
from nri_gpu.policy.model import Policy

# NRI can add hooks and cannot remove any, so nothing less helps (containerd/nri: pkg/runtime-tools/generate).
HOOK_ADVICE: Final = (
    "a CDI specification, a runtime or another plugin of NVIDIA's adds it; `nri-gpu check` names those on this node"
)

KEPT: Final = 32  # refusals


class HooksSeen:
    """The programs of NVIDIA that hooks of containers were seen to run."""

    def __init__(self) -> None:
        self._seen: frozenset[str] = frozenset()

    def warn_of(self, container: Container) -> None:
        """Warn once per program that something else injects GPUs on this node."""
        for program in sorted(container.nvidia_hooks - self._seen):
            logger.bind(**container_fields(container), fault=f"{program}: {HOOK_ADVICE}").warning(
                "a container has NVIDIA's hooks"
            )
        self._seen |= container.nvidia_hooks


def warn_ungranted(container: Container, grant: InvalidGrant | None, policy: Policy) -> bool:
    """Warn of a forged grant, and of a container that asked and was created without a decision.

    Return whether the container was created without a decision.
    """
    if isinstance(grant, InvalidGrant):
        logger.bind(**container_fields(container), fault=grant.why).warning("signed grant ignored")
        return False
    if not needs_grant(container, policy):
        return False
    bound = logger.bind(**container_fields(container))
    bound.warning("container asked for GPUs but was created without nri-gpu: delete its pod to have it granted")
    return True


class Refusals:
    """The log of refusals, which keeps the last ones for `nri-gpu status`. clock: seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.last: deque[Refused] = deque(maxlen=KEPT)
        self._clock = clock
        self._total = 0

    def add(self, fields: Mapping[str, object], reason: Reason, phrase: str) -> None:
        """Log a refusal as `log_refusal` does, and remember it."""
        log_refusal(fields, reason, phrase)
        self._total += 1
        self.last.append(
            Refused(
                number=self._total,
                at_s=self._clock(),
                what=phrase,
                code=reason.code.value,
                reason=reason.sentence,
                namespace=str(fields["namespace"]),
                pod=str(fields["pod_name"]),
                container=str(fields.get("container_name", "")),
            )
        )


def log_refusal(fields: Mapping[str, object], reason: Reason, phrase: str) -> None:
    """Log one line for what must not be created or started. fields: which container or pod it is."""
    logger.bind(**fields, decision="refuse", code=reason.code.value, reason=reason.sentence).info(phrase)


def log_decision(container: Container, decision: Decision, node: Node, elapsed_s: float, refusals: Refusals) -> None:
    """Log a decision in one line: at INFO, but a pass at DEBUG. Warn of its note."""
    facts = {**container_fields(container), "elapsed_ms": elapsed_s * 1e3, "inventory_number": node.number}
    match decision:
        case Inject(edits, grant, rule, note, compat, completes, why, left_out):
            uuids = ",".join(completes or grant.uuids) or "-"
            facts |= {
                "gpu_uuid": uuids,
                "mode": grant.mode or ("admin" if grant.uuids else "none"),
                "rule": rule,
                "reason": compat or why,
                "replaced": ",".join(_replaced(edits, container)),
                "left_out": left_out,
            }
            phrase = "container completed for GPUs that another component allocated" if completes else "GPU granted"
            logger.bind(**facts, decision="inject", generation=grant.generation).info(phrase)
            if note:
                logger.bind(**facts, fault=note).warning("GPU granted, with something to know")
        case Refuse(reason):
            refusals.add(facts, reason, "container refused")
        case Pass(_, why, note):
            logger.bind(**facts, decision="pass", reason=why).debug("container passed")
            if note:
                logger.bind(**facts, fault=note).warning("container that requests no GPU can open GPUs")


def _replaced(edits: Edits, container: Container) -> list[str]:
    """Return the variables, devices and mounts of the container that ours take the place of."""
    devices = edits.devices.keys() & {device.path for device in container.devices}
    return sorted(edits.env.keys() & container.env.keys()) + sorted(devices | (edits.mounts.keys() & container.mounts))


def log_revoked(fields: Mapping[str, str], uuids: Iterable[str], holders: Iterable[str]) -> None:
    """Log a container that runs although it lost its GPUs. holders: the pods that hold them."""
    bound = logger.bind(**fields, gpu_uuid=",".join(uuids), holder=" and ".join(sorted({*holders})))
    bound.error("container runs on GPUs that another pod holds")


def container_fields(container: Container) -> dict[str, str]:
    """Return the fields by which a log line names a container."""
    pod = container.pod
    return {
        "namespace": pod.namespace,
        "pod_name": pod.name,
        "container_name": container.name,
        "pod_uid": pod.uid,
        "container_id": container.id,
    }
