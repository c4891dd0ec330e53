"""Prepares the host: look, plan, act, and look again, until nothing is left to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, assert_never

from msgspec import Struct

from nri_gpu.host.facts import (
    Action,
    Finding,
    FixNode,
    HostError,
    HostFacts,
    HostPaths,
    KernelModule,
    LoadModule,
    MakeLink,
    MakeNode,
)
from nri_gpu.host.modules import load_module
from nri_gpu.host.nodes import fix_node, make_link, make_node
from nri_gpu.host.plan import HostPlan, make_plan

# Modules, then the nodes they serve, then a round with nothing to do; one more in case others make nodes meanwhile.
_ROUNDS: Final = 4

Act = Callable[[Action], None]


class PrepareReport(Struct, frozen=True):
    """What was done, in order, and what is left for the administrator. facts: of the last look."""

    facts: HostFacts
    done: tuple[Action, ...] = ()
    findings: tuple[Finding, ...] = ()


def prepare(look: Callable[[], HostFacts], act: Act, *, graphics: bool = False) -> PrepareReport:
    """Perform all actions. A failed one is not tried again, and becomes a finding.

    act: performs one action, and raises HostError or OSError if that fails.
    """
    done: dict[Action, None] = {}
    failed: dict[Action, str] = {}
    facts, plan = _look_and_plan(look, graphics)
    for _ in range(_ROUNDS):
        todo = [action for action in plan.actions if action not in failed]
        if not todo:
            break
        for action in todo:
            failure = _perform(action, act, failed)
            if failure:
                failed[action] = failure
            else:
                done[action] = None
        facts, plan = _look_and_plan(look, graphics)
    return PrepareReport(facts, tuple(done), (*plan.findings, *_left(plan, failed)))


def actor(places: HostPaths, driver_root: Path) -> Act:
    """A function that performs one action on this host."""

    def act(action: Action) -> None:
        match action:
            case LoadModule():
                load_module(action.module, places, driver_root)
            case MakeNode():
                make_node(places.dev, action)
            case FixNode():
                fix_node(places.dev, action)
            case MakeLink():
                make_link(places.dev, action)
            case _:
                assert_never(action)

    return act


def _look_and_plan(look: Callable[[], HostFacts], graphics: bool) -> tuple[HostFacts, HostPlan]:
    facts = look()
    return facts, make_plan(facts, graphics=graphics)


def _perform(action: Action, act: Act, failed: dict[Action, str]) -> str:
    """Why the action failed; empty if it did not."""
    if isinstance(action, LoadModule) and LoadModule(KernelModule.NVIDIA) in failed:
        return "not tried, as it depends on nvidia"
    try:
        act(action)
    except HostError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _left(plan: HostPlan, failed: dict[Action, str]) -> Iterator[Finding]:
    for action in plan.actions:
        reason = failed.get(action, "something else on this host keeps undoing it")
        yield Finding(action.subject, f"{action.UNDONE}: {reason}")
