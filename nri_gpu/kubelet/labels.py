"""The node's GPUs as labels for schedulers, in the names of NVIDIA's GPU feature discovery, so that selectors hold.

Only what is known here, of the GPUs and of what the kubelet is offered of them: a label that might be wrong is worse
than none. No `gfd.timestamp`, which would be another file with every look. docs/kubernetes-install.md has the table.
Source: NVIDIA/k8s-device-plugin docs/gpu-feature-discovery, internal/lm.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.gpu import MIG_PROFILE, Gpu, MigPart, is_compute_slice, slices
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.kubelet import KubeletSettings, MigStrategy
from nri_gpu.system.state import NodeState
from nri_gpu.system.tasks import work_when_told

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


NO_KUBELET: Final = KubeletSettings()


class Sharing(Struct, frozen=True):
    """What `replicas`, `sharing-strategy` and the end of `product` say of one resource. replicas 0: it has none."""

    replicas: int
    renamed: bool = False

    @classmethod
    def by(cls, settings: KubeletSettings) -> Sharing | None:
        """None where the kubelet is offered nothing: then nobody counts replicas."""
        return cls(settings.replicas, settings.rename) if settings.enabled else None

    @property
    def suffix(self) -> str:
        """Of the product's name, where the resource's own name does not tell."""
        return "-SHARED" if self.replicas > 1 and not self.renamed else ""

    @property
    def strategy(self) -> str:
        """Shared GPUs take turns; MPS is asked for by annotation, and the kubelet knows nothing of it."""
        return "time-slicing" if self.replicas > 1 else "none"


def labels(inventory: Inventory, machine: str = "", kubelet: KubeletSettings = NO_KUBELET) -> Mapping[str, str]:
    """Name -> value, without what is not known.

    machine: the host's product name. kubelet: what the kubelet is offered, whose names and numbers these are. Where it
    is offered none, MIG devices have labels of their own, as with strategy `mixed`: annotations can ask for them.
    """
    found = {"gpu.machine": value_of(machine), **_driver(inventory.driver_version), **_cuda(inventory.cuda_version)}
    sharing = Sharing.by(kubelet)
    in_mig_mode = [gpu for gpu in inventory.gpus if gpu.mig_enabled]
    found |= _gpus(inventory.gpus, sharing)
    if in_mig_mode:
        found["mig.capable"] = "true"
    if not kubelet.enabled:
        found |= _by_profile(inventory.parts, None)
    elif inventory.gpus and kubelet.mig_strategy is not MigStrategy.NONE:
        found["mig.strategy"] = kubelet.mig_strategy.value
        if kubelet.mig_strategy is MigStrategy.MIXED:
            # Profiles that the kubelet is not offered have no resource that a label could describe.
            offered = [part for part in inventory.parts if not is_compute_slice(part.device.profile)]
            found |= _by_profile(offered, sharing)
        elif in_mig_mode:
            found |= _single(inventory, in_mig_mode[0], sharing)
    return {f"{PREFIX}/{name}": value for name, value in found.items() if value}


def file_text(found: Mapping[str, str]) -> str:
    """Lines for Node Feature Discovery's local source."""
    return "".join(f"{name}={value}\n" for name, value in sorted(found.items()))


def value_of(text: str) -> str:
    """A name as a label's value; empty where nothing of it is left."""
    return "-".join(_DROPPED.sub("", text).split())[:VALUE_MAX].strip(_ENDS)


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


def _gpus(gpus: Sequence[Gpu], sharing: Sharing | None) -> dict[str, str]:
    """Of the model that there are most of, and of several the first: a node has one label, whatever it has of GPUs.

    All are counted, those in MIG mode, too; but only those that are not can be shared whole.
    """
    if not gpus:
        return {"gpu.count": "0"}
    model = Counter(gpu.model for gpu in gpus).most_common(1)[0][0]
    same = [gpu for gpu in gpus if gpu.model == model]
    if sharing and all(gpu.mig_enabled for gpu in same):
        sharing = Sharing(0)
    major, minor = same[0].arch
    return _resource("gpu", model, len(gpus), min(gpu.memory_bytes for gpu in same), sharing) | {
        "gpu.family": family(same[0].arch),
        "gpu.compute.major": str(major),
        "gpu.compute.minor": str(minor),
    }


def _single(inventory: Inventory, in_mig_mode: Gpu, sharing: Sharing | None) -> dict[str, str]:
    """MIG devices of one profile in the place of GPUs; where the node is not so, it says that there is nothing."""
    profiles = {part.device.profile for part in inventory.parts}
    if len(profiles) == 1 and all(gpu.mig_enabled and gpu.mig for gpu in inventory.gpus):
        return _mig("gpu", inventory.parts, sharing)
    return {
        "gpu.product": f"{value_of(in_mig_mode.model)}-MIG-INVALID",
        "gpu.count": "0",
        "gpu.replicas": "0",
        "gpu.sharing-strategy": "",
        "gpu.memory": "0",
    }


def _by_profile(parts: Sequence[MigPart], sharing: Sharing | None) -> dict[str, str]:
    found: dict[str, list[MigPart]] = {}
    for part in parts:
        if MIG_PROFILE.fullmatch(part.device.profile):
            found.setdefault(part.device.profile, []).append(part)
    each = (_mig(f"mig-{_plain(profile)}", alike, sharing) for profile, alike in found.items())
    return {name: value for labels_of_one in each for name, value in labels_of_one.items()}


def _mig(resource: str, parts: Sequence[MigPart], sharing: Sharing | None) -> dict[str, str]:
    """Of MIG devices of one profile."""
    profile = parts[0].device.profile
    model = f"{parts[0].model} MIG {_plain(profile)}"
    found = _resource(resource, model, len(parts), min(part.memory_bytes for part in parts), sharing)
    if MIG_PROFILE.fullmatch(profile):
        of_gpu, of_compute = slices(profile)
        found |= {f"{resource}.slices.gi": str(of_gpu), f"{resource}.slices.ci": str(of_compute)}
    return found


def _resource(resource: str, model: str, count: int, memory_bytes: int, sharing: Sharing | None) -> dict[str, str]:
    suffix = sharing.suffix if sharing else ""
    product = value_of(model)[: VALUE_MAX - len(suffix)] + suffix
    found = {"product": product, "count": str(count), "memory": str(memory_bytes // MIB)}
    if sharing:
        found |= {"replicas": str(sharing.replicas), "sharing-strategy": sharing.strategy}
    return {f"{resource}.{key}": value for key, value in found.items()}


def _plain(profile: str) -> str:
    """`+` may not stand in a label's name."""
    return profile.replace("+", ".")


RETRY_S: Final = 60.0
MODE: Final = 0o644  # Node Feature Discovery may not run as root


class LabelController:
    """Writes the file when told that the GPUs, or the place of the file, may be others; whole or not at all."""

    def __init__(
        self,
        node_state: NodeState,
        file: Callable[[], str],
        kubelet: KubeletSettings,
        *,
        retry_s: float = RETRY_S,
        machine: str | None = None,
    ) -> None:
        """file: the policy's word of the moment; empty: none is wanted. kubelet: what it is offered in this process."""
        self._node_state = node_state
        self._file = file
        self._kubelet = kubelet
        self._retry_s = retry_s
        self._machine = machine
        self._again = asyncio.Event()
        self._written: tuple[Path, str] | None = None
        self._fault = ""

    def look_again(self) -> None:
        """GPUs or policy may be others now."""
        self._again.set()

    async def run(self) -> None:
        """Until cancelled."""
        await work_when_told(self._again, self.look, retry_s=self._retry_s)

    async def look(self) -> bool:
        """Write what is wanted, remove what is no more. Returns whether that went well."""
        file = Path(self._file()) if self._file() else None
        try:
            if self._written and self._written[0] != file:
                await asyncio.to_thread(self._written[0].unlink, missing_ok=True)
                self._written = None
            if file:
                await self._write(file)
        except OSError as error:
            if str(error) != self._fault:
                logger.bind(path=str(file), fault=str(error)).warning("node labels not written")
            self._fault = str(error)
            return False
        self._fault = ""
        return True

    async def _write(self, file: Path) -> None:
        inventory = self._node_state.node.inventory
        # While a driver is replaced nothing is known for a moment; the labels, and what is placed by them, stay.
        if inventory.fault:
            return
        if self._machine is None:
            self._machine = machine_name()
        text = file_text(labels(inventory, self._machine, self._kubelet))
        if self._written == (file, text):
            return
        await asyncio.to_thread(write_whole, file, text)
        self._written = file, text
        logger.bind(path=str(file), gpus=len(inventory.gpus)).info("node labels written")


def write_whole(file: Path, text: str) -> None:
    """Never half a file. Raises: OSError: its folder is missing, too, for that is Node Feature Discovery's to make."""
    # Its name begins with a dot: Node Feature Discovery reads every other file of the folder.
    draft = file.with_name(f".{file.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        os.fchmod(descriptor, MODE)  # whatever the umask
        stream.write(text)
    draft.replace(file)
