"""What a host has of each extra: real nodes (of majors that no driver serves), sockets and files below a folder."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import Struct

from nri_gpu.domain.edits import Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.host.extras import find_extras, on_the_host
from nri_gpu.host.kernel_view import HostFolders

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


# Files with their texts, and nodes: major, minor and mode.
Things = Mapping[str, str | tuple[int, ...]]


class Host(Struct, frozen=True):
    """A host below a folder."""

    base: Path

    @property
    def roots(self) -> HostFolders:
        base = self.base
        return HostFolders(dev=base / "dev", proc=base / "proc", sys=base / "sys", host=base, driver=base / "driver")

    def put(self, things: Things) -> None:
        for path, thing in things.items():
            file = self.base / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(thing, str):
                file.write_text(thing)
            else:
                os.mknod(file, stat.S_IFCHR, os.makedev(*thing[:2]))
                file.chmod(thing[2] if thing[2:] else 0o666)

    def find(self, extra: Extra, version: str = VERSION) -> NodeExtra:
        return find_extras(self.roots, version)[extra]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.put({"proc/devices": DEVICES})
    return made


def test_a_bare_host_lacks_everything_and_says_why(tmp_path: Path) -> None:
    extras = find_extras(Host(tmp_path).roots, VERSION)
    assert set(extras) == set(Extra) - {Extra.DRM}
    for found in extras.values():
        assert found.lacking
        assert (found.nodes, found.mounts, found.channels) == ((), (), None)


def test_storage_with_its_files(host: Host) -> None:
    host.put({"dev/nvidia-fs10": (1520, 10), "dev/nvidia-fs0": (1520, 0, 0o600), "etc/cufile.json": "{}"})
    (host.base / "run/udev").mkdir(parents=True)
    nodes = (DeviceNode("/dev/nvidia-fs0", 1520, 0, 0o600), DeviceNode("/dev/nvidia-fs10", 1520, 10))
    mounts = tuple(Mount(f"/{place}", str(host.base / place)) for place in ("run/udev", "etc/cufile.json"))
    assert host.find(Extra.GDS) == NodeExtra(nodes, mounts)


def test_settings_that_others_can_change_are_given_to_nobody(host: Host) -> None:
    host.put({"dev/nvidia-fs0": (1520, 0), "etc/cufile.json": "{}"})
    (host.base / "etc/cufile.json").chmod(0o666)
    assert "users other than root can change it" in host.find(Extra.GDS).lacking


ADAPTERS = {"dev/infiniband/uverbs0": (1522, 192), "dev/infiniband/uverbs1": (1523, 0)}
UVERBS = "/dev/infiniband/uverbs0 1522:192 0666, /dev/infiniband/uverbs1 1523:0 0666"
MANAGER = {"dev/infiniband/rdma_cm": (10, 58)}
SWITCH = {"dev/nvidia-nvswitch0": (1524, 0)}
SWITCHES = {**SWITCH, "dev/nvidia-nvswitchctl": (1524, 255), "dev/nvidia-nvswitch": (1524, 9)}
MIG = "proc/driver/nvidia/capabilities/mig"
RIGHT = "DeviceFileMinor: 77\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
# The nodes that are found, of which extra, on which host.
NODES: dict[str, tuple[Extra, Things]] = {
    "/dev/gdrdrv 1499:3 0666": (Extra.GDRCOPY, {"proc/devices": "not listed", "dev/gdrdrv": (1499, 3)}),
    UVERBS: (Extra.RDMA, {**ADAPTERS, "dev/infiniband/umad0": (1522, 0)}),
    f"{UVERBS}, /dev/infiniband/rdma_cm 10:58 0666": (Extra.RDMA, {**ADAPTERS, **MANAGER}),
    "/dev/nvidia-nvswitchctl 1524:255 0666, /dev/nvidia-nvswitch0 1524:0 0666": (Extra.NVSWITCH, SWITCHES),
    "/dev/nvidia-caps/nvidia-cap77 1525:77 0400": (Extra.MIG_CONFIG, {f"{MIG}/config": RIGHT}),
    "/dev/nvidia-caps/nvidia-cap78 1525:78 0400": (Extra.MIG_MONITOR, {f"{MIG}/monitor": RIGHT.replace("77", "78")}),
}


@pytest.mark.parametrize(("nodes", "extra", "things"), [(nodes, *case) for nodes, case in NODES.items()], ids=NODES)
def test_an_extra_is_its_nodes_and_no_others(host: Host, nodes: str, extra: Extra, things: Things) -> None:
    host.put(things)
    found = host.find(extra).nodes
    assert nodes == ", ".join(f"{node.path} {node.major}:{node.minor} {node.mode:04o}" for node in found)


# What is said, of which extra, on which host.
LACKING: dict[str, tuple[Extra, Things]] = {
    "there is no /dev/nvidia-fsN (`modprobe nvidia-fs`)": (Extra.GDS, {"etc/cufile.json": "{}"}),
    "there is no /dev/nvidia-fsN": (Extra.GDS, {"dev/nvidia-fs0": "a file"}),
    "/dev/gdrdrv has major 1499, and gdrdrv has 1521 now": (Extra.GDRCOPY, {"dev/gdrdrv": (1499, 0)}),
    "/dev/nvidia-fs1 has major 1499": (Extra.GDS, {"dev/nvidia-fs0": (1520, 0), "dev/nvidia-fs1": (1499, 1)}),
    "there is no /dev/infiniband/uverbsN": (Extra.RDMA, MANAGER),
    "there is no /dev/nvidia-nvswitchctl": (Extra.NVSWITCH, SWITCH),
    "start nvidia-fabricmanager": (Extra.FABRICMANAGER, {"run/nvidia-fabricmanager/socket": "a file"}),
    "config does not show the capability": (Extra.MIG_CONFIG, {f"{MIG}/config": ""}),
    "does not show the capability's minor and mode": (Extra.MIG_CONFIG, {f"{MIG}/config": RIGHT.replace("77", "8192")}),
    "does not show the capability's minor": (Extra.MIG_CONFIG, {f"{MIG}/config": RIGHT.replace("256", "2048")}),
}


@pytest.mark.parametrize(("words", "extra", "things"), [(words, *case) for words, case in LACKING.items()], ids=LACKING)
def test_what_is_lacking(host: Host, words: str, extra: Extra, things: Things) -> None:
    host.put(things)
    found = host.find(extra)
    assert words in found.lacking
    assert found == NodeExtra(lacking=found.lacking)


def test_a_link_is_no_node(host: Host) -> None:
    host.put({"dev/other": (1521, 0)})
    (host.base / "dev/gdrdrv").symlink_to("other")
    assert host.find(Extra.GDRCOPY).lacking.startswith("there is no /dev/gdrdrv")


COUNTS = {
    "not said": ("", Channels(1526, 2048)),
    "said": ("Foo: 1\nImexChannelCount: 4\nBar: 2\n", Channels(1526, 4)),
    "none": ("ImexChannelCount: 0\n", None),
}


@pytest.mark.parametrize(("params", "channels"), COUNTS.values(), ids=COUNTS)
def test_channels_are_as_many_as_the_driver_says(host: Host, params: str, channels: Channels | None) -> None:
    host.put({"proc/driver/nvidia/params": params})
    found = host.find(Extra.IMEX)
    assert (found.channels, bool(found.lacking)) == (channels, channels is None)


@contextmanager
def listening(path: Path) -> Iterator[Path]:
    """A socket that somebody listens on."""
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(path))
        yield path


def test_the_socket_itself_is_given_and_not_its_folder(host: Host) -> None:
    with listening(host.base / "run/nvidia-persistenced/socket") as path:
        mount = Mount("/run/nvidia-persistenced/socket", str(path), SOCKET)
        assert host.find(Extra.PERSISTENCED) == NodeExtra(mounts=(mount,))


def test_firmware_of_this_version_from_the_first_folder_that_has_any(host: Host) -> None:
    names = ("gsp_ga10x.bin", "gsp_tu10x.bin")
    for folder in ("driver/lib/firmware", "driver/lib/firmware/updates"):
        host.put({f"{folder}/nvidia/{VERSION}/{name}": name for name in (*names, "other.bin")})
    host.put({"driver/lib/firmware/nvidia/570.26/gsp.bin": ""})
    place, source = f"/lib/firmware/nvidia/{VERSION}", host.base / f"driver/lib/firmware/updates/nvidia/{VERSION}"
    assert host.find(Extra.FIRMWARE).mounts == tuple(Mount(f"{place}/{name}", str(source / name)) for name in names)
    custom = {"sys/module/firmware_class/parameters/path": "/srv/firmware\n"}
    host.put({**custom, f"driver/srv/firmware/nvidia/{VERSION}/gsp.bin": ""})
    assert [mount.destination for mount in host.find(Extra.FIRMWARE).mounts] == [f"{place}/gsp.bin"]


def test_firmware_that_is_not_fit(host: Host) -> None:
    file = host.base / f"driver/lib/firmware/nvidia/{VERSION}/gsp.bin"
    host.put({str(file): ""})
    file.chmod(0o666)
    assert "users other than root can change it" in host.find(Extra.FIRMWARE).lacking
    file.unlink()
    file.symlink_to("/etc/passwd")
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
    with listening(tmp_path / "run/nvidia-persistenced/socket"):
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
