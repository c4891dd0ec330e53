"""What `[metrics]` costs a daemon: Prometheus' library in memory, and the time of a scrape."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.figures import Figure
from bench.process import Running, daemon

SCRAPES: Final = 20


def figures(folder: Path, ready: Callable[[Running], None]) -> Iterator[Figure]:
    """A daemon with metrics that were scraped beside one without."""
    path = folder / "metrics.sock"
    policy = folder / "metrics.toml"
    policy.write_text(f'[metrics]\nlisten = "{path}"\n')
    scraped = daemon(folder, "scraped", policy=policy, state=folder / "state-scraped")
    bare = daemon(folder, "unscraped", state=folder / "state-unscraped")
    try:
        for plugin in (scraped, bare):
            ready(plugin)
        taken = [_scrape_s(path) * 1e3 for _ in range(SCRAPES)]
        (rss, pss), (bare_rss, bare_pss) = scraped.memory_mib(), bare.memory_mib()
    finally:
        scraped.stop()
        bare.stop()
    yield Figure("resident (RSS), with metrics that are scraped", rss, "MiB")
    yield Figure("  what they add", rss - bare_rss, "MiB", 15, 8)
    yield Figure("  what they add, as PSS", pss - bare_pss, "MiB", 15, 8)
    yield Figure("a scrape, 8 GPUs and no grant", statistics.median(taken), "ms", 50, 10)


def _scrape_s(path: Path) -> float:
    began = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(path))
        one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        while one.recv(1 << 20):
            pass
    return time.perf_counter() - began
