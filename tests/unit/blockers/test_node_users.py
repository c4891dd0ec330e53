"""The look at a node: its kernel's files and bundles, made up below a folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from nri_gpu.blockers.module_references import DriverModule
from nri_gpu.blockers.node_users import SeenNode, driven_gpus, loaded_modules, look_at_users, unload_commands
from nri_gpu.domain.errors import InventoryError
from nri_gpu.stray.stray_controller import Look, look_for
from nri_gpu.stray.uses import Extent
from nri_gpu.verify.oci_bundles import STATES, TASKS
from tests.unit.host.host_tree import NVIDIA, HostTree
from tests.unit.verify.test_oci_bundles import annotated, write

STATIC = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path).loaded()
    for minor in tree.minors:
        tree.bind(minor, "nvidia")
    return tree


def looked(host: HostTree, *states: Path) -> SeenNode:
    return asyncio.run(look_at_users(host.places, host.base / "run/nri-gpu", states))


def test_gpus_are_known_without_nvml(host: HostTree) -> None:
    folder = host.base / "sys/bus/pci/devices" / next(driven_gpus(host.places)).pci_bus_id
    (folder / "drm/card0").mkdir(parents=True)
    (folder / "drm/card0/dev").write_text("226:0\n")
    first, second = driven_gpus(host.places)
    assert [(each.index, each.minor_number) for each in (first, second)] == [(0, 0), (1, 1)]
    assert (first.uuid[-1], first.drm, second.drm) == ("0", (("card0", 226, 0),), ())


def test_a_gpu_of_a_virtual_machine_has_no_index(host: HostTree) -> None:
    host.bind(0, "vfio-pci")
    assert [(each.index, each.minor_number) for each in driven_gpus(host.places)] == [(0, 1)]


def test_devices_modules_and_console(host: HostTree) -> None:
    host.write("sys/module/nvidia/refcnt", "3\n")
    for name in ("nvidia_uvm", "gdrdrv"):
        host.write(f"sys/module/nvidia/holders/{name}", "")
    host.write("sys/module/gdrdrv/refcnt", "-1\n")
    host.write("proc/fb", "0 nvidia-drmdrmfb\n")
    for number, (name, bound) in enumerate((("(S) dummy device", 1), ("(M) frame buffer device", 1))):
        host.write(f"sys/class/vtconsole/vtcon{number}/name", f"{name}\n")
        host.write(f"sys/class/vtconsole/vtcon{number}/bind", f"{bound}\n")
    seen = looked(host).users
    assert seen.devices["nvidia"] == {NVIDIA}
    assert {*seen.modules} == {
        DriverModule("nvidia", 3, ("gdrdrv", "nvidia_uvm")),
        DriverModule("nvidia_uvm", None),
        DriverModule("gdrdrv", None),
    }
    assert seen.console.files == ("/sys/class/vtconsole/vtcon1/bind",)
    assert unload_commands(seen.modules) == ("modprobe -r nvidia_uvm nvidia",)


def test_modules_that_hold_each_other_have_an_end(tmp_path: Path) -> None:
    for name, holder in (("nvidia", "odd"), ("odd", "nvidia")):
        (tmp_path / "module" / name / "holders" / holder).mkdir(parents=True)
    assert [each.name for each in loaded_modules(tmp_path)] == ["nvidia", "odd"]


def test_bundles_of_every_usual_containerd_and_one_that_has_no_process_yet(host: HostTree) -> None:
    for state in STATES:
        write(host.base / state.lstrip("/"), annotated(), id_=state.strip("/").replace("/", "-"), pid=None)
    assert len(looked(host).users.bundles) == len(STATES)


def test_a_static_pods_manifest(host: HostTree) -> None:
    write(host.base / "run/containerd", annotated(**{"io.kubernetes.cri.sandbox-uid": STATIC}))
    host.write("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\nstaticPodPath: '/srv/pods'\n")
    pod = {"kind": "Pod", "metadata": {"name": "train"}}
    host.write("srv/pods/train.yaml", f"---\n{json.dumps(pod)}\n")
    host.write("srv/pods/broken.yaml", "a: [\n")
    host.write("srv/pods/list.yaml", "kind: List\n")
    host.write("etc/kubernetes/manifests/train.yaml", json.dumps(pod))
    assert looked(host).users.manifests == {"train": "/srv/pods/train.yaml"}


def test_what_cannot_be_seen_is_said(host: HostTree) -> None:
    write(host.base / "run/containerd", "{")
    seen = looked(host)
    assert any("container 0a1b of k8s.io: its bundle cannot be understood" in each for each in seen.unseen)
    seen = looked(host, host.base / "none")
    assert any("no containerd keeps containers below" in each for each in seen.unseen)


def test_a_folder_of_bundles_that_may_not_be_listed(host: HostTree) -> None:
    for folder in (host.base, *host.base.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(0o755)
    folder = write(host.base / "run/containerd", annotated()).parents[1]
    assert folder.name == TASKS
    folder.chmod(0)
    me = os.geteuid()
    os.seteuid(me or 65534)
    try:
        seen = looked(host)
    finally:
        os.seteuid(me)
    assert seen.denied
    assert any(f"{folder} cannot be listed: Permission denied" in each for each in seen.unseen)


@pytest.mark.parametrize(
    ("limits_s", "unseen"),
    [
        ((0.0, 0.0), ["which programs map libcuda", "which processes have a node open"]),
        ((0.0, 20.0), ["which programs map libcuda"]),
    ],
)
def test_processes_that_cannot_be_scanned_leave_the_rest(
    host: HostTree, limits_s: tuple[float, float], unseen: list[str]
) -> None:
    """One that hangs in the kernel may hold back who reads its maps."""
    write(host.base / "run/containerd", annotated())
    limits = iter(limits_s)

    async def scan(majors: Iterable[int], *, libcuda: bool = False) -> Look:
        return await look_for(majors, next(limits), libcuda=libcuda)

    seen = asyncio.run(look_at_users(host.places, host.base, scan=scan))
    assert [each.partition(":")[0] for each in seen.unseen if each.startswith("which")] == unseen
    assert len(seen.users.bundles) == 1


@pytest.mark.parametrize(
    ("extent", "begins", "denied"),
    [
        (Extent(9, 2, whole=True), ["what 2 of 9 processes have open"], True),
        (Extent(9, 0, whole=False), ["the processes of the whole host"], os.geteuid() != 0),
        (Extent(9, 0, whole=True), [], False),
    ],
)
def test_how_far_a_scan_reached_is_said(host: HostTree, extent: Extent, begins: list[str], denied: bool) -> None:
    async def scan(majors: Iterable[int], *, libcuda: bool = False) -> Look:
        return Look((), extent)

    seen = asyncio.run(look_at_users(host.places, host.base, scan=scan))
    assert [each.partition(":")[0] for each in seen.unseen] == begins
    assert seen.denied is denied


def test_a_host_whose_devices_cannot_be_read(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    (tmp_path / "proc/devices").unlink()
    with pytest.raises(InventoryError, match="proc/devices cannot be read: no such file; --root"):
        looked(tree)
