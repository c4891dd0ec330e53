"""What is asked of NVML, in what order, and what one GPU's failure means for the others: nothing.

Runs in the NVML process and knows no pynvml: an `Ask` makes the calls. The result is plain data for one JSON line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from nri_gpu.domain.gpu import ComputeMode
from nri_gpu.inventory.facts import fabric_info, module_versions, prohibited, setup_facts, sign_of, signs
from nri_gpu.inventory.identity import DRM_NAME, parse_bus_id, parse_model, parse_uuid, parse_version
from nri_gpu.inventory.mig import mig_devices, running
from nri_gpu.inventory.nvml_client import ABSENT, Ask, CallError, maybe, parsed, tolerant
from nri_gpu.requirements.grammar import brand_word

# Numbers of nvml.h.
AFFINITY_SCOPE_NODE: Final = 0
P2P_CAPS_INDEX_NVLINK: Final = 2
P2P_STATUS_OK: Final = 0
NVLINK_MAX_LINKS: Final = 36  # of the newest header; an older library answers "invalid argument" past its own
NVLINK_DEVICE_TYPE_SWITCH: Final = 2
MIG_ENABLED: Final = 1

# nvmlGpuTopologyLevel_t in the words of `nvidia-smi topo -m`; two GPUs of one board (0) share that board's switch.
_ANCESTORS: Final[Mapping[int, str]] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_FARTHEST: Final = "SYS"


class _Seen(Struct):
    """A GPU while it is being asked."""

    index: int
    handle: object = None
    facts: dict[str, object] = field(default_factory=dict)
    silent: bool = False  # a call about it failed; others may take long, and none is worth it

    @property
    def bus_id(self) -> str:
        return str(self.facts["pci_bus_id"])


def survey(ask: Ask, sysfs: Path) -> dict[str, object]:
    """Everything an `Inventory` is made of, from an initialised NVML.

    Raises: CallError, where the GPUs cannot even be counted.
    """
    faults: list[dict[str, object]] = []
    seen: list[_Seen] = []
    report: dict[str, object] = {"driver_version": _version(maybe(ask, "", "nvmlSystemGetDriverVersion"))}
    report["cuda_version"] = _cuda_version(ask)
    report["modules"] = module_versions(sysfs)
    for index in range(ask("nvmlDeviceGetCount")):
        gpu = _Seen(index)
        try:
            _identify(ask, gpu)
            seen.append(gpu)
        except CallError as error:
            faults.append(_fault(gpu, error))
    for gpu in seen:
        _describe(ask, gpu, sysfs)
    # The pairs come last: by then every GPU's bus id is known, and what is gone need not be asked again.
    links = list(_links(ask, seen))
    return {**report, "gpus": [gpu.facts for gpu in seen], "faults": faults, "links": links}


def _cuda_version(ask: Ask) -> str:
    version = int(maybe(ask, 0, "nvmlSystemGetCudaDriverVersion_v2"))  # 13000 for 13.0
    return _version(f"{version // 1000}.{version % 1000 // 10}") if version else ""


def _version(text: str) -> str:
    """Empty for what is none: a node is worth more than its driver's name."""
    try:
        return parse_version(text)
    except ValueError:
        return ""


def _identify(ask: Ask, gpu: _Seen) -> None:
    """The facts without which a GPU cannot be named, let alone given.

    Raises: CallError. What was told until then stays.
    """
    index, facts = gpu.index, gpu.facts
    gpu.handle = handle = ask("nvmlDeviceGetHandleByIndex", index, gpu=index)
    facts |= {"index": index, "unavailable": ""}
    facts["pci_bus_id"] = _bus_id(ask("nvmlDeviceGetPciInfo_v3", handle, gpu=index), "nvmlDeviceGetPciInfo_v3")
    facts["uuid"] = parsed(parse_uuid, ask("nvmlDeviceGetUUID", handle, gpu=index), "nvmlDeviceGetUUID")
    facts["minor_number"] = int(ask("nvmlDeviceGetMinorNumber", handle, gpu=index))


def _fault(gpu: _Seen, error: CallError) -> dict[str, object]:
    """A GPU that cannot be named, with what is known of it all the same."""
    known = {name: gpu.facts.get(name, "") for name in ("uuid", "pci_bus_id")}
    return {
        "index": gpu.index,
        "reason": str(error),
        "code": error.code,
        "sign": next(iter(sign_of(error)), None),
    } | known


def _describe(ask: Ask, gpu: _Seen, sysfs: Path) -> None:
    """The rest; a GPU that fails here keeps its name and is unavailable."""
    gpu.facts |= {"model": "unknown", "memory_bytes": 0, "arch": [0, 0], "numa_node": None, "mig_enabled": False}
    gpu.facts["mig"] = []
    gpu.facts["drm"] = []
    gpu.facts |= {"brand": "", "processes": None, "signs": []}
    gpu.facts |= {"architecture": "", "cpus": "", "addressing": ""}
    gpu.facts |= dict.fromkeys(("compute_mode", "persistence", "ecc", "fabric"))
    try:
        for some in _descriptions(ask, gpu, sysfs):
            gpu.facts |= some
    except CallError as error:
        gpu.facts |= {"unavailable": str(error), "signs": sign_of(error)}
        gpu.silent = bool(error.code)


def _descriptions(ask: Ask, gpu: _Seen, sysfs: Path) -> Iterator[Mapping[str, object]]:
    handle, index = gpu.handle, gpu.index
    yield {"model": parsed(parse_model, ask("nvmlDeviceGetName", handle, gpu=index), "nvmlDeviceGetName")}
    # A GPU that shares the host's memory has none of its own to tell of.
    memory = maybe(ask, None, "nvmlDeviceGetMemoryInfo", handle, gpu=index, tolerated=ABSENT)
    yield {"memory_bytes": int(memory.total) if memory else 0}
    yield {"arch": list(ask("nvmlDeviceGetCudaComputeCapability", handle, gpu=index))}
    brand = maybe(ask, None, "nvmlDeviceGetBrand", handle, gpu=index)
    yield {"brand": "" if brand is None else brand_word(int(brand))}
    yield {"numa_node": _numa_node(ask, gpu, sysfs), "drm": list(_drm(gpu, sysfs))}
    fabric = fabric_info(ask, handle, index)
    yield {"signs": signs(ask, handle, index, fabric)}
    for fact in setup_facts(ask, handle, index, sysfs / "bus/pci/devices" / gpu.bus_id, fabric):
        yield fact
        if fact.get("compute_mode") is ComputeMode.PROHIBITED:
            yield {"unavailable": prohibited(gpu.bus_id)}
    # Not knowing whether a GPU is cut into MIG instances is not the same as knowing that it is whole.
    mode = maybe(ask, (0, 0), "nvmlDeviceGetMigMode", handle, gpu=index, tolerated=ABSENT)
    yield {"mig_enabled": mode[0] == MIG_ENABLED}
    if mode[0] != mode[1]:
        raise CallError("nvmlDeviceGetMigMode", "MIG mode is changing: it takes effect with the GPU's next reset")
    if mode[0] == MIG_ENABLED:
        yield {"mig": mig_devices(ask, handle, index)}
    yield {"processes": running(ask, handle, index)}


def _numa_node(ask: Ask, gpu: _Seen, sysfs: Path) -> int | None:
    """The host's NUMA node nearest to the GPU.

    NVML's mask of nodes first, sysfs where NVML has none. Not nvmlDeviceGetNumaNodeId: that is the node which a GPU's
    own memory makes up on coherent machines.
    """
    mask = maybe(ask, None, "nvmlDeviceGetMemoryAffinity", gpu.handle, 1, AFFINITY_SCOPE_NODE, gpu=gpu.index)
    if mask and (nodes := int(mask[0])).bit_count() == 1:
        return nodes.bit_length() - 1
    try:
        node = int((sysfs / "bus/pci/devices" / gpu.bus_id / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _drm(gpu: _Seen, sysfs: Path) -> Iterator[tuple[str, int, int]]:
    """Name, major and minor of the GPU's card and render node, as the kernel has them."""
    try:
        found = sorted((sysfs / "bus/pci/devices" / gpu.bus_id / "drm").iterdir())
    except OSError:
        return  # nvidia-drm is not loaded
    for folder in found:
        if not DRM_NAME.fullmatch(folder.name):
            continue
        try:
            major, _, minor = (folder / "dev").read_text(encoding="ascii").strip().partition(":")
            yield folder.name, int(major), int(minor)
        except (OSError, ValueError):
            continue  # it went away meanwhile


def _links(ask: Ask, gpus: list[_Seen]) -> Iterator[dict[str, object]]:
    """Every pair that a path is known of; of a GPU that is not asked, what the others know."""
    known = frozenset(each.bus_id for each in gpus)
    remotes = {gpu.index: [] if gpu.silent else list(_remotes(ask, gpu, known)) for gpu in gpus}
    for at, first in enumerate(gpus):
        for second in gpus[at + 1 :]:
            pcie, nvlink = _pcie(ask, first, second), _nvlinks(ask, first, second, remotes)
            if pcie or nvlink:
                yield {"a": first.index, "b": second.index, "pcie": pcie or _FARTHEST, "nvlink": nvlink}


def _pcie(ask: Ask, first: _Seen, second: _Seen) -> str:
    """The word of `nvidia-smi topo -m`; empty where nobody tells."""
    if first.silent or second.silent:
        return ""
    name = "nvmlDeviceGetTopologyCommonAncestor"
    return _ANCESTORS.get(tolerant(ask, None, name, first.handle, second.handle, gpu=first.index), "")


def _remotes(ask: Ask, gpu: _Seen, known: frozenset[str]) -> Iterator[str]:
    """For each active NVLink of a GPU the bus id of the GPU at its far end; empty for a switch."""
    for link in range(NVLINK_MAX_LINKS):
        state = tolerant(ask, None, "nvmlDeviceGetNvLinkState", gpu.handle, link, gpu=gpu.index)
        if not state:
            continue
        info = tolerant(ask, None, "nvmlDeviceGetNvLinkRemotePciInfo", gpu.handle, link, gpu=gpu.index)
        remote = _bus_id(info, "nvmlDeviceGetNvLinkRemotePciInfo", strict=False) if info else ""
        if remote in known:
            yield remote
            continue
        kind = tolerant(ask, None, "nvmlDeviceGetNvLinkRemoteDeviceType", gpu.handle, link, gpu=gpu.index)
        if kind in (None, NVLINK_DEVICE_TYPE_SWITCH):
            yield ""


def _nvlinks(ask: Ask, first: _Seen, second: _Seen, remotes: Mapping[int, list[str]]) -> int:
    """Direct links between two GPUs, or those through the switches that both hang on."""
    direct = max(remotes[first.index].count(second.bus_id), remotes[second.index].count(first.bus_id))
    switched = min(remotes[first.index].count(""), remotes[second.index].count(""))
    if direct or not switched:
        return direct
    # A fabric that is not up yet (its manager is not running) has active links that lead nowhere.
    name = "nvmlDeviceGetP2PStatus"
    status = tolerant(ask, None, name, first.handle, second.handle, P2P_CAPS_INDEX_NVLINK, gpu=first.index)
    return switched if status in (None, P2P_STATUS_OK) else 0


def _bus_id(info: Any, name: str, *, strict: bool = True) -> str:  # noqa: ANN401
    """The address in an nvmlPciInfo_t, from its numbers: its texts differ between versions of the struct."""
    text = f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
    return parsed(parse_bus_id, text, name) if strict else text
