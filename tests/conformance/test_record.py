"""The record of who had which GPU, of a daemon on a real containerd that is killed in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import launch_on
from tests.support.containerd import Containerd
from tests.support.daemon import READY_S, UUIDS, NriGpu, staged
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd


def asked(daemon: NriGpu, verb: str) -> Any:  # noqa: ANN401 - parsed JSON
    """What a verb prints about the daemon's record."""
    return json.loads(daemon.verb(verb, "--state-dir", str(daemon.launch.state), "-o", "json").stdout)


def held(daemon: NriGpu) -> list[tuple[str, str | None]]:
    return [(each["pod"], each["ended"]) for each in asked(daemon, "history")["holds"]]


def test_each_hold_is_kept_whenever_the_daemon_is_killed(node: Containerd, tmp_path: Path) -> None:
    launch = launch_on(node, tmp_path / "daemon")
    with staged(launch.with_policy(f'[usage]\ndir = "{tmp_path}"\n')) as daemon:
        first = node.cri.run(node.cri.asking("device=0", "first"))
        second = node.cri.run(node.cri.asking("device=1", "second"))
        wait_for("both holds", lambda: held(daemon) == [("first", None), ("second", None)], READY_S)
        daemon.restart(kill=True)
        daemon.wait_staged()
        node.cri.stop(first)
        node.cri.remove(first)
        wait_for("the end of one", lambda: held(daemon) == [("first", "ended"), ("second", None)], READY_S)
        released = daemon.wait_logged("GPU released")
        assert f"gpu_uuid={UUIDS[0]}" in released
        assert "reason=ended" in released
        daemon.kill()
        node.cri.stop(second)
        node.cri.remove(second)
        daemon.start()
        daemon.wait_staged()
        daemon.wait_held({})
        one, two = asked(daemon, "history")["holds"]
        assert (one["ended"], two["ended"]) == ("ended", "ended")  # until the daemon saw that it is gone
        assert two["held_s"] >= one["held_s"]
        (used,) = asked(daemon, "usage")["used"]
        assert used["granted_gpu_s"] == pytest.approx(one["held_s"] + two["held_s"], abs=0.01)
