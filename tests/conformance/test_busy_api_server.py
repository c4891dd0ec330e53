"""An API server that answers 429 or 503 for a minute: it is not hammered, and no GPU is granted twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from tests.conformance.test_dra import site_on
from tests.support.api_server import Canned
from tests.support.containerd import Containerd
from tests.support.dra_kubelet import ClaimFaultError
from tests.support.marks import on_newest
from tests.support.waiting import in_a_loop

BUSY_S = 60.0
ASKS_EVERY_S = 5.0  # a kubelet, for a pod whose claim is not prepared
MOST = 2 * BUSY_S  # requests in that minute, for two claims that the kubelet wants and the node's slices
BUSY = {"429": Canned(429, headers={"Retry-After": "1"}, times=-1), "503": Canned(503, times=-1)}


@on_newest
@pytest.mark.long
@in_a_loop
@pytest.mark.parametrize("status", BUSY)
async def test_a_busy_api_server(node: Containerd, tmp_path: Path, folder: Path, status: str) -> None:
    async with site_on(node, tmp_path, folder) as site:
        pods = [str(uuid4()) for _ in range(3)]
        held = site.claim("held", "gpu-0", pod=pods[0])
        await site.run(await site.pod("web", pods[0]), "main", await site.prepare(held))
        same, free = site.claim("same", "gpu-0", pod=pods[1]), site.claim("free", "gpu-1", pod=pods[2])

        site.server.canned = [replace(BUSY[status])]
        site.server.end_watches()
        asked, until = len(site.server.requests), time.monotonic() + BUSY_S
        while time.monotonic() < until:
            for claim in (same, free):
                with pytest.raises(ClaimFaultError, match=f"ResourceClaim ml/{claim[1]}: the API server .* {status}"):
                    await site.prepare(claim)
            await asyncio.sleep(ASKS_EVERY_S)
        requests = Counter(site.server.requests[asked:])
        assert 0 < requests.total() <= MOST, requests

        site.server.canned.clear()
        container = await site.run(await site.pod("free", pods[2]), "main", await site.prepare(free))
        site.check(container, 1)
        with pytest.raises(ClaimFaultError, match="held exclusively by ml/web"):
            await site.prepare(same)
