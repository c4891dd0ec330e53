"""GPUs by the kernel's word alone, from made-up trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.gpu import PciBusId
from nri_gpu.domain.node import KernelGpu
from nri_gpu.inventory.kernel import UNLISTED, HostFolders, gpus_on_the_bus, unlisted_gpus
from tests.support.kernel import make_information, make_pci

MISMATCH = "NVML: driver/library version mismatch (18)"
A, B, C, D = (PciBusId(f"0000:{bus:02x}:00.0") for bus in (0x10, 0x11, 0x12, 0x13))


@pytest.fixture
def places(tmp_path: Path) -> HostFolders:
    return HostFolders(proc=tmp_path / "proc", sys=tmp_path / "sys", dev=tmp_path / "dev")


def gpu(places: HostFolders, bus_id: str, driver: str = "nvidia", **told: str) -> None:
    make_pci(places.sys / "bus", bus_id, driver)
    if told:
        make_information(places.proc / "driver", bus_id, told)


def reasons(places: HostFolders, **options: object) -> list[str]:
    return [each.reason for each in unlisted_gpus(places, (), **options)]  # type: ignore[arg-type]


def test_all_that_the_driver_told_the_kernel(places: HostFolders) -> None:
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    gpu(places, A, Model="NVIDIA H100 80GB HBM3", **{"GPU UUID": uuid, "Device Minor": "3", "GPU Excluded": "No"})
    assert unlisted_gpus(places, (), fault=MISMATCH) == (
        KernelGpu(pci_bus_id=A, reason=MISMATCH, uuid=uuid, model="NVIDIA H100 80GB HBM3", minor_number=3),
    )


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        ("vfio-pci", "bound to vfio-pci, for a virtual machine"),
        ("nvgrace_gpu_vfio_pci", "bound to nvgrace_gpu_vfio_pci: bind it to nvidia"),
        ("nouveau", "bound to nouveau: bind it to nvidia"),
        ("", "not bound to a driver: run `modprobe nvidia`, and see `dmesg | grep NVRM` if that does not bind it"),
    ],
)
def test_who_has_it_instead(places: HostFolders, driver: str, reason: str) -> None:
    gpu(places, A, driver)
    assert reasons(places) == reasons(places, fault=MISMATCH) == [reason]


def test_excluded(places: HostFolders) -> None:
    gpu(places, A, **{"GPU Excluded": "Yes", "Device Minor": "1"})
    assert reasons(places, fault=MISMATCH) == ["excluded by the driver (NVreg_ExcludedGpus of module nvidia)"]


@pytest.mark.parametrize(
    "told",
    [
        {"GPU UUID": "GPU-????????-????-????-????-????????????", "Model": "", "Device Minor": "255"},
        {"GPU UUID": "GPU-../../etc", "Model": "a\x01b", "Device Minor": "-1"},
        {"Device Minor": "9" * 5000, "Model": "x" * 97},
        {},
    ],
)
def test_what_is_not_known_is_left_out(places: HostFolders, told: dict[str, str]) -> None:
    gpu(places, A, **told)
    assert unlisted_gpus(places, ()) == (KernelGpu(pci_bus_id=A, reason=UNLISTED),)


def test_a_file_of_another_kind(places: HostFolders) -> None:
    gpu(places, A)
    (places.proc / "driver/nvidia/gpus" / A / "information").mkdir(parents=True)
    assert reasons(places) == [UNLISTED]


def test_only_gpus_of_nvidia(places: HostFolders) -> None:
    gpu(places, A)
    for bus, (vendor, kind) in enumerate([("0x1002", "0x030000"), ("0x10de", "0x040300"), ("0x10de", "0x068000")]):
        make_pci(places.sys / "bus", f"0000:2{bus}:00.0", "x", vendor=vendor, kind=kind)
    make_pci(places.sys / "bus", "0000:10:00.4", "nvidia")
    (places.sys / "bus/pci/devices/0000:10:00.4/physfn").symlink_to(f"../{A}")
    make_pci(places.sys / "bus", "nonsense", "nvidia")
    assert [each.bus_id for each in gpus_on_the_bus(places.sys)] == [A]


def test_an_address_with_a_long_domain_is_nvmls(places: HostFolders) -> None:
    gpu(places, "10000:01:00.0")
    assert unlisted_gpus(places, {"10000:01:00.0"}) == ()


def test_those_that_nvml_lists_are_left_out(places: HostFolders) -> None:
    for bus_id, driver in ((A, "nvidia"), (B, "nvidia"), (C, "vfio-pci")):
        gpu(places, bus_id, driver)
    assert [each.pci_bus_id for each in unlisted_gpus(places, {A, B})] == [C]


def test_those_that_nvml_counted_and_could_not_name_are_not_told_twice(places: HostFolders) -> None:
    for bus_id, driver in ((A, "nvidia"), (B, "nvidia"), (C, "nvidia"), (D, "vfio-pci")):
        gpu(places, bus_id, driver)
    assert [each.pci_bus_id for each in unlisted_gpus(places, {A}, faults=2)] == [D]
    assert [each.pci_bus_id for each in unlisted_gpus(places, {A}, faults=1)] == [B, C, D]


def test_a_machine_without_a_bus(places: HostFolders) -> None:
    assert unlisted_gpus(places, ()) == ()
