"""The made-up library is as strict as a driver: another version of a struct, another kind of handle are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.nvml import FakeFabric, FakeFacts, FakeGpu, FakeMig, build_fake_nvml
from tests.support.nvml.build import LIB_DIR

MIG = "MIG-01234567-89ab-5def-8123-456789abcdef"
GPU = FakeGpu(
    mig=(1, 1),
    parts=(FakeMig(place=0, uuid=MIG, gi=9),),
    facts=FakeFacts(),
    fabric=FakeFabric(clique=7, health_mask=0x10, cluster="0123456789abcdef" * 2),
)
# In a process of its own: a library is loaded once.
PROGRAM = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1])
from pynvml import *
nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
mig = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
def code(call, *arguments):
    try:
        call(*arguments)
    except NVMLError as error:
        return error.value
    return 0
def fabric(version, kind=c_nvmlGpuFabricInfo_v3_t):
    info = kind()
    info.version = version
    return code(nvmlDeviceGetGpuFabricInfoV, gpu, byref(info)), info
def addressing(version):
    mode = c_nvmlDeviceAddressingMode_t()
    mode.version = version
    return ctypes.CDLL(sys.argv[1]).nvmlDeviceGetAddressingMode(gpu, byref(mode))
def links(device):
    return nvmlDeviceGetNvLinkState(device, 0)
def fabric_of(device):
    return nvmlDeviceGetGpuFabricInfo(device, byref(c_nvmlGpuFabricInfo_t()))
WHOLE = [nvmlDeviceGetMinorNumber, nvmlDeviceGetPciInfo_v3, nvmlDeviceGetMigMode, nvmlDeviceGetMaxMigDeviceCount,
    nvmlDeviceGetEccMode, nvmlDeviceGetComputeMode, nvmlDeviceGetPersistenceMode, nvmlDeviceGetArchitecture,
    nvmlDeviceGetAddressingMode, links, fabric_of, nvmlDeviceGetSupportedEventTypes]
v1 = c_nvmlGpuFabricInfo_t()
nvmlDeviceGetGpuFabricInfo(gpu, byref(v1))
v2, v3 = fabric(nvmlGpuFabricInfo_v2, c_nvmlGpuFabricInfo_v2_t)[1], fabric(nvmlGpuFabricInfo_v3)[1]
print(json.dumps({
    "versions": [fabric(version)[0] for version in (0, 1, nvmlGpuFabricInfo_v2, nvmlGpuFabricInfo_v3, 0x04000028)],
    "addressing": [addressing(version) for version in (0, nvmlDeviceAddressingMode_v1, 0x02000008)],
    "infos": [[info.state, info.status, info.cliqueId, bytes(info.clusterUuid).hex()] for info in (v1, v2, v3)],
    "masks": [info.healthMask for info in (v2, v3)],
    "whole": [[code(call, gpu), code(call, mig)] for call in WHOLE],
    "both": [code(call, mig) for call in (nvmlDeviceGetUUID, nvmlDeviceGetName, nvmlDeviceGetMemoryInfo,
        nvmlDeviceGetCudaComputeCapability, nvmlDeviceGetBrand)],
    "memory": nvmlDeviceGetMemoryInfo(mig).total,
    "part": [code(nvmlDeviceGetGpuInstanceId, gpu), code(nvmlDeviceGetComputeInstanceId, gpu),
        code(nvmlDeviceGetAttributes_v2, gpu)],
    "remapped": code(nvmlDeviceGetRemappedRows, gpu),
    "null": [code(call, None) for call in WHOLE],
}))
"""


def said(tmp_path: Path) -> dict[str, Any]:
    root = build_fake_nvml(tmp_path, [GPU])
    command = [sys.executable, "-c", PROGRAM, str(root / LIB_DIR / "libnvidia-ml.so.1")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_is_strict(tmp_path: Path) -> None:
    found = said(tmp_path)
    assert found["versions"] == [25, 25, 0, 0, 25]
    assert found["addressing"] == [25, 0, 25]
    assert found["infos"] == [[3, 0, 7, "0123456789abcdef" * 2]] * 3
    assert found["masks"] == [0x10, 0x10]
    assert found["whole"] == [[0, 2]] * len(found["whole"])
    assert found["both"] == [0] * 5
    assert found["memory"] == 9728 * 2**20
    assert found["part"] == [2, 2, 3]
    assert found["remapped"] == 3  # while it is cut into instances
    assert set(found["null"]) == {2}
