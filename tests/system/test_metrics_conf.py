"""The drop-in for metrics: with it a port of the loopback is served from within the unit's sandbox, and no more."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import Final

import pytest

from tests.support.daemon import Launch, NriGpu
from tests.support.metrics import scraped
from tests.support.prometheus import free_port
from tests.support.unit_file import OURS, Unit
from tests.support.waiting import wait_for
from tests.system.sandboxed import Sandboxed

DROP_IN: Final = OURS.parent / "nri-gpu.service.d" / "metrics.conf"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox of namespaces needs root")


def launch(folder: Path, metrics: str) -> Launch:
    return Launch(folder, folder / "nri.sock", metrics=metrics)


def test_it_opens_the_loopback_alone() -> None:
    unit = Unit.read(DROP_IN)
    assert unit.words("IPAddressAllow") == ["localhost"]
    assert unit.words("RestrictAddressFamilies") == ["AF_INET", "AF_INET6"]
    assert all(line.why for line in unit.lines)


def test_with_it_a_port_is_served(folder: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}/metrics"
    with Sandboxed(launch(folder, f"127.0.0.1:{port}"), DROP_IN.read_text()) as daemon:
        daemon.wait_logged("metrics are served")
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert scraped(answer.read().decode()).value("nri_gpu_connected") == 0


def test_without_it_the_log_names_it_and_a_socket_is_served(folder: Path) -> None:
    with Sandboxed(launch(folder, f"127.0.0.1:{free_port()}"), "") as daemon:
        assert "drop-in metrics.conf" in daemon.wait_logged("metrics are not served")
    path = folder / "state" / "metrics.sock"
    with NriGpu(launch(folder, str(path))) as daemon:
        wait_for("the socket", path.exists, 10, daemon.log)
