"""What the observer costs where nothing comes or goes: resident memory, and CPU with its children's looks counted in.

The node is a made-up NVML's with eight GPUs, and 200 containers, each with one of them. In so many seconds there is one
look by time: `observe.look_s` is 300 by default.

python -m bench.observe [SECONDS]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.process import EIGHT_GPUS, cpu_s, installed, memory_mib
from nri_gpu.cli.ask_daemon import ask
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.inventory.topology_file import load_topology
from tests.support.daemon import READY_S
from tests.support.nvml import build_fake_nvml, gpus_of
from tests.support.waiting import wait_for

CONTAINERS: Final = 200
SECONDS: Final = 310.0
SETTLED_S: Final = 10.0
MAJOR: Final = 195
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


def make_bundles(state: Path) -> None:
    """Containers of pods as containerd writes them, with a node each."""
    for number in range(CONTAINERS):
        bundle = state / "io.containerd.runtime.v2.task/k8s.io" / f"{number:064x}"
        bundle.mkdir(parents=True)
        device = {"path": f"/dev/nvidia{number % 8}", "type": "c", "major": MAJOR, "minor": number % 8}
        rule = {"allow": True, "type": "c", "major": MAJOR, "minor": number % 8, "access": "rw"}
        names = {"sandbox-namespace": "ml", "sandbox-name": f"pod-{number}", "container-name": "main"}
        spec = {
            "annotations": {f"io.kubernetes.cri.{key}": value for key, value in names.items()},
            "process": {"env": [f"VARIABLE_{each}=value" for each in range(40)]},
            "linux": {"devices": [device], "resources": {"devices": [{"allow": False, "access": "rwm"}, rule]}},
        }
        (bundle / "config.json").write_text(json.dumps(spec))


def reaped_s(pid: int) -> float:
    """Seconds of CPU of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) * TICK_S


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(each) for task in tasks for each in (task / "children").read_text().split()]


def measure(folder: Path, seconds: float) -> str:
    """Two lines: memory and CPU."""
    root, run_dir = folder / "driver", folder / "run"
    gpus, ancestors = gpus_of(load_topology(EIGHT_GPUS))
    build_fake_nvml(root, gpus, ancestors=ancestors)
    make_bundles(folder / "containerd")
    (folder / "policy.toml").write_text(f'[driver]\nroot = "{root}"\n[metrics]\nlisten = "{folder}/metrics.sock"\n')
    options = {"--policy": folder / "policy.toml", "--run-dir": run_dir, "--containerd-state": folder / "containerd"}
    words = [str(word) for pair in {**options, "--state-dir": folder / "none"}.items() for word in pair]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        installed("nri_gpu.cli.main", "observe", *words), env=environment, stderr=subprocess.DEVNULL
    )

    def looked() -> bool:
        try:
            seen = ask(run_dir / CONTROL_SOCKET, "status", DaemonStatus).observer
        except (OSError, ValueError):
            return False
        return seen is not None and seen.looked_s is not None

    try:
        wait_for("a look", looked, READY_S)
        time.sleep(SETTLED_S)
        pid, living = process.pid, children(process.pid)

        def spent() -> tuple[float, float]:
            return cpu_s(pid), reaped_s(pid) + sum(map(cpu_s, living))

        before, began = spent(), time.monotonic()
        time.sleep(seconds)
        after, took_s = spent(), time.monotonic() - began
        own, theirs = ((late - early) / took_s * 1000 for early, late in zip(before, after, strict=True))
        rss, pss = memory_mib(pid)
    finally:
        process.terminate()
        process.wait()
    return (
        f"resident: {rss:.1f} MiB (PSS {pss:.1f}); metrics on\n"
        f"CPU: {own:.2f} ms/s of its own and {theirs:.2f} of its children, over {took_s:.0f} s"
    )


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as folder:
        print(measure(Path(folder), float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
