"""How many GPUs may be granted to whom, and the sentence when it would be more.

A MIG device counts as a GPU. What counts is distinct GPUs: a pod whose two containers share one holds one.
"""

from collections.abc import Iterator, Set
from typing import Annotated, Final

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.text import quoted
from nri_gpu.policy.forms import UNLIMITED, about, limit

_LIMIT: Final = limit()


class Limits(Struct, frozen=True, kw_only=True):
    """How many GPUs may be granted; a MIG device counts as one. Checked when a container is created, never later."""

    gpus_per_container: Annotated[int, _LIMIT, about("GPUs of one container.")] = UNLIMITED
    gpus_per_pod: Annotated[int, _LIMIT, about("Different GPUs of all containers of a pod together.")] = UNLIMITED
    gpus_per_namespace: Annotated[
        int, _LIMIT, about("Different GPUs of all pods of a namespace on this node together.")
    ] = UNLIMITED
    exclusive_gpus_per_namespace: Annotated[
        int, _LIMIT, about("The same, counting only those held in exclusive mode.")
    ] = UNLIMITED
    gpus_per_node: Annotated[
        int, _LIMIT, about("Different GPUs of this node that may be granted at all at one time.")
    ] = UNLIMITED
    containers_per_gpu: Annotated[int, limit(minimum=1), about("Containers that may share one GPU in shared mode.")] = (
        UNLIMITED
    )


NO_LIMITS: Final = Limits()
LIMIT_KEYS: Final = Limits.__struct_fields__


class Holdings(Struct, frozen=True, kw_only=True):
    """What is held before a container gets its own: different GPUs of its pod, its namespace, and all."""

    pod: Set[GpuUuid] = frozenset()
    namespace: Set[GpuUuid] = frozenset()
    namespace_exclusive: Set[GpuUuid] = frozenset()
    node: Set[GpuUuid] = frozenset()


class Excess(Struct, frozen=True):
    """One limit that a grant would break. whose: `pod "x"`; used, more: GPUs held, and those that would come on top."""

    key: str
    limit: int
    whose: str
    used: int
    more: int

    def sentence(self, path: str, source: str) -> str:
        """For a refusal. path: where the limit stands, `rule[2].limits.gpus_per_pod`. source: the policy file."""
        held = f", of which {self.used} {'is' if self.used == 1 else 'are'} held already" if self.used else ""
        wait = "wait until some are given back, " if self.used and self.more <= self.limit else ""
        return (
            f"{self.whose} may have at most {self.limit} {_noun(self.key, self.limit)}{held}; this container asks for "
            f"{self.more}{' more' * bool(self.used)} ({path} in {source}): {wait}ask for fewer, or raise that limit."
        )


def excesses(
    limits: Limits, held: Holdings, chosen: Set[GpuUuid], namespace: str, pod: str, *, exclusive: bool
) -> Iterator[Excess]:
    """Every limit that granting these GPUs would break, the narrowest first."""
    none: Set[GpuUuid] = frozenset()
    in_namespace = f"namespace {quoted(namespace)}"
    counted = (
        ("gpus_per_container", "a container", none, chosen),
        ("gpus_per_pod", f"pod {quoted(pod)}", held.pod, chosen),
        ("exclusive_gpus_per_namespace", in_namespace, held.namespace_exclusive, chosen if exclusive else none),
        ("gpus_per_namespace", in_namespace, held.namespace, chosen),
        ("gpus_per_node", "all containers of this node together", held.node, chosen),
    )
    for key, whose, before, new in counted:
        limit, more = getattr(limits, key), len(new - before)
        if more and len(before) + more > limit:
            yield Excess(key, limit, whose, len(before), more)


def counts_holders(limits: Limits) -> bool:
    """Whether any limit depends on what other containers hold."""
    return any(
        limit != UNLIMITED
        for limit in (
            limits.gpus_per_pod,
            limits.gpus_per_namespace,
            limits.exclusive_gpus_per_namespace,
            limits.gpus_per_node,
        )
    )


def _noun(key: str, number: int) -> str:
    return f"GPU{'s' * (number != 1)}{' in exclusive mode' * key.startswith('exclusive')}"
