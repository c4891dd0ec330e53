"""The node state: whole snapshots, each with the next number, and who is called when something changed."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from nri_gpu.domain.node import DriverFiles, Inventory
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import Changed, NodeState

DRIVER = DriverFiles("580.95.05", "580.95.05-1", {}, {})


def test_every_change_is_a_new_snapshot() -> None:
    state = NodeState(Inventory(taken_at=0, fault="starting"), "looking")
    first = state.node
    assert (first.driver, first.driver_fault, first.generation, first.module_version) == (None, "looking", "-", None)
    state.put_inventory(Inventory(taken_at=5))
    state.put_driver(DRIVER)
    assert (state.node.inventory.taken_at, state.node.driver, state.node.driver_fault) == (5, DRIVER, "")
    state.put_driver(None, "gone.")
    state.put_module("580.95.05")
    last = state.node
    assert (last.driver_fault, last.module_version) == ("gone.", "580.95.05")
    assert (first.number, last.number) == (1, 5)


def test_followers_are_told_after_the_reply_once_of_all_changes_that_they_subscribed_to() -> None:
    put_off: list[Callable[[], None]] = []
    state = NodeState(Inventory(taken_at=0), later=put_off.append)
    calls: list[str] = []
    state.then(lambda: calls.append(f"all {state.node.number}"), *Changed)
    state.then(lambda: calls.append("ledger"), Changed.LEDGER)
    state.first(lambda: calls.append("inline"), Changed.NODE)
    state.put_inventory(Inventory(taken_at=1))
    state.use(Policy.default())
    state.commit(state.ledger)
    assert calls == ["inline"]
    put_off.pop()()
    assert calls == ["inline", "all 2"]
    state.commit(Ledger())
    put_off.pop()()
    assert (calls[2:], put_off) == (["all 2", "ledger"], [])


def test_a_broken_policy_leaves_the_fallbacks_settings() -> None:
    fallback = replace(Policy.default(), plugin=replace(Policy.default().plugin, index="42"))
    state = NodeState(Inventory(taken_at=0), fallback=fallback)
    assert state.settings.plugin.index == "10"
    state.use(Policy.broken("line 3"))
    assert (state.policy.fault, state.settings) == ("line 3", fallback)


def test_the_ledger_is_the_runtimes_once_it_is_synchronized() -> None:
    state = NodeState(Inventory(taken_at=0))
    assert state.synchronized_ledger is None
    state.synchronized = True
    assert state.synchronized_ledger is state.ledger
