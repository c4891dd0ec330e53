"""Which devices a container's cgroup lets it open, on cgroup v1 (readable rules) and v2 (an eBPF program)."""

import json
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Self

from msgspec import Struct

from tests.support import packages


class Cgroup(StrEnum):
    """The cgroup generation that a containerd sees at /sys/fs/cgroup."""

    V1 = "v1"
    V2 = "v2"


def host_cgroup() -> Cgroup:
    """What this machine has. v1 can show v2 to a containerd in a mount namespace; not the other way round."""
    return Cgroup.V2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else Cgroup.V1


class DeviceRule(Struct, frozen=True, order=True):
    """One line of a v1 devices.list. kind: a, b or c; None: any number; access: of the letters rwm."""

    kind: str
    major: int | None
    minor: int | None
    access: str

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read `c 195:0 rw` or `a *:* rwm`."""
        kind, numbers, access = line.split()
        major, minor = (None if number == "*" else int(number) for number in numbers.split(":"))
        return cls(kind, major, minor, access)


def device_rules(cgroup: Path) -> frozenset[DeviceRule]:
    """What a v1 devices cgroup allows."""
    return frozenset(DeviceRule.parse(line) for line in (cgroup / "devices.list").read_text().splitlines())


def device_programs(cgroup: Path) -> tuple[int, ...]:
    """Ids of the eBPF programs that filter a v2 cgroup's devices. None: everything may be opened."""
    shown = subprocess.run(
        [packages.bpftool(), "--json", "cgroup", "show", cgroup], capture_output=True, text=True, check=True
    ).stdout
    # bpftool of newer kernels says "cgroup_device", older ones "device"; nothing attached is an empty text.
    attached = json.loads(shown or "[]")
    return tuple(program["id"] for program in attached if program["attach_type"].endswith("device"))
