"""The text that Prometheus reads, in pages: the loop that writes them answers the runtime between two pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from nri_gpu.daemon.metric_families import families
from nri_gpu.daemon.view import View
from nri_gpu.ledger.ledger import Ledger

__all__ = ["CONTENT_TYPE", "GRANTS_MAX", "PAGE_S", "pages"]

GRANTS_MAX: Final = 10_000  # series of nri_gpu_grant_info; more than 500 pods with 16 GPUs each
PAGE_S: Final = 0.001
GRANT_INFO: Final = "nri_gpu_grant_info"
GRANT_LABELS: Final = ("uuid", "namespace", "pod", "container", "mode")


class OneFamily(Struct, frozen=True):
    """A collector of one family."""

    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


def pages(view: View) -> Iterator[bytes]:
    """Yield the text, in pages that take about PAGE_S each to make."""
    for family in families(view):
        yield generate_latest(OneFamily(family))
    yield from _grant_pages(view.ledger)


def _grant_pages(ledger: Ledger) -> Iterator[bytes]:
    """Yield one series for each GPU and each container that holds it, also if several containers share it.

    Containers of one pod may have one name: the one that is ending, and its successor. They are one series.
    """
    seen: set[tuple[str, ...]] = set()
    page, until, left_out = [generate_latest(OneFamily(_grant_info()))], time.perf_counter() + PAGE_S, 0
    for entry in ledger.entries.values():
        grant = entry.grant
        for uuid in grant.held if entry.holds else ():
            labels = (uuid, grant.namespace, grant.pod_name, grant.container_name, grant.mode or "")
            if labels in seen:
                continue
            if len(seen) >= GRANTS_MAX:
                left_out += 1
                continue
            seen.add(labels)
            page.append(_grant_line(labels))
        if time.perf_counter() > until:
            yield b"".join(page)
            page, until = [], time.perf_counter() + PAGE_S
    name, about = "nri_gpu_grants_left_out", f"Series that {GRANT_INFO} has no room for."
    yield b"".join([*page, generate_latest(OneFamily(GaugeMetricFamily(name, about, value=left_out)))])


def _grant_info() -> GaugeMetricFamily:
    return GaugeMetricFamily(GRANT_INFO, "1 for each GPU and each container that holds it.", labels=GRANT_LABELS)


@lru_cache(maxsize=GRANTS_MAX)  # most grants are there at the next scrape, too, and a line takes 20 microseconds
def _grant_line(labels: tuple[str, ...]) -> bytes:
    family = _grant_info()
    family.add_metric(labels, 1)
    _help, _type, line = generate_latest(OneFamily(family)).split(b"\n", 2)
    return line
