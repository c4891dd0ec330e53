"""What a host has of each extra: real nodes (of majors that no driver serves), sockets and files below a folder."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import Struct

from nri_gpu.domain.edits import Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.inventory.extras import find_extras, on_the_host
from nri_gpu.inventory.kernel import HostFolders

VERSION = "580.95.05"
DEVICES = """Character devices:
  1 mem
1520 nvidia-fs
1521 gdrdrv
1522 infiniband_verbs
1523 infiniband_verbs
1524 nvidia-nvswitch
1525 nvidia-caps
1526 nvidia-caps-imex-channels

Block devices:
1530 gdrdrv
"""
SOCKET = ("rbind", "rprivate", "ro", "nosuid", "nodev", "noexec")


class Host(Struct, frozen=True):
    """A host below a folder."""

    base: Path

    @property
    def roots(self) -> HostFolders:
        base = self.base
        return HostFolders(dev=base / "dev", proc=base / "proc", sys=base / "sys", host=base, driver=base / "driver")

    def write(self, path: str, text: str = "", mode: int = 0o644) -> Path:
        file = self.base / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file

    def node(self, path: str, major: int, minor: int, mode: int = 0o666) -> None:
        file = self.base / "dev" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(file, stat.S_IFCHR, os.makedev(major, minor))
        file.chmod(mode)

    def find(self, extra: Extra, version: str = VERSION) -> NodeExtra:
        return find_extras(self.roots, version)[extra]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.write("proc/devices", DEVICES)
    return made


def test_a_bare_host_lacks_everything_and_says_why(tmp_path: Path) -> None:
    extras = find_extras(Host(tmp_path).roots, VERSION)
    assert set(extras) == set(Extra) - {Extra.DRM, Extra.PROFILE}
    for found in extras.values():
        assert found.lacking
        assert (found.nodes, found.mounts, found.channels) == ((), (), None)


def test_storage_with_its_files(host: Host) -> None:
    host.node("nvidia-fs10", 1520, 10)
    host.node("nvidia-fs0", 1520, 0, 0o600)
    (host.base / "run/udev").mkdir(parents=True)
    host.write("etc/cufile.json", "{}")
    nodes = (DeviceNode("/dev/nvidia-fs0", 1520, 0, 0o600), DeviceNode("/dev/nvidia-fs10", 1520, 10))
    mounts = (
        Mount("/run/udev", str(host.base / "run/udev")),
        Mount("/etc/cufile.json", str(host.base / "etc/cufile.json")),
    )
    assert host.find(Extra.GDS) == NodeExtra(nodes, mounts)


def test_storages_files_come_only_with_its_nodes(host: Host) -> None:
    host.write("etc/cufile.json", "{}")
    assert host.find(Extra.GDS) == NodeExtra(lacking="there is no /dev/nvidia-fsN (`modprobe nvidia-fs`)")


def test_settings_that_others_can_change_are_given_to_nobody(host: Host) -> None:
    host.node("nvidia-fs0", 1520, 0)
    host.write("etc/cufile.json", "{}", 0o666)
    assert "others than root can change it" in host.find(Extra.GDS).lacking


def test_a_node_with_another_major_is_a_leftover(host: Host) -> None:
    host.node("gdrdrv", 1499, 0)
    assert "/dev/gdrdrv has major 1499, and gdrdrv has 1521 now" in host.find(Extra.GDRCOPY).lacking


def test_one_leftover_among_good_ones_spoils_the_whole(host: Host) -> None:
    host.node("nvidia-fs0", 1520, 0)
    host.node("nvidia-fs1", 1499, 1)
    assert "leftover" in host.find(Extra.GDS).lacking


def test_a_module_whose_name_the_kernel_does_not_list_is_taken_by_its_node(host: Host) -> None:
    host.write("proc/devices", "Character devices:\n  1 mem\n")
    host.node("gdrdrv", 1499, 3)
    assert host.find(Extra.GDRCOPY).nodes == (DeviceNode("/dev/gdrdrv", 1499, 3),)


def test_links_and_files_are_no_nodes(host: Host) -> None:
    host.node("other", 1521, 0)
    (host.base / "dev/gdrdrv").symlink_to("other")
    host.write("dev/nvidia-fs0")
    assert host.find(Extra.GDRCOPY).lacking.startswith("there is no /dev/gdrdrv")
    assert host.find(Extra.GDS).lacking.startswith("there is no /dev/nvidia-fsN")


def test_adapters_of_either_major_and_the_connection_manager_where_it_is(host: Host) -> None:
    host.node("infiniband/uverbs0", 1522, 192)
    host.node("infiniband/uverbs1", 1523, 0)
    host.node("infiniband/umad0", 1522, 0)
    assert [node.path for node in host.find(Extra.RDMA).nodes] == [f"/dev/infiniband/uverbs{n}" for n in (0, 1)]
    host.node("infiniband/rdma_cm", 10, 58)
    assert host.find(Extra.RDMA).nodes[-1] == DeviceNode("/dev/infiniband/rdma_cm", 10, 58)


def test_the_connection_manager_alone_reaches_nobody(host: Host) -> None:
    host.node("infiniband/rdma_cm", 10, 58)
    assert host.find(Extra.RDMA).lacking.startswith("there is no /dev/infiniband/uverbsN")


def test_switches_need_both_kinds_of_nodes(host: Host) -> None:
    host.node("nvidia-nvswitch0", 1524, 0)
    assert host.find(Extra.NVSWITCH).lacking.startswith("there is no /dev/nvidia-nvswitchctl")
    host.node("nvidia-nvswitchctl", 1524, 255)
    host.node("nvidia-nvswitch", 1524, 9)
    assert [node.minor for node in host.find(Extra.NVSWITCH).nodes] == [255, 0]


COUNTS = {
    "not said": ("", Channels(1526, 2048)),
    "said": ("Foo: 1\nImexChannelCount: 4\nBar: 2\n", Channels(1526, 4)),
    "none": ("ImexChannelCount: 0\n", None),
}


@pytest.mark.parametrize(("params", "channels"), COUNTS.values(), ids=COUNTS)
def test_channels_are_as_many_as_the_driver_says(host: Host, params: str, channels: Channels | None) -> None:
    host.write("proc/driver/nvidia/params", params)
    found = host.find(Extra.IMEX)
    assert (found.channels, bool(found.lacking)) == (channels, channels is None)


@pytest.mark.parametrize(("extra", "right"), [(Extra.MIG_CONFIG, "config"), (Extra.MIG_MONITOR, "monitor")], ids=str)
def test_rights_are_what_the_drivers_files_say(host: Host, extra: Extra, right: str) -> None:
    path = f"proc/driver/nvidia/capabilities/mig/{right}"
    host.write(path, "DeviceFileMinor: 77\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    assert host.find(extra) == NodeExtra((DeviceNode("/dev/nvidia-caps/nvidia-cap77", 1525, 77, 0o400),))
    for text in ("", "DeviceFileMinor: 8192\nDeviceFileMode: 256\n", "DeviceFileMinor: 1\nDeviceFileMode: 2048\n"):
        host.write(path, text)
        assert "does not tell minor and mode" in host.find(extra).lacking


@pytest.fixture
def listening(host: Host) -> Iterator[Path]:
    path = host.base / "run/nvidia-persistenced/socket"
    path.parent.mkdir(parents=True)
    with closing(socket.socket(socket.AF_UNIX)) as served:
        served.bind(str(path))
        yield path


def test_the_socket_itself_is_given_and_not_its_folder(host: Host, listening: Path) -> None:
    mount = Mount("/run/nvidia-persistenced/socket", str(listening), SOCKET)
    assert host.find(Extra.PERSISTENCED) == NodeExtra(mounts=(mount,))
    assert "start nvidia-fabricmanager" in host.find(Extra.FABRICMANAGER).lacking


def test_a_file_is_no_socket(host: Host) -> None:
    host.write("run/nvidia-fabricmanager/socket")
    assert host.find(Extra.FABRICMANAGER).lacking


def test_firmware_of_this_version_from_the_first_folder_that_has_any(host: Host) -> None:
    for folder in ("driver/lib/firmware", "driver/lib/firmware/updates"):
        for name in ("gsp_ga10x.bin", "gsp_tu10x.bin", "other.bin"):
            host.write(f"{folder}/nvidia/{VERSION}/{name}", name)
    host.write("driver/lib/firmware/nvidia/570.26/gsp.bin")
    place, source = f"/lib/firmware/nvidia/{VERSION}", host.base / f"driver/lib/firmware/updates/nvidia/{VERSION}"
    names = ("gsp_ga10x.bin", "gsp_tu10x.bin")
    assert host.find(Extra.FIRMWARE).mounts == tuple(Mount(f"{place}/{name}", str(source / name)) for name in names)
    host.write("sys/module/firmware_class/parameters/path", "/srv/firmware\n")
    host.write(f"driver/srv/firmware/nvidia/{VERSION}/gsp.bin")
    assert [mount.destination for mount in host.find(Extra.FIRMWARE).mounts] == [f"{place}/gsp.bin"]


def test_firmware_that_is_not_fit(host: Host) -> None:
    file = f"driver/lib/firmware/nvidia/{VERSION}/gsp.bin"
    host.write(file, mode=0o666)
    assert "others than root can change it" in host.find(Extra.FIRMWARE).lacking
    (host.base / file).unlink()
    (host.base / file).symlink_to("/etc/passwd")
    assert "leads out of" in host.find(Extra.FIRMWARE).lacking
    assert "version is not known" in host.find(Extra.FIRMWARE, "").lacking


# --- in a pod ---------------------------------------------------------------------------------------------------------


def test_the_hosts_whole_root_is_where_everything_is(tmp_path: Path) -> None:
    """The chart's default: / of the host at /driver-root."""
    folders = {name: tmp_path / name for name in ("proc", "sys", "dev")}
    roots = HostFolders(**folders).with_driver(tmp_path, "/")
    firmware = tmp_path / "lib/firmware/nvidia" / VERSION / "gsp_ga10x.bin"
    firmware.parent.mkdir(parents=True)
    firmware.write_text("")
    place = tmp_path / "run/nvidia-persistenced"
    place.mkdir(parents=True)
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(place / "socket"))
        extras = on_the_host(find_extras(roots, VERSION), tmp_path, Path("/"))
    (socket_mount,) = extras[Extra.PERSISTENCED].mounts
    assert socket_mount.source == socket_mount.destination == "/run/nvidia-persistenced/socket"
    (file_mount,) = extras[Extra.FIRMWARE].mounts
    assert file_mount.source == f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"


def test_a_tree_of_the_host_has_its_own_name(tmp_path: Path) -> None:
    roots = HostFolders().with_driver(tmp_path, "/run/nvidia/driver")
    assert (roots.driver, roots.host) == (tmp_path, Path("/"))
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path)
    extras = {Extra.FIRMWARE: NodeExtra(mounts=(Mount("/lib/firmware/f", str(tmp_path / "lib/firmware/f")),))}
    (mount,) = on_the_host(extras, linked, Path("/run/nvidia/driver"))[Extra.FIRMWARE].mounts
    assert mount.source == "/run/nvidia/driver/lib/firmware/f"


def test_what_is_the_images_own_is_nobodys_extra(tmp_path: Path) -> None:
    node = DeviceNode("/dev/nvidia-fs0", 1520, 0)
    extras = {
        Extra.GDS: NodeExtra((node,), (Mount("/etc/cufile.json", "/etc/cufile.json"),)),
        Extra.GDRCOPY: NodeExtra((node,)),
    }
    named = on_the_host(extras, tmp_path, Path("/run/nvidia/driver"))
    assert "/etc/cufile.json is in nri-gpu's own image" in named[Extra.GDS].lacking
    assert not named[Extra.GDS].nodes
    assert named[Extra.GDRCOPY] == extras[Extra.GDRCOPY]
