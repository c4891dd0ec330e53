"""Create and start of one container on a real containerd: every contender once a round, in random order.

Machines slow down and recover while one waits, so a contender is compared with its neighbours of the same round only.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec import Struct

from bench.effort import Effort
from bench.figures import Figure, paired
from bench.sites import Cost, Site, Sites
from bench.wire import reply_s
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.node import Loader
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid
from nri_gpu.dra.client import DaemonClient
from nri_gpu.dra.messages import AskPrepare, Prepared
from nri_gpu.dra.specification import ClaimSpecifications
from tests.support.cri import Pod
from tests.support.pods import ContainerSpec

TITLE: Final = "Create + start of one container on a real containerd, against bare (NRI off, no GPU); CPU likewise"
BARE, AGAIN = "bare", "bare, on a second containerd (noise)"
NOTHING, UNASKED = "NRI, a plugin that does nothing", "nri-gpu, nothing asked"
ONE, EIGHT = "nri-gpu, 1 GPU", "nri-gpu, 8 GPUs"
TREE, FILES = "nri-gpu, 8 GPUs, loader = tree", "nri-gpu, 8 GPUs, loader = files"
CDI = "8 GPUs, our CDI specification, NRI off"
CLAIMED_ONE, CLAIMED_EIGHT = "nri-gpu, 1 GPU of a claim", "nri-gpu, 8 GPUs of a claim"
PLAIN: Final = ContainerSpec()
# Contender -> (must, aim), against bare.
BUDGET: Final = {ONE: (1.13, 1.09), EIGHT: (1.15, 1.10)}
# Contender -> another one with which it is compared, too.
BESIDE: Final = {UNASKED: NOTHING, CLAIMED_ONE: ONE, CLAIMED_EIGHT: EIGHT}
BESIDE_BUDGET: Final = {UNASKED: (1.03, 1.00)}
SHARE_BUDGET: Final = (3.0, 2.0)  # percent


class Contender(Struct, frozen=True):
    """A container that can be had again and again."""

    site: Site
    pod: Pod
    spec: ContainerSpec = PLAIN

    def life(self) -> Cost:
        return self.site.one_life(self.pod, self.spec)

    def additions(self) -> tuple[int, int]:
        return self.site.additions(self.pod, self.spec)


Costs = Mapping[str, list[Cost]]


def figures(effort: Effort) -> Iterator[Figure]:
    """All of this part. Raises: HarnessError where no containerd can be had."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as folder, ExitStack() as stack:
        contenders = _contenders(Sites(stack, Path(folder)))
        names = _described(contenders)
        reply = reply_s(Path(folder), "all", effort.requests)
        costs = _rounds(contenders, effort)
    yield Figure(BARE, statistics.median(cost.wall_s for cost in costs[BARE]) * 1e3, "ms")
    for name in (each for each in contenders if each != BARE):
        yield _figure(names[name], costs[name], costs[BARE], BUDGET.get(name))
        if other := BESIDE.get(name):
            yield _figure(f"  against: {other}", costs[name], costs[other], BESIDE_BUDGET.get(name))
    share = reply / statistics.median(cost.wall_s for cost in costs[EIGHT])
    yield Figure("CreateContainer's share of create + start, 8 GPUs", share * 100, "%", *SHARE_BUDGET)


def _contenders(sites: Sites) -> Mapping[str, Contender]:
    bare, again, nothing = sites.bare(), sites.bare(), sites.nothing()
    ours, tree, files = sites.ours(), sites.ours(Loader.TREE), sites.ours(Loader.FILES)
    claims = sites.ours(dra=True)
    claiming = claims.pod()
    cdi = _prepared(claims, claiming)
    return {
        BARE: Contender(bare, bare.pod()),
        AGAIN: Contender(again, again.pod()),
        NOTHING: Contender(nothing, nothing.pod()),
        UNASKED: Contender(ours, ours.pod()),
        ONE: Contender(ours, ours.pod({"gpu.nri.io/pod": "1"})),
        EIGHT: Contender(ours, ours.pod({"gpu.nri.io/pod": "all"})),
        TREE: Contender(tree, tree.pod({"gpu.nri.io/pod": "all"})),
        FILES: Contender(files, files.pod({"gpu.nri.io/pod": "all"})),
        CLAIMED_ONE: Contender(claims, claiming, ContainerSpec(cdi_devices=cdi[:1])),
        CLAIMED_EIGHT: Contender(claims, claiming, ContainerSpec(cdi_devices=cdi)),
        CDI: Contender(again, again.pod(), ContainerSpec(cdi_devices=("nvidia.com/gpu=all",))),
    }


def _prepared(site: Site, pod: Pod) -> tuple[str, ...]:
    """The CDI names of a pod's claim to eight GPUs, as `nri-gpu dra` prepares it."""
    metadata, uid = pod.config.metadata, ClaimUid("5a1c9b1e-0d5f-4a63-8f86-0a54a1c7e001")
    claim = AllocatedClaim(
        uid=uid,
        namespace=metadata.namespace,
        name="eight",
        pods={PodUid(metadata.uid): metadata.name},
        results=tuple(AllocatedResult(request=f"gpu-{at}", pool="node", device=f"gpu-{at}") for at in range(8)),
        owned=True,
    )
    answer = asyncio.run(DaemonClient(site.state).ask(AskPrepare(claim)))
    assert isinstance(answer, Prepared), answer
    return ClaimSpecifications(site.node.layout.cdi).write(uid, answer)


def _described(contenders: Mapping[str, Contender]) -> Mapping[str, str]:
    """Contender -> its line's name, with what its container has beyond the bare one: seen, not believed."""
    nodes, mounts = contenders[BARE].additions()
    names = {}
    for name, contender in contenders.items():
        more_nodes, more_mounts = contender.additions()
        more = f" ({more_nodes - nodes} nodes, {more_mounts - mounts} mounts)" if more_nodes > nodes else ""
        names[name] = name + more
    return names


def _rounds(contenders: Mapping[str, Contender], effort: Effort) -> Costs:
    costs: Costs = {name: [] for name in contenders}
    for _ in range(effort.warm_up_rounds + effort.containers):
        for name in random.sample(list(contenders), len(contenders)):
            costs[name].append(contenders[name].life())
    return {name: each[effort.warm_up_rounds :] for name, each in costs.items()}


def _figure(name: str, ours: list[Cost], theirs: list[Cost], budget: tuple[float, float] | None) -> Figure:
    wall = paired([cost.wall_s for cost in ours], [cost.wall_s for cost in theirs])
    cpu = paired([cost.cpu_s for cost in ours], [cost.cpu_s for cost in theirs])
    must, aim = budget or (None, None)
    return Figure(name, wall.median, "x", must, aim, f"±{wall.spread:.2f}, CPU {cpu.median:.2f} ±{cpu.spread:.2f}")
