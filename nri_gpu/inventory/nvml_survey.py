"""The description of a node's GPUs through NVML. A GPU that fails does not keep the others from being described.

It runs in the NVML process. The result is plain data for one line of JSON, as `nvml_report.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct, field

from nri_gpu.domain.bounds import (
    MODEL,
    NVLINKS_MAX,
    PCIE_PATHS,
    UNKNOWN_MODEL,
    UUID,
    VERSION,
    compute_prohibited,
)
from nri_gpu.domain.gpu import ComputeMode, parse_bus_id
from nri_gpu.host.modules import drm_nodes, module_versions
from nri_gpu.inventory.nvml_client import NvmlCallError, NvmlClient, checked
from nri_gpu.inventory.nvml_facts import (
    health_facts,
    mig_devices,
    process_facts,
    setup_facts,
    sign_of,
)
from nri_gpu.request.image_requirements import brand_word

# Numbers of nvml.h.
AFFINITY_SCOPE_NODE: Final = 0
P2P_CAPS_INDEX_NVLINK: Final = 2
P2P_STATUS_OK: Final = 0
NVLINK_DEVICE_TYPE_SWITCH: Final = 2
MIG_ENABLED: Final = 1
# nvmlGpuTopologyLevel_t: two GPUs of one board (0) share that board's switch.
_PCIE_PATHS: Final[Mapping[int, str]] = {0: "PIX"} | {10 * level: path for level, path in enumerate(PCIE_PATHS, 1)}
_FARTHEST: Final = PCIE_PATHS[-1]


class _Device(Struct):
    """A GPU while it is being described. failed: a call about it failed, so it is not asked about its links."""

    index: int
    handle: object = None
    facts: dict[str, object] = field(default_factory=dict)
    failed: bool = False

    @property
    def bus_id(self) -> str:
        return str(self.facts["pci_bus_id"])


def survey(nvml: NvmlClient, sysfs: Path) -> dict[str, object]:
    """Return the report of an NVML that is started. Raises: NvmlCallError, if the GPUs cannot even be counted."""
    faults: list[dict[str, object]] = []
    devices: list[_Device] = []
    # A malformed version must not cost the node its GPUs.
    driver_version = VERSION.or_empty(nvml.optional("nvmlSystemGetDriverVersion", default=""))
    cuda_version = _cuda_version(nvml)
    for index in range(nvml.call("nvmlDeviceGetCount")):
        device = _Device(index)
        try:
            _identify(nvml, device)
            devices.append(device)
        except NvmlCallError as error:
            faults.append(_fault(device, error))
    for device in devices:
        _describe(nvml, device, sysfs)
    # Links come last: by then every GPU's bus id is known, and which GPUs not to ask.
    links = list(_links(nvml, devices))
    return {
        "driver_version": driver_version,
        "cuda_version": cuda_version,
        "modules": module_versions(sysfs),
        "gpus": [device.facts for device in devices],
        "faults": faults,
        "links": links,
    }


def _cuda_version(nvml: NvmlClient) -> str:
    version = int(nvml.optional("nvmlSystemGetCudaDriverVersion_v2", default=0))  # 13000 for 13.0
    return VERSION.or_empty(f"{version // 1000}.{version % 1000 // 10}") if version else ""


def _identify(nvml: NvmlClient, device: _Device) -> None:
    """Read the facts that name a GPU. A failure keeps those read before it. Raises: NvmlCallError."""
    index, facts = device.index, device.facts
    device.handle = handle = nvml.call("nvmlDeviceGetHandleByIndex", index, gpu=index)
    facts["index"] = index
    address = _address(nvml.call("nvmlDeviceGetPciInfo_v3", handle, gpu=index))
    facts["pci_bus_id"] = checked(parse_bus_id, address, "nvmlDeviceGetPciInfo_v3")
    facts["uuid"] = nvml.parsed(UUID.parse, "nvmlDeviceGetUUID", handle, gpu=index)
    facts["minor_number"] = int(nvml.call("nvmlDeviceGetMinorNumber", handle, gpu=index))


def _fault(device: _Device, error: NvmlCallError) -> dict[str, object]:
    """Return the fault of a GPU that cannot be named, with the facts read so far."""
    return {
        "index": device.index,
        "reason": str(error),
        "code": error.code,
        "sign": sign_of(error),
        "uuid": device.facts.get("uuid", ""),
        "pci_bus_id": device.facts.get("pci_bus_id", ""),
    }


def _describe(nvml: NvmlClient, device: _Device, sysfs: Path) -> None:
    """Read the other facts. A GPU that fails here keeps its name and is unavailable."""
    device.facts["model"] = UNKNOWN_MODEL
    try:
        for facts in _descriptions(nvml, device, sysfs):
            device.facts |= facts
    except NvmlCallError as error:
        sign = sign_of(error)
        device.facts |= {"unavailable": str(error), "signs": [sign] if sign else []}
        device.failed = bool(error.code)


def _descriptions(nvml: NvmlClient, device: _Device, sysfs: Path) -> Iterator[Mapping[str, object]]:
    handle, index, folder = device.handle, device.index, sysfs / "bus/pci/devices" / device.bus_id
    yield {"model": nvml.parsed(MODEL.parse, "nvmlDeviceGetName", handle, gpu=index)}
    # A GPU that shares the host's memory has none of its own.
    memory = nvml.if_supported("nvmlDeviceGetMemoryInfo", handle, gpu=index)
    yield {"memory_bytes": int(memory.total) if memory else None}
    yield {"arch": list(nvml.call("nvmlDeviceGetCudaComputeCapability", handle, gpu=index))}
    brand = nvml.optional("nvmlDeviceGetBrand", handle, gpu=index)
    yield {"brand": "" if brand is None else brand_word(int(brand))}
    yield {
        "numa_node": _numa_node(nvml, device, folder),
        "drm": [{"name": name, "major": major, "minor": minor} for name, major, minor in drm_nodes(folder)],
    }
    fabric = nvml.optional("nvmlDeviceGetGpuFabricInfoV", handle, gpu=index)
    yield health_facts(nvml, handle, index, fabric)
    for fact in setup_facts(nvml, handle, index, folder, fabric):
        yield fact
        if fact.get("compute_mode") is ComputeMode.PROHIBITED:
            yield {"unavailable": compute_prohibited(device.bus_id)}
    # If NVML fails to tell the MIG mode, the GPU must not pass for one without MIG.
    current, pending = nvml.if_supported("nvmlDeviceGetMigMode", handle, default=(0, 0), gpu=index)
    yield {"mig_enabled": current == MIG_ENABLED}
    if current != pending:
        raise NvmlCallError("nvmlDeviceGetMigMode", "MIG mode is changing: it takes effect with the GPU's next reset")
    if current == MIG_ENABLED:
        yield {"mig": mig_devices(nvml, handle, index)}
    yield process_facts(nvml, handle, index)


def _numa_node(nvml: NvmlClient, device: _Device, folder: Path) -> int | None:
    """Return the host's NUMA node nearest to the GPU: from NVML's mask of nodes, or from sysfs if NVML names none.

    Do not use nvmlDeviceGetNumaNodeId: that is the node which a GPU's own memory makes up on coherent machines.
    """
    mask = nvml.optional("nvmlDeviceGetMemoryAffinity", device.handle, 1, AFFINITY_SCOPE_NODE, gpu=device.index)
    if mask and (nodes := int(mask[0])).bit_count() == 1:
        return nodes.bit_length() - 1
    try:
        node = int((folder / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _links(nvml: NvmlClient, devices: list[_Device]) -> Iterator[dict[str, object]]:
    """Yield every pair of GPUs with a known path. A GPU that is not asked has the links that the other GPUs report."""
    known = frozenset(device.bus_id for device in devices)
    ends = {device.index: [] if device.failed else list(_link_ends(nvml, device, known)) for device in devices}
    for at, first in enumerate(devices):
        for second in devices[at + 1 :]:
            pcie, nvlink = _pcie_path(nvml, first, second), _nvlinks(nvml, first, second, ends)
            if pcie or nvlink:
                yield {"a": first.index, "b": second.index, "pcie": pcie or _FARTHEST, "nvlink": nvlink}


def _pcie_path(nvml: NvmlClient, first: _Device, second: _Device) -> str:
    """Return the path as `nvidia-smi topo -m` names it, or empty if it is unknown."""
    if first.failed or second.failed:
        return ""
    level = nvml.attempt("nvmlDeviceGetTopologyCommonAncestor", first.handle, second.handle, gpu=first.index)
    return _PCIE_PATHS.get(level, "")


def _link_ends(nvml: NvmlClient, device: _Device, known: frozenset[str]) -> Iterator[str]:
    """Yield the bus id of the GPU at the far end of each active NVLink, or empty for a switch."""
    about = partial(nvml.attempt, gpu=device.index)
    # An older library answers "invalid argument" past its own number of links.
    for link in range(NVLINKS_MAX):
        if not about("nvmlDeviceGetNvLinkState", device.handle, link):
            continue
        info = about("nvmlDeviceGetNvLinkRemotePciInfo", device.handle, link)
        remote = _address(info) if info else ""
        if remote in known:
            yield remote
        elif about("nvmlDeviceGetNvLinkRemoteDeviceType", device.handle, link) in (None, NVLINK_DEVICE_TYPE_SWITCH):
            yield ""


def _nvlinks(nvml: NvmlClient, first: _Device, second: _Device, ends: Mapping[int, list[str]]) -> int:
    """Return the number of direct links between two GPUs, or of links through the switches that connect them."""
    direct = max(ends[first.index].count(second.bus_id), ends[second.index].count(first.bus_id))
    switched = min(ends[first.index].count(""), ends[second.index].count(""))
    if direct or not switched:
        return direct
    # A fabric whose manager is not running has active links that lead nowhere.
    arguments = (first.handle, second.handle, P2P_CAPS_INDEX_NVLINK)
    status = nvml.attempt("nvmlDeviceGetP2PStatus", *arguments, gpu=first.index)
    return switched if status in (None, P2P_STATUS_OK) else 0


class _PciInfo(Protocol):
    """An nvmlPciInfo_t: its texts differ between versions of the struct, its numbers do not."""

    domain: int
    bus: int
    device: int


def _address(info: _PciInfo) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
