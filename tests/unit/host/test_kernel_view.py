"""What the kernel shows, from made-up trees of /proc, /sys and /dev."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.bounds import CPULIST
from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice, PciBusId
from nri_gpu.domain.node import KernelGpu, Majors, NumaNode
from nri_gpu.host.kernel_view import (
    NOT_GIVEN,
    UNLISTED,
    HostFolders,
    gpus_on_the_bus,
    host_majors,
    kernel_view,
    numa_nodes,
    unlisted_gpus,
    unusual_minors,
    usual_minors,
    with_minors,
)
from tests.support import builders as make
from tests.support.files import write_files
from tests.support.kernel import make_information, make_pci


@pytest.fixture
def places(tmp_path: Path) -> HostFolders:
    return HostFolders(**{name: tmp_path / name for name in ("proc", "sys", "dev")})


def test_majors_of_the_host(places: HostFolders) -> None:
    with pytest.raises(InventoryError, match="cannot read the majors"):
        host_majors(places.proc)
    write_files(places.proc, {"devices": "Character devices:\n195 nvidia\n508 nvidia-uvm\n"})
    assert host_majors(places.proc) == Majors(195, 508)


# --- GPUs -------------------------------------------------------------------------------------------------------------

MISMATCH = "NVML: driver/library version mismatch (18)"
FAR = PciBusId("10000:01:00.0")
A, B, C, D = (PciBusId(f"0000:{bus:02x}:00.0") for bus in (0x10, 0x11, 0x12, 0x13))


def gpu(places: HostFolders, bus_id: str, driver: str = "nvidia", **told: str) -> None:
    make_pci(places.sys / "bus", bus_id, driver)
    if told:
        make_information(places.proc / "driver", bus_id, told)


UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
NAMED = {"Model": "NVIDIA H100 80GB HBM3", "GPU UUID": UUID, "Device Minor": "3", "GPU Excluded": "No"}


@pytest.mark.parametrize(("fault", "reason"), [(MISMATCH, MISMATCH), ("", UNLISTED)], ids=["a fault", "no fault"])
def test_a_gpu_in_full(places: HostFolders, fault: str, reason: str) -> None:
    gpu(places, A, **NAMED)
    assert unlisted_gpus(places, (), fault=fault) == (
        KernelGpu(pci_bus_id=A, reason=reason, uuid=UUID, model="NVIDIA H100 80GB HBM3", minor_number=3),
    )


# What a GPU is bound to, and what its driver tells of it.
OTHERS = {
    "bound to vfio-pci, for a virtual machine": ("vfio-pci", {}),
    "bound to nvgrace_gpu_vfio_pci, for a virtual machine": ("nvgrace_gpu_vfio_pci", {}),
    "bound to nouveau, so NVIDIA's driver cannot use it": ("nouveau", {}),
    "bound to NovaCore, so NVIDIA's driver cannot use it": ("NovaCore", {}),
    "not bound to a driver: run `modprobe nvidia`, and see `dmesg | grep NVRM` if that does not bind it": ("", {}),
    "excluded by the driver (NVreg_ExcludedGpus of module nvidia)": ("nvidia", {"GPU Excluded": "Yes"}),
}


@pytest.mark.parametrize(("reason", "driver", "told"), [(why, *case) for why, case in OTHERS.items()], ids=OTHERS)
def test_gpus_that_nvml_cannot_list(places: HostFolders, reason: str, driver: str, told: Mapping[str, str]) -> None:
    gpu(places, A, driver, **told)
    for fault in ("", MISMATCH):
        assert [each.reason for each in unlisted_gpus(places, (), fault=fault)] == [reason]


@pytest.mark.parametrize(
    ("driver", "excluded", "set_aside"),
    [
        ("vfio-pci", "", True),
        ("nvgrace_gpu_vfio_pci", "", True),
        ("nvidia", "Yes", True),
        ("nvidia", "No", False),
        ("nouveau", "", False),
        ("", "", False),
    ],
)
def test_a_gpu_that_is_kept_from_nvml_on_purpose(
    places: HostFolders, driver: str, excluded: str, set_aside: bool
) -> None:
    gpu(places, A, driver, **{"GPU Excluded": excluded})
    assert [each.set_aside for each in unlisted_gpus(places, ())] == [set_aside]


UNKNOWN: tuple[dict[str, str], ...] = (
    {"GPU UUID": "GPU-????????-????-????-????-????????????", "Model": "", "Device Minor": "255"},
    {"GPU UUID": "GPU-../../etc", "Model": "a\x01b", "Device Minor": "-1"},
    {"Device Minor": "9" * 5000, "Model": "x" * 97},
    {},
)


@pytest.mark.parametrize("told", UNKNOWN)
def test_unknown_facts_are_left_out(places: HostFolders, told: dict[str, str]) -> None:
    gpu(places, A, **told)
    assert unlisted_gpus(places, ()) == (KernelGpu(pci_bus_id=A, reason=UNLISTED),)


def test_only_gpus_of_nvidia(places: HostFolders) -> None:
    gpu(places, A)
    for bus, (vendor, kind) in enumerate([("0x1002", "0x030000"), ("0x10de", "0x040300"), ("0x10de", "0x068000")]):
        make_pci(places.sys / "bus", f"0000:2{bus}:00.0", "x", vendor=vendor, kind=kind)
    make_pci(places.sys / "bus", "0000:10:00.4", "nvidia")
    (places.sys / "bus/pci/devices/0000:10:00.4/physfn").symlink_to(f"../{A}")
    make_pci(places.sys / "bus", "nonsense", "nvidia")
    assert [each.bus_id for each in gpus_on_the_bus(places.sys)] == [A]


def test_gpus_that_nvml_lists_or_counted_and_could_not_name_are_not_reported_twice(places: HostFolders) -> None:
    assert unlisted_gpus(places, ()) == ()
    for bus_id, driver in ((A, "nvidia"), (B, "nvidia"), (C, "nvidia"), (D, "vfio-pci"), (FAR, "nvidia")):
        gpu(places, bus_id, driver)
    for faults, expected in ((0, [B, C, D]), (1, [B, C, D]), (2, [D])):
        assert [each.pci_bus_id for each in unlisted_gpus(places, {A, FAR}, faults=faults)] == expected


def as_a_container(places: HostFolders, how: str) -> None:
    files = {"run/systemd/container": "lxc\n"} if how == "file" else {"proc/1/environ": "PATH=/bin\0container=docker\0"}
    write_files(places.host, files if how else {"proc/1/environ": "PATH=/bin\0containers=1\0"})


@pytest.mark.parametrize(("how", "given"), [("file", False), ("environment", False), ("", True)])
def test_in_a_node_that_is_a_container_the_others_of_its_host_are_no_faults(
    tmp_path: Path, how: str, given: bool
) -> None:
    """A node of kind with GPU 1 of three; GPU 2 has a node and fails, which is one of this machine's."""
    places = HostFolders(**{name: tmp_path / name for name in ("proc", "sys", "dev")}, host=tmp_path)
    as_a_container(places, how)
    for minor, bus_id in enumerate((A, B, C)):
        gpu(places, bus_id, **{"Device Minor": str(minor)})
    assert {each.reason for each in unlisted_gpus(places, {B})} == {UNLISTED}, "no node of any GPU is there"
    write_files(places.dev, {"nvidia1": "", "nvidia2": ""})
    found = {each.pci_bus_id: each for each in unlisted_gpus(places, {B})}
    assert {bus_id: each.given for bus_id, each in found.items()} == {A: given, C: True}
    assert [each.reason for each in found.values()] == [UNLISTED if given else NOT_GIVEN, UNLISTED]
    assert unlisted_gpus(places, {B}, fault=MISMATCH)[0].reason == MISMATCH
    faulty = [each.pci_bus_id for each in unlisted_gpus(places, {B}, faults=1)]
    assert faulty == ([A, C] if given else [A]), "GPU 2 is the one that NVML counted and could not name"


@pytest.mark.parametrize(("how", "given"), [("file", False), ("", True)])
def test_a_node_that_the_device_cgroup_closes_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, given: bool
) -> None:
    places = HostFolders(**{name: tmp_path / name for name in ("proc", "sys", "dev")}, host=tmp_path)
    as_a_container(places, how)
    for minor, bus_id in enumerate((A, B)):
        gpu(places, bus_id, **{"Device Minor": str(minor)})
    write_files(places.dev, {"nvidia0": "", "nvidia1": ""})
    monkeypatch.setattr(os, "access", lambda path, _mode: path.name != "nvidia0")  # as access(2) answers then
    assert [each.given for each in unlisted_gpus(places, {B})] == [given]


# --- the view that is compared ----------------------------------------------------------------------------------------

MIG = "proc/driver/nvidia/capabilities/gpu0/mig"
PCI = "sys/bus/pci"


@pytest.fixture
def node(places: HostFolders, tmp_path: Path) -> HostFolders:
    assert kernel_view(places) == kernel_view(places)  # of a machine without any of it
    (tmp_path / MIG / "gi1/ci0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "dev/dri").mkdir(parents=True)
    write_files(tmp_path, {"proc/devices": "Character devices:\n195 nvidia\n", "dev/nvidia0": ""})
    return places


def _node_of_another_major(base: Path) -> None:
    (base / "dev/nvidia0").unlink()
    os.mknod(base / "dev/nvidia0", 0o600 | 0o020000, os.makedev(1, 3))


CHANGES: dict[str, Callable[[Path], object]] = {
    "an instance is made": lambda base: (base / MIG / "gi2").mkdir(),
    "a compute instance goes": lambda base: (base / MIG / "gi1/ci0").rmdir(),
    "a GPU leaves": lambda base: shutil.rmtree(base / "proc/driver/nvidia/gpus/0000:01:00.0"),
    "a GPU comes that no driver has": lambda base: (base / PCI / "devices/0000:02:00.0").mkdir(parents=True),
    "a GPU is bound": lambda base: (base / PCI / "drivers/nvidia/0000:01:00.0").mkdir(parents=True),
    "a virtual machine gets a GPU": lambda base: (base / PCI / "drivers/vfio-pci/0000:01:00.0").mkdir(parents=True),
    "a module is unloaded": lambda base: (base / "sys/module/nvidia").rmdir(),
    "a module comes": lambda base: (base / "sys/module/nvidia_uvm").mkdir(),
    "a major comes": lambda base: (base / "proc/devices").write_text(
        "Character devices:\n195 nvidia\n508 nvidia-uvm\n"
    ),
    "a node comes": lambda base: (base / "dev/nvidia1").touch(),
    "a render node comes": lambda base: (base / "dev/dri/renderD128").touch(),
    "a folder of capabilities comes": lambda base: (base / "dev/nvidia-caps/nvidia-cap3").mkdir(parents=True),
    "a node has another number": _node_of_another_major,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_view_differs(node: HostFolders, tmp_path: Path, change: Callable[[Path], object]) -> None:
    before = kernel_view(node)
    assert kernel_view(node) == before
    change(tmp_path)
    assert kernel_view(node) != before


def test_other_devices_do_not_matter(node: HostFolders, tmp_path: Path) -> None:
    before = kernel_view(node)
    (tmp_path / "dev/loop7").touch()
    (tmp_path / "sys/module/loop").mkdir()
    assert kernel_view(node) == before


# --- NUMA -------------------------------------------------------------------------------------------------------------


def numa(number: int, cpulist: str, memory_kib: int | None = 131_072) -> dict[str, str]:
    """A node's files as the kernel shows them; None: without memory that is told."""
    total = "" if memory_kib is None else f"Node {number} MemTotal:       {memory_kib} kB\n"
    return {f"node{number}/cpulist": f"{cpulist}\n", f"node{number}/meminfo": f"{total}Node {number} MemFree: 1 kB\n"}


def indexed(*numa_nodes: int | None) -> list[Gpu]:
    return [make.gpu(index, numa_node=number) for index, number in enumerate(numa_nodes)]


def test_numa_nodes_of_gpus(tmp_path: Path) -> None:
    files = numa(0, "0-15,32-47") | numa(1, "16-31,48-63") | numa(2, "64")
    write_files(tmp_path / "devices/system/node", files)
    expected = (NumaNode(0, "0-15,32-47"), NumaNode(1, "16-31,48-63"))
    assert numa_nodes(indexed(1, 0, 1, None), tmp_path) == expected


def test_numa_nodes_without_cpus_or_memory(tmp_path: Path) -> None:
    files = numa(0, "", None) | numa(1, "0-1", 0) | numa(2, "2") | numa(3, "3") | numa(4, "0-$(reboot)")
    del files["node2/meminfo"], files["node3/cpulist"]
    write_files(tmp_path / "devices/system/node", files)
    expected = (NumaNode(0, "", memory=False), NumaNode(1, "0-1", memory=False))
    assert numa_nodes(indexed(*range(6)), tmp_path) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "0-", "-1", "0,,1", "0 1", "0-3\n", "\N{ARABIC-INDIC DIGIT ONE}", "0," * 3000 + "0"]
)
def test_malformed_lists_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of CPUs"):
        CPULIST.parse(text)


# --- minors of MIG devices --------------------------------------------------------------------------------------------


def proc(tmp_path: Path, files: Mapping[str, object], table: Mapping[str, int] | None = None) -> Path:
    """A /proc with these capability files (a minor, or a whole text) and this table."""
    said = "DeviceFileMinor: {}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    lines = [f"{name} {minor}\n" for name, minor in {"config": 1, "monitor": 2, **(table or {})}.items()]
    texts = {"driver/nvidia-caps/mig-minors": "".join(lines)}
    for name, content in files.items():
        path = f"driver/nvidia/capabilities/{name.replace('/', '/mig/', 1)}"
        texts[path] = said.format(content) if isinstance(content, int) else str(content)
    return write_files(tmp_path / "proc", texts)


DEVICE = MigDevice(
    index=0,
    uuid=GpuUuid("MIG-00000000-0000-5000-8000-000000000000"),
    gpu_instance_id=9,
    compute_instance_id=0,
    profile="1g.10gb",
    memory_bytes=9728 * 2**20,
)
FILES = {"gpu2/gi9/access": 40, "gpu2/gi9/ci0/access": 41}


# Index 0, minor 2: the files go by the latter.
CUT = make.gpu(0, minor_number=2, mig_enabled=True, mig=(DEVICE,))


SOURCES: dict[str, tuple[Mapping[str, object], Mapping[str, int], tuple[int, int]]] = {
    "the capability's own file": (FILES, {}, (40, 41)),
    "both": (FILES, FILES, (40, 41)),
    "the table alone": ({}, FILES, (40, 41)),
    "one of each": ({"gpu2/gi9/access": 40}, {"gpu2/gi9/ci0/access": 41}, (40, 41)),
    "of another gpu too": ({**FILES, "gpu0/gi9/access": 84, "gpu0/gi9/ci0/access": 85}, {}, (40, 41)),
}


@pytest.mark.parametrize(("files", "table", "minors"), SOURCES.values(), ids=SOURCES)
def test_capability_minors(
    tmp_path: Path, files: Mapping[str, object], table: Mapping[str, int], minors: tuple[int, int]
) -> None:
    (gpu,) = with_minors([CUT], proc(tmp_path, files, table))
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
def test_a_mig_device_without_known_minors_is_not_granted(
    tmp_path: Path, files: Mapping[str, object], table: Mapping[str, int], words: str
) -> None:
    (gpu,) = with_minors([CUT], proc(tmp_path, files, table))
    assert words in why_not(gpu.parts[0])
    assert gpu.unavailable == ""


def test_usual_minors_are_not_worth_a_word(tmp_path: Path) -> None:
    assert [usual_minors(0, 0, 0), usual_minors(31, 14, 7), usual_minors(32, 0, 0)] == [(3, 4), (4314, 4322), None]
    usual = with_minors([CUT], proc(tmp_path, {"gpu2/gi9/access": 354, "gpu2/gi9/ci0/access": 355}))
    assert unusual_minors(usual) == ()
