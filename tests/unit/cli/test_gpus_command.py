"""`nri-gpu gpus`: a table for people, a schema for programs, a code for scripts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace

from nri_gpu.cli import ask_daemon, render
from nri_gpu.cli.gpus_command import gpus_document
from nri_gpu.cli.page import plain
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.edits import Extra, NodeExtra
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.health import Health, HealthState
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.policy.read import parse_policy
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.kernel import make_information, make_pci
from tests.support.views import view
from tests.unit.cli.conftest import Done, NriGpuCall

FIXTURES = Path(__file__).parents[2] / "fixtures" / "gpus"
ALL = [*sorted(TOPOLOGIES.glob("*.toml")), *sorted(FIXTURES.glob("*.toml"))]
MIG = TOPOLOGIES / "mig-a100.toml"
Shown = Callable[..., Done]


@pytest.fixture
def shown(nri_gpu: NriGpuCall) -> Shown:
    return lambda topology, *arguments: nri_gpu("gpus", "--gpus", topology, *arguments)


@pytest.mark.parametrize("topology", ALL, ids=lambda path: path.stem)
def test_every_topology_in_both_forms(shown: Shown, topology: Path) -> None:
    done, as_json = shown(topology), shown(topology, "-o", "json")
    document = as_json.document
    grantable = any(not gpu["unavailable"] for gpu in document["gpus"])
    assert done.code == as_json.code == (Exit.OK if grantable else Exit.FINDING)
    assert done.out.startswith(f"SIMULATED: {len(document['gpus'])} GPUs, driver {document['driver_version'] or '?'}")
    for gpu in document["gpus"]:
        assert all(text in done.out for text in (gpu["uuid"], f"/dev/nvidia{gpu['minor_number']}", gpu["unavailable"]))


def test_a_node_of_mig_devices_alone_has_something_to_grant(shown: Shown, tmp_path: Path) -> None:
    text = MIG.read_text().replace("nvidia_caps = 1511\n", "")
    lost = text.replace('arch = "8.0"\nnuma = 0\n', 'arch = "8.0"\nunavailable = "lost"\n', 1)
    (tmp_path / "node.toml").write_text(lost)
    done = shown(tmp_path / "node.toml")
    assert done.code == Exit.OK
    assert "nvidia-caps has no major: no MIG device can be granted" in done.out


def test_modules_that_are_not_loaded(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("schema = 1\n[node]\n")
    done = shown(tmp_path / "node.toml")
    assert done.code == Exit.FINDING
    assert "kernel module nvidia is not loaded: no GPU can be granted (modprobe nvidia)" in done.out
    assert "kernel module nvidia-uvm is not loaded" in done.out


@pytest.mark.parametrize("content", [None, "schema = 9\n", "no toml", "\xff"])
def test_a_bad_topology_file_is_78(shown: Shown, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "node.toml"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    done = shown(path)
    assert (done.code, done.out) == (Exit.CONFIGURATION, "")
    assert done.err.startswith(f"{path}:")


def test_policy_says_where_the_driver_is(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[driver]\nroot = "{tmp_path}"\nlibrary_dirs = ["/odd/place"]\n')
    done = nri_gpu("gpus", "--policy", policy)
    assert done.code == Exit.UNAVAILABLE
    assert f"{tmp_path}/odd/place" in done.out + done.err
    assert nri_gpu("gpus", "--policy", policy, "--gpus", FOUR_GPUS).code == Exit.OK
    policy.write_text("nonsense = 1\n")
    done = nri_gpu("gpus", "--policy", policy)
    assert (done.code, done.out) == (Exit.CONFIGURATION, "")
    assert f"{policy}:1: nonsense" in done.err


def test_extras_of_the_host(shown: Shown) -> None:
    h100 = TOPOLOGIES / "hgx-h100.toml"
    assert shown(h100).out.splitlines()[-1] == "extras: gdrcopy, rdma, nvswitch, imex, mig-config, mig-monitor"
    imex = shown(h100, "-o", "json").document["extras"]["imex"]
    assert imex == {"lacking": "", "nodes": [], "mounts": [], "channels": 2048}
    lacking = make.inventory(extras={Extra.GDS: NodeExtra(lacking="there is no /dev/nvidia-fsN")})
    assert plain(render.gpus_page(lacking)).splitlines()[-1] == "extras not here: gds (`-o json` says why)"
    assert gpus_document(lacking).extras["gds"].lacking == "there is no /dev/nvidia-fsN"


def test_what_is_not_known_is_no_zero(shown: Shown, tmp_path: Path) -> None:
    text = FOUR_GPUS.read_text()
    for key in ("memory_bytes", "arch"):
        text = re.sub(rf"^{key} = .*\n", "", text, count=1, flags=re.MULTILINE)
    (tmp_path / "dark.toml").write_text(text)
    assert re.search(r"^0 +\S.*\S +- +- +[01] +0000:", shown(tmp_path / "dark.toml").out, re.MULTILINE)
    dark, known, *_ = shown(tmp_path / "dark.toml", "-o", "json").document["gpus"]
    assert (dark["memory_bytes"], dark["arch"]) == (None, None)
    assert known["memory_bytes"] > 0
    shown(tmp_path / "dark.toml", "--record", tmp_path / "again.toml")
    assert shown(tmp_path / "again.toml", "-o", "json") == shown(tmp_path / "dark.toml", "-o", "json")


def test_a_recording_simulates_the_node(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "recorded.toml"
    said = f"{file}: 4 GPUs; try it with `nri-gpu gpus --gpus {file}`\n"
    assert shown(MIG, "--record", file) == Done(Exit.OK, said, "")
    assert shown(file, "-o", "json") == shown(MIG, "-o", "json")
    done = shown(FOUR_GPUS, "--record", tmp_path / "no/such")
    assert done.code == Exit.UNAVAILABLE
    assert "cannot be written: no such file" in done.err


def test_a_recording_follows_no_link(shown: Shown, tmp_path: Path) -> None:
    theirs, link = tmp_path / "shadow", tmp_path / "node.toml"
    theirs.write_text("root's")
    link.symlink_to(theirs)
    done = shown(FOUR_GPUS, "--record", link)
    assert (done.code, theirs.read_text()) == (Exit.UNAVAILABLE, "root's")
    assert f"{link} cannot be written: it is a link; name the file" in done.err


def test_a_recording_can_be_printed(shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done, file = shown(FOUR_GPUS, "--record", "-"), tmp_path / "node.toml"
    file.write_text(done.out)
    assert load_topology(file, boot_clock=lambda: 0.0) == load_topology(FOUR_GPUS, boot_clock=lambda: 0.0)
    assert list(tmp_path.iterdir()) == [file]


def status(gpu: Gpu, number: int = 7, age_s: float | None = 3.4) -> DaemonStatus:
    """The answer of a daemon that considers this GPU bad."""
    bad = replace(gpu, unavailable="bad since then because of XID 79", health=Health(HealthState.BAD, 5.0, "XID 79", 1))
    policy = parse_policy({"pool": [{"name": "big", "model": "*"}], "dra": {"enabled": True, "pool": "big"}}, "p.toml")
    seen = view(node=replace(make.node([bad]), number=number), inventory_age_s=age_s, settings=policy)
    return status_of(seen)


def test_with_a_daemon_its_snapshot_and_its_health(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_topology(FOUR_GPUS).gpus[0]
    daemon = ("--state-dir", "/nowhere")
    monkeypatch.setattr(ask_daemon, "ask", lambda *_: status(first))
    text = shown(FOUR_GPUS, *daemon).out
    assert text.splitlines()[0].endswith("from a topology file; the daemon's snapshot is number 7, 3 s old")
    assert "bad since then" in text
    document = shown(FOUR_GPUS, *daemon, "-o", "json").document
    assert document["snapshot"] == {"number": 7, "age_s": 3.4}
    assert document["gpus"][0]["unavailable"] == "bad since then because of XID 79"
    ways = [(each["pool"], each["offered_to"]) for each in document["gpus"]]
    assert ways[:2] == [("big", ["dra"]), (None, None)]  # of which the daemon does not say
    monkeypatch.setattr(ask_daemon, "ask", lambda *_: status(first, 1, None))
    assert "is number 1, not confirmed yet\n" in shown(FOUR_GPUS, *daemon).out


@pytest.mark.parametrize("answer", [{}, {"gpus": 3}, {"schema": "nri-gpu/status/v2"}])
def test_a_daemon_whose_answer_is_not_understood(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object]
) -> None:
    monkeypatch.setattr(ask_daemon, "ask", lambda _path, _question, kind: convert(answer, kind))
    done = shown(FOUR_GPUS, "--state-dir", "/nowhere")
    assert done.code == Exit.OK
    assert "snapshot" not in done.out


def test_without_a_daemon_there_is_no_snapshot(shown: Shown, tmp_path: Path) -> None:
    assert "snapshot" not in shown(FOUR_GPUS, "--state-dir", tmp_path).out
    assert shown(FOUR_GPUS, "--state-dir", tmp_path, "-o", "json").document["snapshot"] is None


def test_a_recording_does_not_have_the_health_of_today(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU that the daemon considers bad now would stay unavailable in every simulation of the node."""
    inventory, file = load_topology(FOUR_GPUS), tmp_path / "recorded.toml"
    monkeypatch.setattr(ask_daemon, "ask", lambda *_: status(inventory.gpus[0]))
    assert shown(FOUR_GPUS, "--state-dir", "/nowhere", "--record", file).code == Exit.OK
    assert load_topology(file, boot_clock=lambda: inventory.taken_at) == inventory
    assert load_topology(file).gpus[0].unavailable == ""


def test_how_a_gpu_is_set_up(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    facts = """[[gpu]]
compute_mode = "exclusive-process"
ecc = true
ecc_pending = false
fabric = { state = "completed", cluster = "01234567-89ab-cdef-0123-456789abcdef", clique = 3, health_mask = 2 }"""
    modules = '[node.modules]\nnvidia = "580.95.05"\n\n'
    file.write_text(FOUR_GPUS.read_text().replace("[[gpu]]", modules + facts, 1))
    assert "ok, exclusive-process" in shown(file).out.splitlines()[2]
    document = shown(file, "-o", "json").document
    assert document["modules"] == {"nvidia": "580.95.05"}
    first = document["gpus"][0]
    assert (first["arch"], first["compute_mode"]) == ("8.0", "exclusive-process")
    assert (first["ecc"], first["fabric"]["clique"]) == ({"current": True, "pending": False}, 3)


def test_a_gpu_in_prohibited_mode_is_unavailable_with_the_command_that_helps(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(FOUR_GPUS.read_text().replace("[[gpu]]\n", '[[gpu]]\ncompute_mode = "prohibited"\n', 1))
    assert "nvidia-smi -i" in shown(file).out.splitlines()[2]


def test_without_nvml_the_kernel_names_the_gpus(
    nri_gpu: NriGpuCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs on the bus, and no driver: the kernel is the one thing that no option names."""
    make_pci(tmp_path / "sys/bus", "0000:10:00.0", "")
    make_pci(tmp_path / "sys/bus", "0000:11:00.0", "nvidia")
    make_information(tmp_path / "proc/driver", "0000:11:00.0", {"Model": "NVIDIA L4"})
    places = {"folders": HostFolders(proc=tmp_path / "proc", sys=tmp_path / "sys")}
    monkeypatch.setattr(NvmlSource.__init__, "__kwdefaults__", {**(NvmlSource.__init__.__kwdefaults__ or {}), **places})
    options = ("gpus", "--driver-root", tmp_path / "none")
    done = nri_gpu(*options)
    assert done.code == Exit.UNAVAILABLE
    first, unbound, seen, fault = done.out.splitlines()
    assert first == "0 GPUs, driver ?, CUDA ?, from NVML"
    assert unbound.startswith("GPU 0000:10:00.0 cannot be granted: not bound to a driver")
    assert seen == "GPU 0000:11:00.0 NVIDIA L4 is seen by the kernel only"
    assert fault.startswith("libnvidia-ml.so.1 was not found: ")
    document = nri_gpu(*options, "-o", "json").document
    assert [gpu["pci_bus_id"] for gpu in document["unlisted"]] == ["0000:10:00.0", "0000:11:00.0"]
    assert document["unlisted"][1]["reason"] == document["fault"]
    done = nri_gpu(*options, "--record", tmp_path / "node.toml")
    assert done.code == Exit.UNAVAILABLE
    assert "was not found" in done.err
    assert not (tmp_path / "node.toml").exists()
