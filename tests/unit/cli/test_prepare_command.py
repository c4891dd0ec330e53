"""`nri-gpu prepare`: its exit codes, what it prints, and the same as JSON; on a host below a temporary folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nri_gpu.cli import prepare_command
from nri_gpu.domain.errors import Exit
from nri_gpu.host.kernel_view import HostFolders
from tests.unit.cli.conftest import Done, NriGpuCall
from tests.unit.cli.printed import GOLDENS, spoil
from tests.unit.host.host_tree import NVIDIA, UVM, HostTree, host_below, params

EITHER = pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["done", "dry"])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostTree:
    """The machine that the verb works on; never the one that the tests run on."""
    assert HostFolders() == prepare_command.PLACES
    host = host_below(tmp_path)
    monkeypatch.setattr(prepare_command, "PLACES", host.places)
    return host


def test_a_fresh_boot_then_nothing_to_do(machine: HostTree, nri_gpu: NriGpuCall) -> None:
    done = nri_gpu("prepare")
    lines = done.out.splitlines()
    assert (done.code, lines[:2]) == (Exit.OK, ["load module nvidia", "load module nvidia-uvm"])
    assert f"make /dev/nvidia0: char {NVIDIA}:0, mode 0666, owner 0:0" in lines
    assert f"link /dev/char/{UVM}:0 to ../nvidia-uvm" in lines
    assert "nvidia0" in machine.entries()
    nothing = "nothing to do: 2 NVIDIA devices, modules loaded, nodes and links in place\n"
    assert nri_gpu("prepare") == Done(Exit.OK, nothing, "")


def test_a_dry_run_changes_nothing_and_needs_no_root(
    machine: HostTree, nri_gpu: NriGpuCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = nri_gpu("prepare")
    assert (done.code, "only root" in done.err) == (Exit.PERMISSION, True)
    done = nri_gpu("prepare", "--dry-run", "--graphics")
    modules = [f"would load module {name}" for name in ("nvidia", "nvidia-uvm", "nvidia-modeset")]
    more = "more may follow: a module's devices are known once it is loaded"
    assert (done.code, done.out.splitlines()) == (Exit.OK, [*modules, more])
    document = nri_gpu("prepare", "--dry-run", "-o", "json").document
    assert document["more_may_follow"] is True
    assert [action["module"] for action in document["actions"]] == ["nvidia", "nvidia-uvm"]
    machine.loaded()
    done = nri_gpu("prepare", "--dry-run")
    lines = done.out.splitlines()
    assert done.code == Exit.OK
    assert f"would make /dev/nvidia0: char {NVIDIA}:0, mode 0666, owner 0:0" in lines
    assert all(line.startswith("would ") for line in lines)
    assert list(machine.entries()) == ["char"]
    assert not machine.calls()


@pytest.mark.parametrize("container", [True, False])
def test_a_machine_that_is_a_container_keeps_to_its_own_gpus(
    machine: HostTree, nri_gpu: NriGpuCall, *, container: bool
) -> None:
    """A node of kind or LXD: making the node of a GPU, or of its MIG device, would give it away."""
    machine.loaded()
    machine.node("nvidia0", NVIDIA, 0)
    for minor in machine.minors:
        machine.mig(f"gpu{minor}/gi1", 7 + minor)
    if container:
        machine.write("run/systemd/container", "lxc\n")
    assert nri_gpu("prepare").code == Exit.OK
    others = {"nvidia1", f"char/{NVIDIA}:1", "nvidia-caps/nvidia-cap8"}
    assert others.intersection(machine.entries()) == (set() if container else others)
    assert {"nvidia-uvm", "nvidia-caps/nvidia-cap7", f"char/{NVIDIA}:0"} <= machine.entries().keys()


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("-o", "json")])
def test_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nri_gpu: NriGpuCall, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        prepare_command, "PLACES", HostFolders(dev=tmp_path, proc=tmp_path, sys=tmp_path, host=tmp_path)
    )
    why = "nri-gpu: this machine has no NVIDIA display device on its PCI bus\n"
    assert nri_gpu("prepare", *options) == Done(Exit.UNAVAILABLE, "", why)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("loaded", [False, True])
def test_gpus_of_virtual_machines_are_none_of_ours(machine: HostTree, nri_gpu: NriGpuCall, *, loaded: bool) -> None:
    """The unit counts 69 as success, as on a machine without a GPU."""
    if loaded:
        machine.loaded()
    for minor, driver in enumerate(("vfio-pci", "nvgrace_gpu_vfio_pci")):
        machine.bind(minor, driver)
    why = (
        "nri-gpu: each NVIDIA GPU of this machine is bound to vfio, for virtual machines: 0000:18:00.0, 0000:19:00.0\n"
    )
    assert nri_gpu("prepare") == Done(Exit.UNAVAILABLE, "", why)
    assert (machine.calls(), list(machine.entries())) == ([], ["char"])
    machine.bind(0, "nvidia")
    assert nri_gpu("prepare").code == Exit.OK


@EITHER
def test_findings_are_1(machine: HostTree, nri_gpu: NriGpuCall, options: tuple[str, ...]) -> None:
    machine.loaded().write("proc/driver/nvidia/params", params(modify=0))
    done = nri_gpu("prepare", *options)
    first, *more = done.out.splitlines()
    assert (done.code, len(more)) == (Exit.FINDING, 4)
    assert first.startswith("finding: /dev/nvidiactl: is missing and should be")


def test_another_driver_root(machine: HostTree, nri_gpu: NriGpuCall) -> None:
    assert nri_gpu("prepare", "--driver-root", "/run/nvidia/driver").code == Exit.OK
    assert machine.calls()[0] == "-d /run/nvidia/driver nvidia []"


def test_json_tells_what_was_done_as_a_dry_run_does(machine: HostTree, nri_gpu: NriGpuCall) -> None:
    spoil(machine.loaded())
    done = nri_gpu("prepare", "-o", "json")
    assert done.code == Exit.FINDING
    assert done.document == json.loads((GOLDENS / "prepare.json").read_text()) | {"dry_run": False}
