"""The board: whole snapshots, each with the next number."""

from __future__ import annotations

from nri_gpu.domain.edits import Profiles
from nri_gpu.domain.node import DriverFiles, Inventory
from nri_gpu.system.state import Board

DRIVER = DriverFiles("580.95.05", "580.95.05-1", {}, {})


def test_every_change_is_a_new_snapshot() -> None:
    board = Board(Inventory(taken_at=0, fault="starting"), "looking")
    first = board.snapshot()
    assert (first.number, first.driver, first.driver_fault, first.generation) == (1, None, "looking", "-")
    board.put_inventory(Inventory(taken_at=5))
    board.put_driver(DRIVER)
    last = board.snapshot()
    assert (last.number, last.inventory.taken_at, last.driver, last.driver_fault) == (3, 5, DRIVER, "")
    board.put_driver(None, "gone.")
    assert (board.snapshot().driver, board.snapshot().driver_fault) == (None, "gone.")
    assert first.number == 1
    assert board.snapshot().module_version is None
    profiles = Profiles("/p", frozenset({1}))
    board.put_profiles(profiles)
    assert board.snapshot().profiles is profiles
    board.put_module("580.95.05")
    assert (board.snapshot().number, board.snapshot().module_version) == (6, "580.95.05")
