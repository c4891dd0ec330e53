"""The NVML process itself: what keeps it from starting, how it is confined, and when it is replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.child import NvmlChild
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, evidence

FOUR = [FakeGpu() for _ in range(4)]


def ask(driver_root: Path, sysfs: Path = Path("/sys")) -> Inventory:
    """One refresh by a process of its own."""

    async def once() -> Inventory:
        child = NvmlChild(str(driver_root), sysfs=str(sysfs))
        try:
            return await child.refresh()
        finally:
            await child.close()

    return asyncio.run(once())


def refusal(driver_root: Path, sysfs: Path = Path("/sys")) -> str:
    with pytest.raises(InventoryError) as caught:
        ask(driver_root, sysfs)
    return str(caught.value)


def test_the_library_is_found_in_a_flat_root(tmp_path: Path) -> None:
    build_fake_nvml(tmp_path, FOUR, lib_dir="lib64")
    assert len(ask(tmp_path / "lib64").gpus) == 4


def test_no_library(tmp_path: Path) -> None:
    sentence = refusal(tmp_path)
    assert f"below the driver root {tmp_path}" in sentence
    assert f"{tmp_path}/usr/lib64" in sentence


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "lib64/libnvidia-ml.so.1"
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF\x02" + bytes(100))
    assert refusal(tmp_path).startswith(f"cannot load {path}: ")


def test_a_version_mismatch_names_both(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path / "driver", FOUR, [Act("nvmlInitWithFlags", "fail", 18)])
    (tmp_path / "module/nvidia").mkdir(parents=True)
    (tmp_path / "module/nvidia/version").write_text("570.195.03\n")
    assert "is 580.95.05 and the loaded kernel module is 570.195.03" in refusal(root, tmp_path)


def test_a_library_without_a_start(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path / "driver", FOUR, without=["nvmlInitWithFlags", "nvmlInit_v2"])
    assert "update the driver" in refusal(root)


def test_a_fault_after_the_start_shuts_nvml_too(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR, [Act("nvmlDeviceGetCount_v2", "fail", 999)])
    assert refusal(root) == "nvmlDeviceGetCount: Unknown Error (999)"
    assert evidence(root, "calls").split()[-1] == "nvmlShutdown"


def test_the_library_sees_an_empty_environment_and_no_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_A_TEST", "secret")
    root = build_fake_nvml(tmp_path, FOUR)
    ask(root)
    assert evidence(root, "environ") == ""
    status = dict(line.split(":\t", 1) for line in evidence(root, "status").splitlines())
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0000000000000000"}
    assert status["NoNewPrivs"] == "1"


def test_what_the_library_prints_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR, [Act("nvmlInitWithFlags", "say"), Act("nvmlDeviceGetUUID", "say")])
    assert len(ask(root).gpus) == 4


def test_nvml_is_started_and_shut_for_each_refresh_and_a_new_library_by_a_new_process(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR)

    async def upgrade() -> None:
        child = NvmlChild(str(root))
        assert len((await child.refresh()).gpus) == 4
        configure(root, FOUR[:2])
        pid = child.pid
        assert len((await child.refresh()).gpus) == 2
        assert child.pid == pid
        starts = [call for call in evidence(root, "calls").split() if call in ("nvmlInitWithFlags", "nvmlShutdown")]
        assert starts == ["nvmlInitWithFlags", "nvmlShutdown"] * 2
        build_fake_nvml(root, FOUR, driver="590.10.01")
        assert (await child.refresh()).driver_version == "590.10.01"
        assert child.pid != pid
        await child.close()

    asyncio.run(upgrade())


def test_a_gpu_that_is_lost_is_not_asked_for_its_links(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, FOUR[:3], [Act("nvmlDeviceGetName", "fail", 15, gpu=0)])
    ask(root)
    assert evidence(root, "calls").splitlines().count("nvmlDeviceGetNvLinkState") == 2 * 36
