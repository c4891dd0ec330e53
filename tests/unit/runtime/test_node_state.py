"""The node_state: whole snapshots, each with the next number."""

from __future__ import annotations

from nri_gpu.domain.edits import Profiles
from nri_gpu.domain.node import DriverFiles, Inventory
from nri_gpu.system.state import NodeState

DRIVER = DriverFiles("580.95.05", "580.95.05-1", {}, {})


def test_every_change_is_a_new_snapshot() -> None:
    node_state = NodeState(Inventory(taken_at=0, fault="starting"), "looking")
    first = node_state.node
    assert (first.number, first.driver, first.driver_fault, first.generation) == (1, None, "looking", "-")
    node_state.put_inventory(Inventory(taken_at=5))
    node_state.put_driver(DRIVER)
    last = node_state.node
    assert (last.number, last.inventory.taken_at, last.driver, last.driver_fault) == (3, 5, DRIVER, "")
    node_state.put_driver(None, "gone.")
    assert (node_state.node.driver, node_state.node.driver_fault) == (None, "gone.")
    assert first.number == 1
    assert last.module_version is None
    profiles = Profiles("/p", frozenset({1}))
    node_state.put_profiles(profiles)
    assert node_state.node.profiles is profiles
    node_state.put_module("580.95.05")
    assert (node_state.node.number, node_state.node.module_version) == (6, "580.95.05")
