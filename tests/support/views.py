"""What a daemon answers at one moment, by the parts that a test chooses."""

from __future__ import annotations

import json
from typing import Any

from msgspec import convert, to_builtins

from nri_gpu.daemon.answers import DaemonStatus, PolicyStatus, RuntimeConnection
from nri_gpu.daemon.view import View, status_of
from nri_gpu.domain.container import Cgroup, FirstProcess
from nri_gpu.domain.node import Node
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.plugin.counts import Counts
from nri_gpu.policy.model import Policy
from tests.support import builders as make

NOW, CLOCK = 1_800_000_000.0, 5_000.0
TRAIN, OTHER = make.container(of="train"), make.container(of="other")


def started(ledger: Ledger) -> Ledger:
    """With a first process of each container that ran, in a cgroup of its own."""
    for id_ in (id_ for id_, entry in ledger.entries.items() if entry.ran and id_ not in ledger.processes):
        ledger = ledger.with_processes({id_: FirstProcess(41, 1, Cgroup("", f"/kubepods/{id_}"))})
    return ledger


def view(ledger: Ledger | None = None, node: Node | None = None, **fields: Any) -> View:  # noqa: ANN401 - of a View
    return View(
        **{
            "node": node or make.node(),
            "node_name": "node1",
            "ledger": started(ledger or make.ledger()),
            "connection": RuntimeConnection(ready=True, since_s=NOW - 60, name="containerd", version="2.1.9"),
            "wall": NOW,
            "monotonic": CLOCK,
            "inventory_age_s": 3.0,
            "inventory_fault": "",
            "policy": PolicyStatus("/etc/nri-gpu/policy.toml", ""),
            "settings": Policy(),
            "counts": Counts(),
            **fields,
        }
    )


def status_json(seen: View) -> Any:  # noqa: ANN401 - JSON values
    sent = json.loads(json.dumps(to_builtins(status_of(seen))))
    assert convert(sent, DaemonStatus) == status_of(seen)  # as a client reads it
    return sent
