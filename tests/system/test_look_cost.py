"""The cost of the observer's look on a full node."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.verify.oci_bundles import TASKS
from tests.support.look_node import NVIDIA, device_cgroups, processes, spec, write_bundle

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups")

CONTAINERS, PROCESSES = 1000, 5000
CPU_S: Final = 3.0  # a look takes less than half a second; this one runs other tests beside it


def test_a_look_at_a_full_node(tmp_path: Path) -> None:
    """A tenth of the containers have a GPU; each has a cgroup of its own, which the kernel is asked about."""
    numbers = [(NVIDIA, minor) for minor in (*range(32), 254, 255)]
    wish = {"owner": 0, "majors": [NVIDIA], "numbers": numbers, "root": str(tmp_path)}
    with processes(PROCESSES) as pids:
        ids = {f"{at:064x}": pids[at] for at in range(CONTAINERS)}
        for at, (id_, pid) in enumerate(ids.items()):
            write_bundle(tmp_path / "run/containerd" / TASKS, id_, spec(f"pod-{at}", *[at % 8] * (at % 10 == 0)), pid)
        with device_cgroups(ids):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-I", "-m", "nri_gpu.observe.look"]
            done = subprocess.run(command, input=json.dumps(wish).encode(), capture_output=True, check=True, env={})
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    sys.stdout.write(f"a look at {CONTAINERS} containers and {PROCESSES} processes: {cpu_s:.2f} s of CPU\n")
    *found, extent = map(json.loads, done.stdout.splitlines())
    assert sum(bool(each.get("nodes")) for each in found) == CONTAINERS / 10
    assert all(each["opens"] is not None for each in found)
    assert extent["processes"] >= PROCESSES
    assert cpu_s < CPU_S
