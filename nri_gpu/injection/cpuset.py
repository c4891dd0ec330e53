"""The CPUs and the memory nearest to a container's GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import NumaNode, Unit, whole
from nri_gpu.domain.placement import NumaBinding


class Cpuset(Struct, frozen=True):
    """Lists in the kernel's syntax; empty: not ours to say."""

    cpus: str = ""
    mems: str = ""


UNBOUND: Final = Cpuset()
_CPUS: Final = frozenset({NumaBinding.CPUS, NumaBinding.BOTH})
_MEMORY: Final = frozenset({NumaBinding.MEMORY, NumaBinding.BOTH})


def cpuset_of(units: Iterable[Unit], nodes: Sequence[NumaNode], binding: NumaBinding, *, pinned: bool) -> Cpuset:
    """What a container that is granted these is kept to. pinned: somebody else has set its cpuset.

    Nothing where the node of one GPU is not known: the others' would keep it away from that one. A node without CPUs or
    without memory adds none, and the kernel refuses an empty list.
    """
    if binding is NumaBinding.NONE or pinned:
        return UNBOUND
    wanted = {whole(unit).numa_node for unit in units}
    near = [node for node in nodes if node.number in wanted]
    if len(near) < len(wanted):
        return UNBOUND
    return Cpuset(
        cpus=",".join(node.cpus for node in near if node.cpus) if binding in _CPUS else "",
        mems=",".join(str(node.number) for node in near if node.memory) if binding in _MEMORY else "",
    )
