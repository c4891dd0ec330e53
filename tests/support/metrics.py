"""Views of a daemon that was never started, and the text of metrics as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from nri_gpu.daemon.answers import PolicyStatus, RuntimeConnection, StrayStatus
from nri_gpu.daemon.view import View
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.ledger import Entry, Ledger
from nri_gpu.plugin.counts import Counts
from nri_gpu.policy.model import Policy
from tests.support import builders as make
from tests.support.plugin import node

Labels = frozenset[tuple[str, str]]


class Scraped(Struct, frozen=True):
    """What a scrape returned. types: of each family. samples: name and labels -> value."""

    types: Mapping[str, str]
    samples: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """Of one series."""
        return self.samples[name, frozenset(labels.items())]

    def series(self, name: str) -> list[dict[str, str]]:
        """The labels of each series of that name."""
        return [dict(labels) for other, labels in self.samples if other == name]


def scraped(text: str) -> Scraped:
    """The text as Prometheus' own library reads it. A series that comes twice is a fault."""
    families = list(text_string_to_metric_families(text))
    named = [
        (sample.name, frozenset(sample.labels.items()), sample.value) for each in families for sample in each.samples
    ]
    samples = {(name, labels): value for name, labels, value in named}
    assert len(samples) == len(named), "a series comes twice"
    assert len({each.name for each in families}) == len(families), "a family comes twice"
    return Scraped({each.name: each.type for each in families}, samples)


def entry(number: int, uuids: Iterable[str], mode: Mode = Mode.SHARED, pod: str = "") -> Entry:
    """A running container of a pod of its own."""
    holder = make.container(of=pod or f"train-{number}", id=ContainerId(f"container-{number}"))
    return make.entry_of(*map(GpuUuid, uuids), mode=mode, to=holder)


def ledger(entries: Iterable[Entry]) -> Ledger:
    return make.ledger(*entries)


VIEW: Final = View(
    node=node(),
    ledger=Ledger(),
    connection=RuntimeConnection(ready=True, since_s=0.0),
    wall=0.0,
    monotonic=0.0,
    inventory_age_s=1.0,
    inventory_fault="",
    policy=PolicyStatus("", ""),
    settings=Policy(),
    counts=Counts(),
    guard_connected=True,
    stray=StrayStatus(enabled=True, looked_s=1.0),
)


def view(**changed: object) -> View:
    """Return that of a healthy node with four GPUs, but for these. Its counts are its own."""
    return replace(VIEW, **{"counts": Counts(), **changed})
