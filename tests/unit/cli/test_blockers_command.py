"""`nri-gpu blockers`: its exit codes, its page, and the names that it takes for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.blockers.blocker import NodeGpu
from nri_gpu.cli.blockers_command import blockers_page, code_of, gpu_named
from nri_gpu.cli.page import plain
from nri_gpu.domain.errors import CommandError, Exit
from tests.unit.cli.conftest import NriGpuCall
from tests.unit.cli.printed import KEPT
from tests.unit.host.host_tree import HostTree

GPU = NodeGpu(index=1, uuid="GPU-1", pci_bus_id="0000:3b:00.0", minor_number=4)
QUIET = replace(KEPT, keeps_loaded=(), unseen=())


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (KEPT, Exit.FINDING),
        (replace(KEPT, denied=True), Exit.FINDING),
        (QUIET, Exit.OK),  # what breaks is said, and is none
        (replace(QUIET, unseen=("one",)), Exit.UNAVAILABLE),
        (replace(QUIET, unseen=("one",), denied=True), Exit.PERMISSION),
    ],
)
def test_the_exit_code(report: object, code: Exit) -> None:
    assert code_of(report) is code  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("report", "headline"),
    [
        (KEPT, "node1: driver 580.95.05 is kept loaded by 3: end them in this order"),
        (QUIET, "node1: nothing keeps driver 580.95.05 loaded"),
        (replace(QUIET, unseen=("one",)), "node1: nothing that could be seen keeps driver 580.95.05 loaded"),
        (replace(KEPT, gpu=GPU), "node1: GPU 1 (0000:3b:00.0) is kept in use by 3: end them in this order"),
        (replace(QUIET, gpu=GPU), "node1: nothing keeps GPU 1 (0000:3b:00.0) in use"),
        (replace(QUIET, driver_version=""), "node1: the NVIDIA driver is not loaded"),
    ],
)
def test_the_headline(report: object, headline: str) -> None:
    assert plain(blockers_page(report)).splitlines()[0] == headline  # type: ignore[arg-type]


def test_what_is_not_loaded_needs_no_command_that_unloads_it() -> None:
    assert "modprobe" not in plain(blockers_page(replace(QUIET, driver_version="")))
    assert "to unload it:\n   modprobe -r nvidia_uvm nvidia" in plain(blockers_page(QUIET))


@pytest.mark.parametrize("word", ["1", "GPU-1", "0000:3b:00.0", "0000:3B:00.0", "00000000:3b:00.0"])
def test_a_gpu_is_named_as_elsewhere(word: str) -> None:
    assert gpu_named(word, [GPU]) is GPU


@pytest.mark.parametrize("word", ["4", "MIG-1", "\x1b[2J"])
def test_a_gpu_that_is_not_there(word: str) -> None:
    with pytest.raises(CommandError, match=r"this node has no GPU .*; the driver has 1 \(0000:3b:00.0\)") as caught:
        gpu_named(word, [GPU])
    assert caught.value.code is Exit.USAGE
    assert str(caught.value).isprintable()


def test_a_node_below_a_folder(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    """Where references alone keep the driver loaded, since no process has a node of such a number open."""
    host = HostTree(tmp_path).loaded()
    for minor in host.minors:
        host.bind(minor, "nvidia")
    host.write("sys/module/nvidia/version", "580.95.05\n")
    host.write("sys/module/nvidia/refcnt", "2\n")
    host.write("sys/module/nvidia/holders/nvidia_uvm", "")
    done = nri_gpu("blockers", "--root", tmp_path, "-o", "json")
    [found] = done.document["keeps_loaded"]
    assert (done.code, found["kind"], found["references"]) == (Exit.FINDING, "references", 1)
    assert (done.document["driver_version"], done.document["gpu"]) == ("580.95.05", None)
    asked = nri_gpu("blockers", "1", "--root", tmp_path, "-o", "json").document
    assert (asked["keeps_loaded"], asked["gpu"]["minor_number"]) == ([], 1)


def test_a_pod_that_mounts_nothing_of_the_node_says_so(
    nri_gpu: NriGpuCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert "run it on the node, or with --root" in nri_gpu("blockers").out
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text("Character devices:\n")
    assert "run it on the node, or with --root" not in nri_gpu("blockers", "--root", tmp_path).out


def test_a_node_whose_kernel_cannot_be_read(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    done = nri_gpu("blockers", "--root", tmp_path)
    fix = "--root names the folder that is the node's /"
    sentence = f"nri-gpu: {tmp_path}/proc/devices cannot be read: no such file; {fix}\n"
    assert (done.code, done.err) == (Exit.UNAVAILABLE, sentence)
