"""Between cache and node state: each transition is logged once, counted and kept, and tells whom it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from msgspec.structs import replace

from nri_gpu.domain.health import KEPT, Health, HealthState, Sign, TransitionKind
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.inventory.controller import DRIVER, LABELS, PROFILES, InventoryController
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.log import hearing

NODE = make.inventory(make.gpus(2), driver_version="580.95.05")


class Rig:
    """A keeper, who follows it, and its log."""

    def __init__(self) -> None:
        self.node_state = NodeState(Inventory(taken_at=0, fault="starting"))
        self.looks: list[str] = []
        self.lines: list[str] = []
        self.now = 100.0
        self.keeper = InventoryController(self.node_state, wall=lambda: self.now)
        for name, kinds in (("driver", DRIVER), ("profiles", PROFILES), ("labels", LABELS)):
            self.keeper.subscribe(partial(self.looks.append, name), kinds)

    def then(self, inventory: Inventory) -> list[str]:
        """Publish it a second later. Returns who looked."""
        self.now += 1
        self.looks.clear()
        self.lines.clear()
        self.keeper.publish(inventory)
        assert self.node_state.node.inventory is inventory
        return self.looks

    def told(self) -> list[tuple[str, float]]:
        return [(each.transition.kind.value, each.at_s) for each in self.keeper.history.last]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    with hearing(lambda line: rig.lines.append(str(line)), "INFO"):
        yield rig


def gpu_with(**fields: object) -> Inventory:
    return replace(NODE, gpus=(replace(NODE.gpus[0], **fields), *NODE.gpus[1:]))


def test_a_node_seen_for_the_first_time_is_no_news_but_for_what_is_wrong_with_it(rig: Rig) -> None:
    fault = GpuFault(7, "nvmlDeviceGetHandleByIndex: GPU is lost (15)")
    assert rig.then(replace(gpu_with(unavailable="no"), faults=(fault,))) == ["driver", "profiles", "labels"]
    assert rig.told() == [("description", 101), ("available", 101)]
    assert [line.split()[0] for line in rig.lines] == ["INFO", "WARNING", "WARNING"]


def test_heat_that_comes_and_goes_is_counted_and_makes_nobody_look(rig: Rig) -> None:
    rig.then(NODE)
    for _ in range(3):
        assert rig.then(gpu_with(signs=(Sign.THERMAL,))) == []
        assert len(rig.lines) == 2
        assert rig.then(NODE) == []
    assert rig.keeper.history.counts == {TransitionKind.SIGN: 6}


@pytest.mark.parametrize(
    ("after", "looks"),
    [
        (replace(NODE, driver_version="590.10"), ["driver", "labels"]),
        (replace(NODE, gpus=NODE.gpus[:1]), ["profiles", "labels"]),
        (gpu_with(minor_number=5), ["profiles"]),
        (gpu_with(mig_enabled=True), ["labels"]),
        (gpu_with(memory_bytes=7), ["labels"]),
        (gpu_with(unavailable="no"), []),
        (gpu_with(health=Health(HealthState.BAD, 1.0, "XID 79", 1), unavailable="bad"), []),
    ],
)
def test_who_looks_again(rig: Rig, after: Inventory, looks: list[str]) -> None:
    rig.then(NODE)
    assert rig.then(after) == looks
    assert rig.keeper.history.total == 1


def test_a_gpu_that_cannot_be_described_is_said_when_it_comes_and_when_it_goes(rig: Rig) -> None:
    lost = replace(NODE, faults=(GpuFault(7, "gone"),))
    rig.then(NODE)
    rig.then(lost)
    assert "WARNING gpu cannot be described" in rig.lines[1]
    rig.then(replace(lost, driver_version="590.10"))
    assert not any("cannot be described" in line for line in rig.lines)
    rig.then(NODE)
    assert any("GPU 7 is gone" in line for line in rig.lines)
    assert rig.keeper.history.counts[TransitionKind.DESCRIPTION] == 2


def test_health_is_counted_here_and_logged_by_its_own_keeper(rig: Rig) -> None:
    rig.then(NODE)
    rig.then(gpu_with(health=Health(HealthState.BAD, 1.0, "XID 79", 1), unavailable="bad since"))
    assert len(rig.lines) == 1
    (happened,) = rig.keeper.history.last
    assert happened.transition.what == f"GPU 0 ({make.uuid(0)}) is bad, because of: XID 79"


def test_a_driver_that_does_not_answer_and_does_again(rig: Rig) -> None:
    rig.keeper.not_refreshed("no driver")
    rig.then(Inventory(taken_at=1.0, fault="no driver"))
    assert rig.then(NODE) == ["driver", "profiles", "labels"]
    rig.keeper.answered()
    rig.keeper.answered()
    said = [each.transition.what for each in rig.keeper.history.last if each.transition.kind is TransitionKind.ANSWER]
    assert said == ["not refreshed: no driver", "the driver answers again"]
    assert rig.keeper.history.counts[TransitionKind.GPU] == 2


def test_what_flaps_does_not_push_out_the_rest(rig: Rig) -> None:
    rig.then(NODE)
    rig.keeper.module_changed("590.10")
    for _ in range(KEPT):
        rig.then(gpu_with(signs=(Sign.THERMAL,)))
        rig.then(NODE)
    history = rig.keeper.history
    assert (history.total, len(history.last)) == (2 * KEPT + 1, KEPT + 1)
    assert history.last[0].transition.what == "kernel module nvidia 590.10 is loaded"
    assert [each.number for each in history.last] == sorted(each.number for each in history.last)
