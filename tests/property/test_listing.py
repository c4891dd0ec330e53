"""What is called sendable is sent by the runtime's own arithmetic, whatever the order of its list."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.nri.list_size import FRAME_BYTES, PART_MAX, WHOLE_MAX, unsendable

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


@given(nodes, st.integers())
def test_no_order_of_a_sendable_list_fails(node: tuple[list[int], list[int]], seed: int) -> None:
    pods, containers = node
    if unsendable(pods, containers, splits=True):
        return
    order = random.Random(seed)
    for turn in range(8):
        pods.sort(reverse=bool(turn & 1))
        containers.sort(reverse=bool(turn & 2))
        if turn > 3:
            order.shuffle(pods)
            order.shuffle(containers)
        assert sent(pods, containers) == ""


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
