"""In a pod, extras of the host's files are mounted by the names that the runtime has for them."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

from nri_gpu.domain.edits import DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.inventory.extras import find_extras, on_the_host
from nri_gpu.inventory.kernel import HostFolders

VERSION = "580.95.05"


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
        offers = on_the_host(find_extras(roots, VERSION), tmp_path, Path("/"))
    (socket_mount,) = offers[Extra.PERSISTENCED].mounts
    assert socket_mount.source == socket_mount.destination == "/run/nvidia-persistenced/socket"
    (file_mount,) = offers[Extra.FIRMWARE].mounts
    assert file_mount.source == f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"


def test_a_tree_of_the_host_has_its_own_name(tmp_path: Path) -> None:
    roots = HostFolders().with_driver(tmp_path, "/run/nvidia/driver")
    assert (roots.driver, roots.host) == (tmp_path, Path("/"))
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path)
    offers = {Extra.FIRMWARE: NodeExtra(mounts=(Mount("/lib/firmware/f", str(tmp_path / "lib/firmware/f")),))}
    (mount,) = on_the_host(offers, linked, Path("/run/nvidia/driver"))[Extra.FIRMWARE].mounts
    assert mount.source == "/run/nvidia/driver/lib/firmware/f"


def test_what_is_the_images_own_is_nobodys_extra(tmp_path: Path) -> None:
    node = DeviceNode("/dev/nvidia-fs0", 1520, 0)
    offers = {
        Extra.GDS: NodeExtra((node,), (Mount("/etc/cufile.json", "/etc/cufile.json"),)),
        Extra.GDRCOPY: NodeExtra((node,)),
    }
    named = on_the_host(offers, tmp_path, Path("/run/nvidia/driver"))
    assert "/etc/cufile.json is in nri-gpu's own image" in named[Extra.GDS].lacking
    assert not named[Extra.GDS].nodes
    assert named[Extra.GDRCOPY] == offers[Extra.GDRCOPY]
