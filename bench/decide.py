"""Deciding alone, in this process: a big node with many holders, under a policy of many rules.

The requests and the ledgers differ, so that placement is not always asked the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from bench.effort import Effort
from bench.figures import Figure, percentile
from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Inject
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Node
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import Policy
from nri_gpu.policy.rules import Rule, RuleList
from tests.support import builders as make
from tests.support.fabrics import KNOWN

GPUS: Final = 16
GRANTS: Final = 64
RULES: Final = 1000
LEDGERS: Final = 16
TITLE: Final = f"Deciding alone; {GPUS} GPUs, {GRANTS} grants, {RULES} rules"
CLAIMS: Final = ("1", "2", "4", "1;mode=shared", "3;mode=shared", "model=*A100*", "memory>=40Gi;mode=shared")


def figures(effort: Effort) -> Iterator[Figure]:
    """Of decisions under a policy without rules, and with all of them."""
    source = random.Random(0)  # the same requests every time
    node = _node()
    ledgers = [_ledger(node, source) for _ in range(LEDGERS)]
    for name, policy, budget in (("no rules", Policy.default(), (None, None)), ("", _policy(), (1000.0, 200.0))):
        took = _taken(effort.requests, node, ledgers, policy)
        for percent, most in ((50, (None, None)), (99, budget)):
            yield Figure(
                f"decide, {name or f'{RULES} rules'}, p{percent}", percentile(took, percent) * 1e6, "us", *most
            )


def _taken(number: int, node: Node, ledgers: Sequence[Ledger], policy: Policy) -> list[float]:
    """Seconds for each decision."""
    took = []
    for turn in range(number):
        container = _container(turn)
        began = time.perf_counter()
        decision = decide(container, node, ledgers[turn // 2 % LEDGERS], policy)
        took.append(time.perf_counter() - began)
        if not isinstance(decision, Inject):
            raise RuntimeError(f"bench needs its grants: {decision}")  # noqa: TRY004 - it has a right type
    return took


def _node() -> Node:
    return replace(make.node(), inventory=KNOWN["dgx2"])


def _container(turn: int) -> Container:
    labels = {"app": f"app-{turn % 50}", "team": f"team-{turn % 20}", "pod-template-hash": "5d4f8c7b9"}
    of = make.pod(f"pod-{turn:08}", CLAIMS[turn // 2 % len(CLAIMS)], namespace=f"ns-{turn % RULES}", labels=labels)
    return make.container(of=of)


def _ledger(node: Node, source: random.Random) -> Ledger:
    """Half of the GPUs are shared by many, the others free: not always the same ones."""
    shared = source.sample([gpu.index for gpu in node.gpus], GPUS // 2)
    held = [
        make.entry(
            shared[number % len(shared)],
            phase=GrantPhase.RUNNING,
            mode=Mode.SHARED,
            to=make.container(of=f"old-{number}"),
        )
        for number in range(GRANTS)
    ]
    return make.ledger(*held)


def _policy() -> Policy:
    """Rules by all that operators match by; most are about namespaces, and the last is about everybody."""
    rules = [_rule(number) for number in range(RULES - 1)]
    return replace(Policy.default(), rule=RuleList((*rules, Rule(allow=True, namespace=Globs(("ns-*",))))))


def _rule(number: int) -> Rule:
    match number % 4:
        case 0:
            return Rule(allow=True, name=f"r{number}", namespace=Globs((f"ns-{number}",)))
        case 1:
            return Rule(allow=True, namespace=Globs((f"ns-{number}", f"old-{number}-*")), pod=Globs(("pod-*",)))
        case 2:
            return Rule(allow=False, labels=(("team", Globs((f"no-such-{number}*",))),))
        case _:
            return Rule(allow=True, namespace=Globs((f"*-{number}",)), container=Globs(("m?in",)))
