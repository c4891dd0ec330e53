"""The node's GPUs as labels for schedulers, in the names of NVIDIA's GPU feature discovery, so that selectors hold.

Only what the inventory knows: a label that might be wrong is worse than none. So no replicas and no sharing strategy,
which the kubelet's half decides; and no `gfd.timestamp`, which would be another file with every look.
docs/kubernetes-install.md has the table.
Source: NVIDIA/k8s-device-plugin docs/gpu-feature-discovery, internal/lm.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from nri_gpu.domain.gpu import Gpu, Inventory, MigPart
from nri_gpu.domain.profile import MIG_PROFILE

PREFIX: Final = "nvidia.com"
VALUE_MAX: Final = 63  # characters of a label's value (Kubernetes: apimachinery, validation.LabelValueMaxLength)
MIB: Final = 1 << 20
MACHINE_FILE: Final = Path("/sys/class/dmi/id/product_name")

_DROPPED: Final = re.compile(r"[^A-Za-z0-9\-_. ]")
_ENDS: Final = "-_."  # a value begins and ends with a letter or digit
# By compute capability, the lowest of each first. Source: as above, internal/lm/resource.go.
_FAMILIES: Final = (
    ((3, 0), "kepler"),
    ((5, 0), "maxwell"),
    ((6, 0), "pascal"),
    ((7, 0), "volta"),
    ((7, 5), "turing"),
    ((8, 0), "ampere"),
    ((8, 9), "ada-lovelace"),
    ((9, 0), "hopper"),
    ((10, 0), "blackwell"),
    ((13, 0), "rubin"),
)


def labels(inventory: Inventory, machine: str = "") -> Mapping[str, str]:
    """Name -> value, without what is not known. machine: the host's product name.

    GPUs in MIG mode are counted by their MIG devices alone, as where that is another resource (strategy `mixed`).
    """
    found = {"gpu.machine": value_of(machine), **_driver(inventory.driver_version), **_cuda(inventory.cuda_version)}
    whole = [gpu for gpu in inventory.gpus if not gpu.mig_enabled]
    found |= _gpus(whole)
    if len(whole) < len(inventory.gpus):
        found |= {"mig.capable": "true", "mig.strategy": "mixed"}
    for profile, parts in _by_profile(inventory.parts).items():
        found |= _mig(profile, parts)
    return {f"{PREFIX}/{name}": value for name, value in found.items() if value}


def file_text(found: Mapping[str, str]) -> str:
    """Lines for Node Feature Discovery's local source."""
    return "".join(f"{name}={value}\n" for name, value in sorted(found.items()))


def value_of(text: str) -> str:
    """A name as a label's value; empty where nothing of it is left."""
    return _DROPPED.sub("", text).replace(" ", "-")[:VALUE_MAX].strip(_ENDS)


def machine_name(file: Path = MACHINE_FILE) -> str:
    """What the firmware calls this machine; empty where it does not tell."""
    try:
        return file.read_text(encoding="ascii", errors="replace")[:256].strip()
    except OSError:
        return ""


def family(arch: tuple[int, int]) -> str:
    """The architecture's name; empty for one older than any we know."""
    names = [name for least, name in _FAMILIES if least <= arch]
    return names[-1] if names else ""


def _driver(version: str) -> dict[str, str]:
    if not version:
        return {}
    major, minor, revision = (*version.split("."), "", "")[:3]
    named = {"major": major, "minor": minor, "revision": revision, "full": version}
    old = {"major": major, "minor": minor, "rev": revision}
    return {f"cuda.driver-version.{key}": value for key, value in named.items()} | {
        f"cuda.driver.{key}": value for key, value in old.items()
    }


def _cuda(version: str) -> dict[str, str]:
    if not version:
        return {}
    major, minor = (*version.split("."), "")[:2]
    return {
        "cuda.runtime-version.major": major,
        "cuda.runtime-version.minor": minor,
        "cuda.runtime-version.full": version,
        "cuda.runtime.major": major,
        "cuda.runtime.minor": minor,
    }


def _gpus(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Of the model that there are most of, and of several the first: a node has one label, whatever it has of GPUs."""
    if not gpus:
        return {"gpu.count": "0"}
    model = Counter(gpu.model for gpu in gpus).most_common(1)[0][0]
    same = [gpu for gpu in gpus if gpu.model == model]
    major, minor = same[0].arch
    return {
        "gpu.product": value_of(model),
        "gpu.count": str(len(gpus)),
        "gpu.memory": str(min(gpu.memory_bytes for gpu in same) // MIB),
        "gpu.family": family(same[0].arch),
        "gpu.compute.major": str(major),
        "gpu.compute.minor": str(minor),
    }


def _by_profile(parts: Sequence[MigPart]) -> dict[str, list[MigPart]]:
    found: dict[str, list[MigPart]] = {}
    for part in parts:
        if MIG_PROFILE.fullmatch(part.device.profile):
            found.setdefault(part.device.profile, []).append(part)
    return found


def _mig(profile: str, parts: Sequence[MigPart]) -> dict[str, str]:
    """Of the MIG devices of one profile; `+` may not stand in a label's name."""
    resource = f"mig-{profile.replace('+', '.')}"
    return {
        f"{resource}.product": value_of(f"{parts[0].model}-MIG-{profile.replace('+', '.')}"),
        f"{resource}.count": str(len(parts)),
        f"{resource}.memory": str(min(part.memory_bytes for part in parts) // MIB),
    }
