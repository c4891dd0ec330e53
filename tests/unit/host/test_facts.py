"""A look at a host: what it sees, what it does not follow, and that what is missing is no error."""

from __future__ import annotations

import os
from pathlib import Path

from nri_gpu.domain.node import Majors
from nri_gpu.host.facts import CharDevice, Directory, HostFacts, KernelModule, OtherFile, Symlink, look
from nri_gpu.host.kernel_view import HostFolders
from tests.unit.host.host_tree import CAPS, NVIDIA, UVM, HostTree, address, information, params


def test_nothing_is_nothing(tmp_path: Path) -> None:
    places = HostFolders(**{name: tmp_path / name for name in ("dev", "proc", "sys")})
    assert look(places) == HostFacts()


def test_a_host_with_its_driver(host: HostTree) -> None:
    host.loaded().mig("gpu0/gi1", 12)
    facts = host.look()
    assert facts.devices == (address(0), address(1))
    assert facts.modules == {KernelModule.NVIDIA, KernelModule.UVM}
    assert facts.majors == Majors(NVIDIA, UVM, CAPS, modeset=False)
    assert facts.params == params()
    assert facts.gpus == {address(0): information(0), address(1): information(1)}
    assert list(facts.capabilities) == ["gpu0/mig/gi1/access"]
    assert facts.mig_minors.endswith("gpu0/gi1/access 12\n")
    assert not facts.unreadable


def test_only_nvidias_display_devices_count(host: HostTree) -> None:
    host.device(6, kind="0x030000")  # VGA; the others are 3D controllers
    for minor, (vendor, kind) in enumerate([("0x10de", "0x040300"), ("0x10de", "0x068000"), ("0x1002", "0x030000")], 7):
        host.device(minor, vendor, kind)  # a sound device, an NVSwitch, and another vendor's
    assert host.look().devices == (address(0), address(1), address(6))


def test_a_module_counts_once_it_is_live(host: HostTree) -> None:
    host.write("sys/module/nvidia/initstate", "coming\n")
    host.write("sys/module/nvidia_modeset/initstate", "live\n")
    assert host.look().modules == {KernelModule.MODESET}


def test_what_is_in_dev_by_kind(host: HostTree) -> None:
    host.node("nvidia0", NVIDIA, 0, 0o640, 1, 2)
    host.node("other", NVIDIA, 7)
    host.node("nvidia4", 4095, 0xFFFFF, 0o4777)  # numbers wider than a byte, and every bit of a mode
    host.write("dev/nvidia1", "")
    (host.dev / "nvidia2").symlink_to("nvidia0")
    os.mkfifo(host.dev / "nvidia3")
    host.node("nvidia-caps/nvidia-cap3", CAPS, 3, 0o444)
    (host.dev / "char" / f"{NVIDIA}:0").symlink_to("../nvidia0")
    (host.dev / "char" / "README").symlink_to("../nvidia0")
    assert host.entries() == {
        "char": Directory(),
        "nvidia0": CharDevice(NVIDIA, 0, 0o640, 1, 2),
        "nvidia1": OtherFile("a regular file"),
        "nvidia2": Symlink("nvidia0"),
        "nvidia3": OtherFile("a pipe"),
        "nvidia4": CharDevice(4095, 0xFFFFF, 0o4777, 0, 0),
        "nvidia-caps": Directory(),
        "nvidia-caps/nvidia-cap3": CharDevice(CAPS, 3, 0o444, 0, 0),
        f"char/{NVIDIA}:0": Symlink("../nvidia0"),
    }


def test_a_folder_that_is_a_link_is_not_looked_into(host: HostTree, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "nvidia-cap3").write_text("")
    (host.dev / "nvidia-caps").symlink_to(tmp_path / "elsewhere")
    assert host.entries() == {"char": Directory(), "nvidia-caps": Symlink(str(tmp_path / "elsewhere"))}


def test_names_of_other_shapes_are_left_out(host: HostTree) -> None:
    host.loaded()
    host.write("proc/driver/nvidia/gpus/..evil/information", information(5))
    host.write("proc/driver/nvidia/capabilities/gpu0/mig/gix/access", "DeviceFileMinor: 9\n")
    host.write("proc/driver/nvidia/capabilities/mig/config", "DeviceFileMinor: 1\n")
    facts = host.look()
    assert list(facts.gpus) == [address(0), address(1)]
    assert not facts.capabilities


def test_what_cannot_be_read_is_a_finding(host: HostTree) -> None:
    host.loaded()
    (host.base / "proc/driver/nvidia/params").unlink()
    (host.base / "proc/driver/nvidia/params").mkdir()
    (finding,) = host.look().unreadable
    assert str(finding) == "/proc/driver/nvidia/params: cannot be read: it is a folder"
