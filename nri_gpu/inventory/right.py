"""The driver's rights to configure and to monitor MIG: a capability node each, told of by files under /proc."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nri_gpu.domain.edits import DeviceNode
from nri_gpu.domain.extras import Offer
from nri_gpu.inventory.capabilities import CAP_MINOR_MAX

_CAPS: Final = "nvidia-caps"
# DeviceFileMode is decimal: 256 is 0400, root's alone (kernel-open/nvidia/nv-caps.c).
_LINE: Final = re.compile(r"^(DeviceFileMinor|DeviceFileMode):[ \t]*([0-9]{1,5})[ \t]*$", re.MULTILINE)
_PERMISSIONS: Final = 0o777


def right_to_mig(right: str, proc: Path, majors: Mapping[str, frozenset[int]]) -> Offer:
    """The node of a right, `config` or `monitor`, with the mode that the driver says."""
    major = min(majors.get(_CAPS, ()), default=None)
    if major is None:
        return Offer(lacking=f"{_CAPS} is not in /proc/devices: load kernel module nvidia")
    path = proc / "driver/nvidia/capabilities/mig" / right
    try:
        facts = {name: int(value) for name, value in _LINE.findall(path.read_text(encoding="ascii", errors="replace"))}
    except OSError:
        return Offer(lacking=f"{path} is not there: no GPU of this driver can be cut by MIG")
    minor, mode = facts.get("DeviceFileMinor"), facts.get("DeviceFileMode")
    if minor is None or mode is None or minor > CAP_MINOR_MAX or mode & ~_PERMISSIONS:
        return Offer(lacking=f"{path} does not tell minor and mode of the capability")
    return Offer(nodes=(DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor, mode),))
