"""What is called sendable is sent by the runtime's own arithmetic, whatever the order of its list."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.list_size import FRAME_BYTES, GROWTH_BYTES, PART_MAX, WHOLE_MAX, share_bytes, unsendable
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.policy.plugin_settings import PluginSettings
from tests.support import nri_messages as nri

MESSAGE_MAX: Final = 4 << 20  # bytes that ttrpc takes
FEWEST: Final = 8  # objects that the runtime still tries to send together


def sent(pods: Sequence[int], containers: Sequence[int]) -> str:
    """How containerd/nri v0.7 to v0.12 fares with objects of these sizes in this order; empty: it sends them.

    pkg/adaptation/plugin.go (synchronize, recalcObjsPerSyncMsg).
    """
    pods, containers = list(pods), list(containers)
    of_pods, of_containers = len(pods), len(containers)
    while True:
        if of_pods > len(pods) or of_containers > len(containers):
            return "panics"
        part = (*pods[:of_pods], *containers[:of_containers])
        size = sum(part) + FRAME_BYTES * len(part)
        if size <= MESSAGE_MAX:
            pods, containers = pods[of_pods:], containers[of_containers:]
            if not (pods or containers):
                return ""
            if not part:
                return "sends empty parts for ever"
            of_pods, of_containers = min(of_pods, len(pods)), min(of_containers, len(containers))
        elif of_pods + of_containers <= FEWEST:
            return "gives up"
        else:
            factor = min(MESSAGE_MAX / size, 0.9)
            of_pods, of_containers = int(of_pods * factor), int(of_containers * factor)
            if of_pods + of_containers < FEWEST:
                of_pods = of_containers = FEWEST // 2


small, middling, large = st.integers(1, 4_000), st.integers(1, 80_000), st.integers(100_000, 600_000)
sizes = st.lists(small | middling, max_size=60).flatmap(
    lambda most: st.lists(large | st.just(458_752), max_size=30).map(lambda few: [*most, *few])
)
nodes = st.tuples(sizes, sizes) | st.builds(
    lambda pods, containers, size: ([size // 30] * pods, [size] * containers),
    st.integers(1, 120),
    st.integers(1, 300),
    st.integers(20_000, 460_000),
)


def fates(pods: Sequence[int], containers: Sequence[int], seed: int = 0) -> set[str]:
    """How the runtime fares in several orders."""
    pods, containers, order, found = list(pods), list(containers), random.Random(seed), set()
    for turn in range(8):
        pods.sort(reverse=bool(turn & 1))
        containers.sort(reverse=bool(turn & 2))
        if turn > 3:
            order.shuffle(pods)
            order.shuffle(containers)
        found.add(sent(pods, containers))
    return found


@given(nodes, st.integers())
def test_no_order_of_a_sendable_list_fails(node: tuple[list[int], list[int]], seed: int) -> None:
    if not unsendable(*node, splits=True):
        assert fates(*node, seed) == {""}


def filled_up(sizes: Sequence[int], share: int) -> list[int]:
    """A pod of exactly its share: of these sizes what goes into it, and the rest in one object."""
    sums = [0, *accumulate(size + FRAME_BYTES for size in sizes)]
    count = bisect_right(sums, share - FRAME_BYTES) - 1
    return [share - FRAME_BYTES - sums[count], *sizes[:count]]


@given(st.lists(st.lists(small | middling), min_size=1, max_size=200))
def test_pods_below_their_share_go_into_one_message(pods: list[list[int]]) -> None:
    """The first of a pod's sizes is its own, the rest its containers'."""
    full = [filled_up(pod, share_bytes(len(pods), splits=True)) for pod in pods]
    own, containers = [pod[0] for pod in full], [size for pod in full for size in pod[1:]]
    assert sum(size + FRAME_BYTES for size in (*own, *containers)) <= PART_MAX
    assert unsendable(own, containers, splits=True) == ""


@pytest.mark.parametrize("max_pods", [9, 11, 38, 91, 110, 250, 500])
def test_no_larger_share_is_safe(max_pods: int) -> None:
    """So many pods of a byte more each, all of it annotations but for one container."""
    size = MESSAGE_MAX // max_pods + 1
    assert 0 < size - share_bytes(max_pods, splits=True) <= 2 + (MESSAGE_MAX - PART_MAX) // max_pods
    pods = [*[size - FRAME_BYTES] * (max_pods - 1), 500]
    assert sent(pods, [size - 500 - 2 * FRAME_BYTES]) == "sends empty parts for ever"


class Node:
    """Pods and containers as they are created and removed, by what `Sizes` refuses; `pods` has their listed sizes."""

    def __init__(self) -> None:
        self.sizes = Sizes(PluginSettings, lambda action: action(), lambda *_: None)
        self.pods: dict[str, list[tuple[pb.Container | None, int]]] = {}

    def create(self, of: pb.PodSandbox, size: int) -> bool:
        """Create a container, with its pod before it. Returns whether it was refused; never below the share."""
        there = self.pods.setdefault(of.id, [(None, of.ByteSize())])
        made = pb.Container(id=f"{of.id}-{len(there)}", pod_sandbox_id=of.id, env=["x" * size])
        listed = made.ByteSize() + GROWTH_BYTES
        payload = nri.create(of, made)
        refused = self.sizes.refusal(payload) is not None
        assert not (refused and self.bytes_of(of.id) + listed + FRAME_BYTES <= share_bytes(110, splits=True))
        if not refused:
            self.sizes.created(payload)
            there.append((made, listed))
        return refused

    def remove(self, of: pb.PodSandbox) -> None:
        for made, _ in self.pods.pop(of.id, []):
            if made:
                self.sizes.ended(nri.event(Event.STOP_CONTAINER, of, made)[1], Event.STOP_CONTAINER)
        self.sizes.ended(nri.event(Event.REMOVE_POD_SANDBOX, of)[1], Event.REMOVE_POD_SANDBOX)

    def bytes_of(self, id_: str) -> int:
        return sum(size + FRAME_BYTES for _, size in self.pods[id_])

    def fates(self) -> set[str]:
        return fates(
            [pod[0][1] for pod in self.pods.values()], [size for pod in self.pods.values() for _, size in pod[1:]]
        )


PODS: Final = [nri.pod(f"p{number}", annotations={"x": "x" * 1_000 * number}) for number in range(12)]
steps = st.tuples(
    st.sampled_from(PODS), st.integers(0, 60), st.sampled_from([1_000, 4_000, 20_000, 60_000, 200_000, 440_000])
)


@given(st.lists(steps, min_size=1, max_size=30))
@example([*((of, 1, 1_000) for of in PODS), (PODS[0], 80, 60_000)])  # the list could be sent, one pod of it not
def test_who_pays_for_a_list_is_the_pod_that_made_it(life: list[tuple[pb.PodSandbox, int, int]]) -> None:
    """Whatever is created and removed. A step creates so many containers in a pod; none: it removes the pod."""
    node = Node()
    for of, count, size in life:
        if not count:
            node.remove(of)
            continue
        for _ in range(count):
            before = len(node.pods.get(of.id, ()))
            if node.create(of, size):
                break
        over = node.bytes_of(of.id) > share_bytes(110, splits=True)
        if over and len(node.pods[of.id]) > before:
            assert node.fates() == {""}
        assert node.bytes_of(of.id) <= PART_MAX


def full(node: Node, of: pb.PodSandbox) -> None:
    """One part of one pod: nine large containers, and small ones until one is refused."""
    for size in (440_000, 20_000, 1_000):
        while not node.create(of, size):
            pass


def others_went(node: Node) -> None:
    """Two full pods beside others, most of which are removed."""
    others = [nri.pod(f"o{number}") for number in range(30)]
    for of in others:
        node.create(of, 30_000)
    full(node, PODS[0])
    full(node, PODS[1])
    for of in others[2:]:
        node.remove(of)


def others_came(node: Node) -> None:
    """One full pod, and others that stay below their share."""
    full(node, PODS[0])
    for number in range(40):
        assert not node.create(nri.pod(f"o{number % 4}"), 1_000)


@pytest.mark.parametrize("step", [others_went, others_came])
def test_what_the_rule_leaves_open_is_told_and_cured_by_what_is_named(step: Callable[[Node], None]) -> None:
    node = Node()
    step(node)
    assert "sends empty parts for ever" in node.fates()
    named = node.sizes.fault.partition("remove ")[2]
    for of in (PODS[0], PODS[1]):
        if f"ml/{of.name} " in named:
            node.remove(of)
    assert node.fates() == {""}
    assert node.sizes.fault == ""


@given(nodes)
def test_an_old_runtime_sends_what_goes_into_one_message(node: tuple[list[int], list[int]]) -> None:
    total = sum(size + FRAME_BYTES for sizes_ in node for size in sizes_)
    assert bool(unsendable(*node, splits=False)) is (total > WHOLE_MAX)


ORDINARY = [2_000] * 12


@pytest.mark.parametrize(
    ("pods", "containers"),
    [
        ([2_000], [PART_MAX - 3_000]),
        ([2_000] * 300, [70_000] * 300),
        ([2_000] * 110, [60_000, 70_000] * 125),
        ([250_000] * 24, [4_000] * 24),
        ([2_000] * 110, [20_000] * 242 + [440_000] * 8),
        (ORDINARY, [67_000] * 80),
    ],
    ids=["one message", "300 pods of 70 kB", "service variables", "large pods", "a few large ones", "80 in 12 pods"],
)
def test_nodes_that_must_not_be_refused(pods: list[int], containers: list[int]) -> None:
    assert unsendable(pods, containers, splits=True) == ""


@pytest.mark.parametrize(
    ("pods", "containers", "fate", "why"),
    [
        ([2_000], [400 << 10] * 40, "sends empty parts for ever", "rounds down to 0"),
        ([2_000], [200_000] * 30, "sends empty parts for ever", "rounds down to 0"),
        ([2_000] * 2, [1_900_000] * 9, "panics", "do not fit into one part"),
        ([2_000] * 3, [1_900_000] * 5, "gives up", "do not fit into one part"),
    ],
)
def test_what_was_seen_to_fail(pods: list[int], containers: list[int], fate: str, why: str) -> None:
    assert sent(pods, containers) == fate
    assert why in unsendable(pods, containers, splits=True)
