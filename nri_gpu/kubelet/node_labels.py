"""Node labels for schedulers, with the names of NVIDIA's GPU feature discovery, so that selectors keep working.

A label that might be wrong is worse than no label, so unknown values are left out. There is no `gfd.timestamp`, which
would change the file every time. docs/kubernetes-install.md has the table.
Source: NVIDIA/k8s-device-plugin docs/gpu-feature-discovery, internal/lm.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.decision.offered import kubelet_offer
from nri_gpu.domain.bounds import PROFILE, UNKNOWN_MODEL
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.gpu import Gpu, MigPart, Unit, is_compute_slice, slices
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.rules import PoolList
from nri_gpu.system.state import NodeState
from nri_gpu.system.storage import text_of, write_whole
from nri_gpu.system.tasks import LogOnce, work_when_told

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
NO_POOLS: Final = PoolList()
RETRY_S: Final = 60.0
MODE: Final = 0o644  # Node Feature Discovery need not run as root


def node_labels(
    inventory: Inventory, machine: str, kubelet: KubeletSettings, pools: PoolList = NO_POOLS
) -> Mapping[str, str]:
    """Map labels' names to their values, without unknown values.

    machine: the host's product name. kubelet: the resources that the labels describe. Without a device plugin, MIG
    devices have labels of their own, as with strategy `mixed`, since annotations can ask for them. Each resource of a
    pool has labels that begin with its name, those of the GPUs or MIG devices that it offers.
    """
    found = {"gpu.machine": value_of(machine), **_driver(inventory.driver_version), **_cuda(inventory.cuda_version)}
    in_mig_mode = [gpu for gpu in inventory.gpus if gpu.mig_enabled]
    found |= _gpus(inventory, kubelet)
    if in_mig_mode:
        found["mig.capable"] = "true"
    if not kubelet.enabled:
        found |= _by_profile(inventory.parts, kubelet)
    elif inventory.gpus and kubelet.mig_strategy is not MigStrategy.NONE:
        found["mig.strategy"] = kubelet.mig_strategy.value
        if kubelet.mig_strategy is MigStrategy.MIXED:
            # Profiles that are not advertised have no resource that a label could describe.
            offered = [part for part in inventory.parts if not is_compute_slice(part.device.profile)]
            found |= _by_profile(offered, kubelet)
        elif in_mig_mode:
            found |= _single(inventory, in_mig_mode[0], kubelet)
    labels = {f"{PREFIX}/{name}": value for name, value in found.items()}
    if kubelet.enabled and kubelet.resources:
        offers = kubelet_offer(inventory, kubelet, pools).resources
        for resource, _ in kubelet.resources:
            labels = _of_pool(resource, offers[resource + kubelet.suffix], kubelet) | labels
    return {name: value for name, value in labels.items() if value}


def value_of(name: str, ending: str = "") -> str:
    """Write a name as a label's value; empty if no character of the name is allowed.

    ending: tells kinds of one model apart, so a long name is cut before it.
    """
    value = "-".join(_DROPPED.sub("", name).split()).strip(_ENDS)
    return value and value[: VALUE_MAX - len(ending)].rstrip(_ENDS) + ending


def machine_name(file: Path = MACHINE_FILE) -> str:
    """Return the product name in the firmware; empty where the firmware has none."""
    return (text_of(file, 256) or "").strip()


def family(arch: tuple[int, int]) -> str:
    """Return the name of a compute capability's architecture; empty if it is older than any in the table."""
    names = [name for least, name in _FAMILIES if least <= arch]
    return names[-1] if names else ""


def _driver(version: str) -> dict[str, str]:
    major, minor, revision = (*version.split("."), "", "")[:3]
    named = {"major": major, "minor": minor, "revision": revision, "full": version}
    old = {"major": major, "minor": minor, "rev": revision}
    return {f"cuda.driver-version.{key}": value for key, value in named.items()} | {
        f"cuda.driver.{key}": value for key, value in old.items()
    }


def _cuda(version: str) -> dict[str, str]:
    major, minor = (*version.split("."), "")[:2]
    return {
        "cuda.runtime-version.major": major,
        "cuda.runtime-version.minor": minor,
        "cuda.runtime-version.full": version,
        "cuda.runtime.major": major,
        "cuda.runtime.minor": minor,
    }


def _gpus(inventory: Inventory, kubelet: KubeletSettings) -> dict[str, str]:
    """Describe the most frequent model, since a node has one label for all GPUs.

    GPUs in MIG mode are counted, but cannot be shared whole. Lost ones are counted too, as the kubelet's capacity does.
    """
    count = len(inventory.gpus) + len(inventory.faults)
    models = Counter(gpu.model for gpu in inventory.gpus if gpu.model != UNKNOWN_MODEL)
    if not models:
        return {"gpu.count": str(count)}
    model = models.most_common(1)[0][0]
    same = [gpu for gpu in inventory.gpus if gpu.model == model]
    replicas = 0 if all(gpu.mig_enabled for gpu in same) else kubelet.replicas
    found = _resource("gpu", "", count, same, kubelet, replicas)
    if arch := same[0].arch:
        found |= {"gpu.family": family(arch), "gpu.compute.major": str(arch[0]), "gpu.compute.minor": str(arch[1])}
    return found


def _of_pool(resource: str, units: Sequence[Unit], kubelet: KubeletSettings) -> dict[str, str]:
    """Describe what a resource offers: its most frequent kind. Without any, only that."""
    if not units:
        return {f"{resource}.count": "0"}
    kind = Counter(map(_kind, units)).most_common(1)[0][0]
    alike = [unit for unit in units if _kind(unit) == kind]
    return _resource(resource, kind[1], len(units), alike, kubelet, kubelet.replicas)


def _kind(unit: Unit) -> tuple[str, str]:
    """Return the model, and what follows it in a label's value of a MIG device."""
    return unit.model, f"-MIG-{_plain(unit.device.profile)}" if isinstance(unit, MigPart) else ""


def _single(inventory: Inventory, in_mig_mode: Gpu, kubelet: KubeletSettings) -> dict[str, str]:
    """Describe MIG devices instead of GPUs; zeros where the node has several profiles or GPUs not in MIG mode."""
    profiles = {part.device.profile for part in inventory.parts}
    if len(profiles) == 1 and all(gpu.mig_enabled and gpu.mig for gpu in inventory.gpus):
        return _mig("gpu", inventory.parts, kubelet)
    return {
        "gpu.product": value_of(in_mig_mode.model, "-MIG-INVALID"),
        "gpu.count": "0",
        "gpu.replicas": "0",
        "gpu.sharing-strategy": "",
        "gpu.memory": "0",
    }


def _by_profile(parts: Sequence[MigPart], kubelet: KubeletSettings) -> dict[str, str]:
    found: dict[str, list[MigPart]] = {}
    for part in parts:
        if PROFILE.matches(part.device.profile):
            found.setdefault(part.device.profile, []).append(part)
    each = (_mig(f"mig-{_plain(profile)}", alike, kubelet) for profile, alike in found.items())
    return {name: value for labels_of_one in each for name, value in labels_of_one.items()}


def _mig(resource: str, parts: Sequence[MigPart], kubelet: KubeletSettings) -> dict[str, str]:
    profile = parts[0].device.profile
    found = _resource(resource, f"-MIG-{_plain(profile)}", len(parts), parts, kubelet, kubelet.replicas)
    if PROFILE.matches(profile):
        of_gpu, of_compute = slices(profile)
        found |= {f"{resource}.slices.gi": str(of_gpu), f"{resource}.slices.ci": str(of_compute)}
    return found


def _resource(
    resource: str, kind: str, count: int, alike: Sequence[Unit], kubelet: KubeletSettings, replicas: int
) -> dict[str, str]:
    """Make the labels of a resource. Without a device plugin nobody counts replicas, so there is no label of them.

    MPS is asked for by annotation, without the kubelet. kind: `-MIG-1g.10gb`, which follows the model; empty for whole
    GPUs. alike: the GPUs or MIG devices that the labels describe; where a device's memory is unknown, the memory has no
    label.
    """
    shared = kubelet.enabled and replicas > 1
    suffix = "-SHARED" if shared and not kubelet.rename else ""  # a renamed resource tells by its name
    found = {"product": value_of(alike[0].model, kind + suffix), "count": str(count)}
    if least := min(unit.memory_bytes or 0 for unit in alike):
        found["memory"] = str(least // MIB)
    if kubelet.enabled:
        found |= {"replicas": str(replicas), "sharing-strategy": "time-slicing" if shared else "none"}
    return {f"{resource}.{key}": value for key, value in found.items()}


def _plain(profile: str) -> str:
    """Write a profile without `+`, which a label may not contain."""
    return profile.replace("+", ".")


class LabelController:
    """The writer of the label file, which is written when GPUs or its path in the policy change.

    kubelet: as at the start of this process. machine: the host's product name; None: as the firmware has it. again: set
    when GPUs or policy changed.
    """

    def __init__(
        self,
        node_state: NodeState,
        kubelet: KubeletSettings,
        *,
        retry_s: float = RETRY_S,
        machine: str | None = None,
    ) -> None:
        self._node_state = node_state
        self._kubelet = kubelet
        self._retry_s = retry_s
        self._machine = machine_name() if machine is None else machine
        self.again = asyncio.Event()
        self._written: tuple[Path, str] | None = None
        self._log = LogOnce()

    async def run(self) -> None:
        await work_when_told(self.again, self.look, retry_s=self._retry_s)

    async def look(self) -> bool:
        """Write the file, or remove the file written before. Return whether that succeeded."""
        path = self._node_state.settings.labels.file
        file = Path(path) if path else None
        try:
            if self._written and self._written[0] != file:
                await asyncio.to_thread(self._written[0].unlink, missing_ok=True)
                self._written = None
            if file:
                await self._write(file)
        except OSError as error:
            self._log.warning("node labels not written", fault_of(error), path=path)
            return False
        self._log.clear()
        return True

    async def _write(self, file: Path) -> None:
        inventory = self._node_state.node.inventory
        # While a driver is replaced, NVML does not answer for a moment: keep the labels, and what is scheduled by them.
        if inventory.fault:
            return
        found = node_labels(inventory, self._machine, self._kubelet, self._node_state.settings.pool)
        text = "".join(f"{name}={value}\n" for name, value in sorted(found.items()))
        if self._written == (file, text):
            return
        await asyncio.to_thread(write_whole, file, text.encode("ascii"), MODE)
        self._written = file, text
        logger.bind(path=str(file), gpus=len(inventory.gpus)).info("node labels written")
