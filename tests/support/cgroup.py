"""Which devices a container's cgroup lets it open, on cgroup v1 (readable rules) and v2 (an eBPF program)."""

import json
import subprocess
from enum import StrEnum
from pathlib import Path

from nri_gpu.verify.kernel import DeviceRule
from tests.support import packages


class Cgroup(StrEnum):
    """The cgroup generation that a containerd sees at /sys/fs/cgroup."""

    V1 = "v1"
    V2 = "v2"


def host_cgroup() -> Cgroup:
    """What this machine has. v1 can show v2 to a containerd in a mount namespace; not the other way round."""
    return Cgroup.V2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else Cgroup.V1


def device_rules(cgroup: Path) -> frozenset[DeviceRule]:
    """What a v1 devices cgroup allows."""
    return frozenset(DeviceRule.parse(line) for line in (cgroup / "devices.list").read_text().splitlines())


def device_programs(cgroup: Path) -> tuple[int, ...]:
    """Ids of the eBPF programs that filter a v2 cgroup's devices. None: everything may be opened."""
    shown = subprocess.run(
        [*packages.command("bpftool"), "--json", "cgroup", "show", cgroup], capture_output=True, text=True, check=True
    ).stdout
    # bpftool of newer kernels says "cgroup_device", older ones "device"; nothing attached is an empty text.
    attached = json.loads(shown or "[]")
    return tuple(program["id"] for program in attached if program["attach_type"].endswith("device"))
