"""MIG devices from a made-up NVML, their capability minors from a made-up /proc."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.messages import why_not
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.formats import profile_in
from nri_gpu.inventory.kernel import HostFolders, unusual_minors, usual_minors, with_minors
from nri_gpu.inventory.source import NvmlSource
from nri_gpu.simulation.topology import load_topology
from tests.support.nvml import Act, FakeGpu, FakeMig, build_fake_nvml, configure, gpus_of

ROOT = Path(__file__).parents[3]
GIB = 2**30
UUIDS = [GpuUuid(f"MIG-{n}0000000-0000-5000-8000-000000000000") for n in range(3)]
# Index 1 is a hole: an instance that was removed.
PARTS = (
    FakeMig(place=0, uuid=UUIDS[0], gi=2, slices=3, memory_mib=40192),
    FakeMig(place=2, uuid=UUIDS[2], gi=9, profile="1g.10gb+me"),
)
CUT = FakeGpu(minor=2, mig=(1, 1), memory_bytes=80 * GIB, parts=PARTS)
# Not the numbers of the formula, which are 291, 292, 354 and 355: the files have the last word.
MINORS = {"gpu2/gi2/access": 30, "gpu2/gi2/ci0/access": 31, "gpu2/gi9/access": 40, "gpu2/gi9/ci0/access": 41}


def proc(tmp_path: Path, files: Mapping[str, object], table: Mapping[str, int] | None = None) -> Path:
    """A /proc with these capability files (a minor, or a whole text) and this table."""
    for name, content in files.items():
        gpu, _, rest = name.partition("/")
        path = tmp_path / "proc/driver/nvidia/capabilities" / gpu / "mig" / rest
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"DeviceFileMinor: {content}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        path.write_text(text if isinstance(content, int) else str(content))
    (tmp_path / "proc/driver/nvidia-caps").mkdir(parents=True)
    lines = [f"{name} {minor}\n" for name, minor in {"config": 1, "monitor": 2, **(table or {})}.items()]
    (tmp_path / "proc/driver/nvidia-caps/mig-minors").write_text("".join(lines))
    (tmp_path / "proc/devices").write_text("Character devices:\n195 nvidia\n510 nvidia-caps\n\nBlock devices:\n")
    return tmp_path / "proc"


def refreshed(root: Path, kernel: Path) -> Inventory:
    async def once() -> Inventory:
        source = NvmlSource(root, folders=HostFolders(proc=kernel, sys=root))
        try:
            return await source.refresh()
        finally:
            await source.close()

    return asyncio.run(once())


def test_mig_devices_in_full(tmp_path: Path) -> None:
    """Profile by slices and memory, or by the driver's own name; minors from the kernel."""
    inventory = refreshed(build_fake_nvml(tmp_path / "driver", [FakeGpu(), CUT]), proc(tmp_path, MINORS))
    assert inventory.gpus[0].mig == ()
    assert inventory.gpus[1].mig == (
        MigDevice(
            index=0,
            uuid=UUIDS[0],
            gpu_instance_id=2,
            compute_instance_id=0,
            profile="3g.40gb",
            memory_bytes=40192 * 2**20,
            gpu_instance_minor=30,
            compute_instance_minor=31,
        ),
        MigDevice(
            index=2,
            uuid=UUIDS[2],
            gpu_instance_id=9,
            compute_instance_id=0,
            profile="1g.10gb+me",
            memory_bytes=9728 * 2**20,
            gpu_instance_minor=40,
            compute_instance_minor=41,
        ),
    )
    assert [why_not(part) for part in inventory.parts] == ["", ""]
    assert [part.place for part in inventory.parts] == ["1:0", "1:2"]


def test_the_shipped_topology_and_nvml_tell_of_a_node_alike(tmp_path: Path) -> None:
    simulated = load_topology(ROOT / "config/topologies/mig-a100.toml", wall=lambda: 7.0)
    gpus, ancestors = gpus_of(simulated)
    names = {
        name: minor
        for part in simulated.parts
        for name, minor in (
            (f"gi{part.device.gpu_instance_id}/access", part.device.gpu_instance_minor),
            (
                f"gi{part.device.gpu_instance_id}/ci{part.device.compute_instance_id}/access",
                part.device.compute_instance_minor,
            ),
        )
        for name in [f"gpu{part.gpu.minor_number}/{name}"]
    }
    inventory = refreshed(build_fake_nvml(tmp_path / "driver", gpus, ancestors=ancestors), proc(tmp_path, names))
    assert inventory.gpus == simulated.gpus
    assert unusual_minors(inventory.gpus) == ()


def test_a_mode_that_is_changing_shows_no_mig_devices(tmp_path: Path) -> None:
    gpus = [replace(CUT, mig=(1, 0)), replace(CUT, mig=(0, 1), minor=3)]
    inventory = refreshed(build_fake_nvml(tmp_path / "driver", gpus), proc(tmp_path, MINORS))
    assert [gpu.mig for gpu in inventory.gpus] == [(), ()]
    assert all("MIG mode is changing" in gpu.unavailable for gpu in inventory.gpus)


def test_a_mig_device_that_is_removed_while_it_is_looked_at_is_a_hole(tmp_path: Path) -> None:
    gone = [Act("nvmlDeviceGetGpuInstanceId", "fail", 6)]
    inventory = refreshed(build_fake_nvml(tmp_path / "driver", [CUT], gone), proc(tmp_path, MINORS))
    assert inventory.gpus[0].mig == ()
    assert inventory.gpus[0].unavailable == ""


@pytest.mark.parametrize("function", ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"])
@pytest.mark.parametrize("code", [15, 999])
def test_mig_devices_that_cannot_be_listed_cost_their_gpu_alone(tmp_path: Path, function: str, code: int) -> None:
    fault = Act(function, "fail", code, gpu=1)
    inventory = refreshed(build_fake_nvml(tmp_path / "driver", [FakeGpu(), CUT], [fault]), proc(tmp_path, MINORS))
    assert [bool(gpu.unavailable) for gpu in inventory.gpus] == [False, True]
    assert inventory.gpus[1].unavailable.startswith(f"{function}: ")
    assert inventory.gpus[1].mig_enabled


def test_a_mig_device_that_cannot_be_described_is_unavailable(tmp_path: Path) -> None:
    fault = [Act("nvmlDeviceGetAttributes_v2", "fail", 999)]
    inventory = refreshed(build_fake_nvml(tmp_path / "driver", [CUT], fault), proc(tmp_path, MINORS))
    assert [why_not(part).split(":")[0] for part in inventory.parts] == ["nvmlDeviceGetAttributes_v2"] * 2
    assert inventory.gpus[0].unavailable == ""


def test_mig_devices_come_and_go_between_refreshes(tmp_path: Path) -> None:
    root, kernel = build_fake_nvml(tmp_path / "driver", [CUT]), proc(tmp_path, MINORS)

    async def thrice() -> list[int]:
        source = NvmlSource(root, folders=HostFolders(proc=kernel, sys=root))
        try:
            counts = [len((await source.refresh()).parts)]
            for gpu in (replace(CUT, parts=PARTS[:1]), replace(CUT, mig=(0, 0), parts=())):
                configure(root, [gpu])
                counts.append(len((await source.refresh()).parts))
            return counts
        finally:
            await source.close()

    assert asyncio.run(thrice()) == [2, 1, 0]


NAMES = {
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb": "1c.3g.40gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me": "1g.10gb+me",
    "NVIDIA H100 80GB HBM3": "",
    "NVIDIA MIG what": "",
    "1g.5gb": "",
}


@pytest.mark.parametrize(("name", "profile"), NAMES.items())
def test_the_profile_in_a_name(name: str, profile: str) -> None:
    assert profile_in(name) == profile


# --- minors -----------------------------------------------------------------------------------------------------------

DEVICE = MigDevice(
    index=0, uuid=UUIDS[0], gpu_instance_id=9, compute_instance_id=0, profile="1g.10gb", memory_bytes=9728 * 2**20
)
FILES = {"gpu2/gi9/access": 40, "gpu2/gi9/ci0/access": 41}


def cut(**fields: object) -> Gpu:
    """Index 0, minor 2: the files go by the latter."""
    return Gpu(
        index=0,
        minor_number=2,
        uuid=GpuUuid("GPU-0"),
        pci_bus_id=load_topology(ROOT / "config/topologies/four-gpus.toml").gpus[0].pci_bus_id,
        model="NVIDIA A100",
        memory_bytes=80 * GIB,
        arch=(8, 0),
        mig_enabled=True,
        mig=(replace(DEVICE, **fields),),
    )


SOURCES: dict[str, tuple[Mapping[str, object], Mapping[str, int], tuple[int, int]]] = {
    "the capability's own file": (FILES, {}, (40, 41)),
    "both": (FILES, FILES, (40, 41)),
    "the table alone": ({}, FILES, (40, 41)),
    "one of each": ({"gpu2/gi9/access": 40}, {"gpu2/gi9/ci0/access": 41}, (40, 41)),
    "of another gpu too": ({**FILES, "gpu0/gi9/access": 84, "gpu0/gi9/ci0/access": 85}, {}, (40, 41)),
}


@pytest.mark.parametrize(("files", "table", "minors"), SOURCES.values(), ids=SOURCES)
def test_minors_come_from_the_kernel(
    tmp_path: Path, files: Mapping[str, object], table: Mapping[str, int], minors: tuple[int, int]
) -> None:
    (gpu,) = with_minors([cut()], proc(tmp_path, files, table))
    assert (gpu.mig[0].gpu_instance_minor, gpu.mig[0].compute_instance_minor) == minors
    assert why_not(gpu.parts[0]) == ""
    assert "354, 355" in unusual_minors([gpu])[0]


NO_MINORS: dict[str, tuple[Mapping[str, object], Mapping[str, int], str]] = {
    "nowhere": ({}, {}, "does not exist"),
    "of the gpu with that index": ({"gpu0/gi9/access": 84, "gpu0/gi9/ci0/access": 85}, {}, "gpu2/mig/gi9/access"),
    "of the gpu instance only": ({"gpu2/gi9/access": 40}, {}, "gi9/ci0/access does not exist"),
    "two that disagree": (FILES, {"gpu2/gi9/access": 354}, "has minor 40, but mig-minors has 354"),
    "no minor in it": ({**FILES, "gpu2/gi9/access": "DeviceFileMode: 292\n"}, {}, "has no DeviceFileMinor"),
    "no number": ({**FILES, "gpu2/gi9/access": "DeviceFileMinor: many\n"}, {}, "has no DeviceFileMinor"),
    "more than there are": ({**FILES, "gpu2/gi9/access": 8192}, {}, "has no DeviceFileMinor"),
}


@pytest.mark.parametrize(("files", "table", "words"), NO_MINORS.values(), ids=NO_MINORS)
def test_a_mig_device_without_known_minors_is_not_granted_by_a_formula(
    tmp_path: Path, files: Mapping[str, object], table: Mapping[str, int], words: str
) -> None:
    (gpu,) = with_minors([cut()], proc(tmp_path, files, table))
    assert words in why_not(gpu.parts[0])
    assert gpu.unavailable == ""


def test_the_formula() -> None:
    assert usual_minors(0, 0, 0) == (3, 4)
    assert usual_minors(31, 14, 7) == (4314, 4322)
    assert usual_minors(32, 0, 0) is None


def test_usual_minors_are_nothing_to_speak_of(tmp_path: Path) -> None:
    assert (
        unusual_minors(with_minors([cut()], proc(tmp_path, {"gpu2/gi9/access": 354, "gpu2/gi9/ci0/access": 355}))) == ()
    )
