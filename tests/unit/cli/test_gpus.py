"""`nri-gpu gpus`: a table for people, a schema for programs, a code for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nri_gpu.cli import client, render
from nri_gpu.cli.main import main
from nri_gpu.domain.edits import Extra, NodeExtra
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.health import Health, HealthState, Sign
from nri_gpu.inventory.source import NvmlSource
from nri_gpu.simulation.topology import load_topology
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.kernel import make_information, make_pci
from tests.unit.cli.shapes import GPUS, check_shape

FIXTURES = Path(__file__).parents[3] / "fixtures" / "gpus"
SHIPPED = sorted(TOPOLOGIES.glob("*.toml"))


def shown(capsys: pytest.CaptureFixture[str], topology: Path, *arguments: str) -> tuple[int, str]:
    code = main(["gpus", "--gpus", str(topology), *arguments])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("topology", [*SHIPPED, *sorted(FIXTURES.glob("*.toml"))], ids=lambda path: path.stem)
def test_every_topology_in_both_forms(capsys: pytest.CaptureFixture[str], topology: Path) -> None:
    code, text = shown(capsys, topology)
    same, document = shown(capsys, topology, "-o", "json")
    parsed = json.loads(document)
    check_shape(parsed, GPUS)
    assert code == same
    assert code == (Exit.OK if any(not gpu["unavailable"] for gpu in parsed["gpus"]) else Exit.FINDING)
    assert text.startswith(f"{len(parsed['gpus'])} GPUs, driver {parsed['driver_version'] or '?'}")
    assert all(gpu["uuid"] in text and f"/dev/nvidia{gpu['minor_number']}" in text for gpu in parsed["gpus"])
    assert all(gpu["unavailable"] in text for gpu in parsed["gpus"])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, FOUR_GPUS)
    lines = text.splitlines()
    assert lines[0] == "4 GPUs, driver 580.95.05, CUDA 13.0, from simulated"
    assert lines[1].split() == ["INDEX", "MODEL", "MEMORY", "ARCH", "NUMA", "PCI", "BUS", "ID", "NODE", "STATE", "UUID"]
    assert len({line.index("GPU-") for line in lines[2:6]}) == 1
    assert "40 GiB" in lines[2]
    assert all(line == line.rstrip() for line in lines)


def test_mig_devices_stand_below_their_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, TOPOLOGIES / "mig-a100.toml")
    rows = text.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["0", "1", "1:0", "1:1", "1:2", "1:3", "2", "2:0", "2:1", "2:2", "3"]
    assert [row.startswith("  ") for row in rows] == [":" in row.split()[0] for row in rows]
    assert "MIG 3g.40gb" in rows[2]
    assert "nvidia-cap22" in rows[2]


def test_mig_devices_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    gpus_json = json.loads(shown(capsys, TOPOLOGIES / "mig-a100.toml", "-o", "json")[1])["gpus"]
    assert [len(gpu["mig"]) for gpu in gpus_json] == [0, 4, 3, 0]
    assert gpus_json[1]["mig"][0] == {
        "index": 0,
        "uuid": "MIG-10a10080-0000-5000-8000-020000000000",
        "profile": "3g.40gb",
        "memory_bytes": 42_144_366_592,
        "gpu_instance_id": 2,
        "compute_instance_id": 0,
        "gpu_instance_minor": 21,
        "compute_instance_minor": 22,
        "unavailable": "",
        "processes": None,
        "health": {"state": "healthy", "since_s": None, "why": "", "changes": 0, "signs": []},
    }


def test_a_node_of_mig_devices_alone_has_something_to_grant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (TOPOLOGIES / "mig-a100.toml").read_text()
    (tmp_path / "node.toml").write_text(
        text.replace("nvidia_caps = 1511\n", "").replace(
            'arch = "8.0"\nnuma = 0\n', 'arch = "8.0"\nunavailable = "lost"\n', 1
        )
    )
    code, shown_text = shown(capsys, tmp_path / "node.toml")
    assert code == Exit.OK
    assert "nvidia-caps has no major: no MIG device can be granted" in shown_text


def test_units_are_in_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = json.loads(shown(capsys, FOUR_GPUS, "-o", "json")[1])["gpus"][0]
    assert gpu["memory_bytes"] == 42_949_672_960
    assert gpu["arch"] == "8.0"


def test_modules_that_are_not_loaded_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("schema = 1\n[node]\n")
    code, text = shown(capsys, tmp_path / "node.toml")
    assert code == Exit.FINDING
    assert "kernel module nvidia is not loaded: no GPU can be granted (modprobe nvidia)" in text
    assert "kernel module nvidia-uvm is not loaded" in text


@pytest.mark.parametrize("content", [None, "schema = 9\n", "no toml", "\xff"])
def test_a_bad_topology_file_is_78(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "node.toml"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert main(["gpus", "--gpus", str(path)]) == Exit.CONFIGURATION
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"nri-gpu: {path}")


def test_without_a_driver_it_is_69_and_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["gpus", "--driver-root", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == Exit.UNAVAILABLE
    assert str(tmp_path) in captured.out + captured.err


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert render.table(("A", "BB"), [("long", ""), ("x", "y")]) == ["A     BB", "long", "x     y"]


def test_policy_says_where_the_driver_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[driver]\nroot = "{tmp_path}"\nlibrary_dirs = ["/odd/place"]\n')
    assert main(["gpus", "--policy", str(policy)]) == Exit.UNAVAILABLE
    captured = capsys.readouterr()
    assert f"{tmp_path}/odd/place" in captured.out + captured.err
    assert main(["gpus", "--policy", str(policy), "--gpus", str(FOUR_GPUS)]) == Exit.OK


def test_a_broken_policy_is_78(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("nonsense = 1\n")
    assert main(["gpus", "--policy", str(policy)]) == Exit.CONFIGURATION
    captured = capsys.readouterr()
    assert (captured.out, f"{policy}:1: nonsense" in captured.err) == ("", True)


def test_extras_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, TOPOLOGIES / "hgx-h100.toml")
    assert text.splitlines()[-1] == "extras: gdrcopy, rdma, nvswitch, imex, mig-config, mig-monitor"
    _, document = shown(capsys, TOPOLOGIES / "hgx-h100.toml", "-o", "json")
    assert json.loads(document)["extras"]["imex"] == {"lacking": "", "nodes": [], "mounts": [], "channels": 2048}


def test_extras_that_are_not_here() -> None:
    lacking = make.inventory(extras={Extra.GDS: NodeExtra(lacking="there is no /dev/nvidia-fsN")})
    assert render.gpus_text(lacking).splitlines()[-1] == "extras not here: gds (`-o json` says why)"
    assert render.gpus_json(lacking)["extras"]["gds"]["lacking"] == "there is no /dev/nvidia-fsN"


def test_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, FOUR_GPUS, "--topology")
    inventory = load_topology(FOUR_GPUS)
    heads, *rows = text.partition("\n\n")[0].splitlines()
    assert heads.split() == ["GPU0", "GPU1", "GPU2", "GPU3", "CPU", "Affinity", "NUMA", "Affinity"]
    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert all(cells[at][1 + at] == "X" for at in range(4))
    for link in inventory.links:
        cell = f"NV{link.nvlink}" if link.nvlink else link.pcie
        assert cells[link.a][1 + link.b] == cells[link.b][1 + link.a] == cell
    assert [row[-1] for row in cells] == [str(gpu.numa_node) for gpu in inventory.gpus]
    assert [row[-2] for row in cells] == [
        {n.number: n.cpus for n in inventory.numa}[g.numa_node or 0] for g in inventory.gpus
    ]
    assert "PHB  = a PCIe host bridge" in text


def test_a_pair_that_nobody_told_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    text = FOUR_GPUS.read_text()
    file.write_text(text[: text.index("[[link]]")])
    _, shows = shown(capsys, file, "--topology")
    assert shows.splitlines()[1].split() == ["GPU0", "X", "?", "?", "?", "0-31,64-95", "0"]


def test_a_record_simulates_the_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "recorded.toml"
    code, said = shown(capsys, TOPOLOGIES / "mig-a100.toml", "--record", str(file))
    assert (code, said) == (Exit.OK, f"{file}: 4 GPUs; try it with `nri-gpu gpus --gpus {file}`\n")
    assert shown(capsys, file, "-o", "json") == shown(capsys, TOPOLOGIES / "mig-a100.toml", "-o", "json")
    shown(capsys, TOPOLOGIES / "mig-a100.toml", "--record", str(file), "--scrub")
    names = {unit.uuid for unit in load_topology(TOPOLOGIES / "mig-a100.toml").units}
    assert not any(name in file.read_text() for name in names)
    assert len(load_topology(file).units) == len(names)


def test_a_record_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gpus", "--gpus", str(FOUR_GPUS), "--record", str(tmp_path / "no/such")]) == Exit.UNAVAILABLE
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_since_when_and_why_a_gpu_is_not_or_was_not_well() -> None:
    unwell = make.inventory(
        [
            make.gpu(0, health=Health(HealthState.SUSPECT, 1_800_000_000.0, "XID 63", 1)),
            make.gpu(1, health=Health(HealthState.HEALTHY, 1_800_000_000.0, "XID 79", 3), signs=(Sign.THERMAL,)),
            make.gpu(2),
        ]
    )
    assert render.gpus_text(unwell).splitlines()[5:] == [
        "GPU 0 is suspect since 2027-01-15 08:00:00 UTC, because of: XID 63; its state changed 1 times",
        "GPU 1 is healthy since 2027-01-15 08:00:00 UTC, recovered from: XID 79; its state changed 3 times; "
        "shows thermal",
    ]


def status(gpu: Gpu, **health: object) -> dict[str, object]:
    """What a daemon answers that holds this GPU for bad."""
    found = {"state": "bad", "since_s": 5.0, "why": "XID 79", "changes": 1, **health}
    return {
        "gpus": [{"uuid": gpu.uuid, "unavailable": "bad since then because of XID 79", "health": found}],
        "node": {"inventory_number": 7, "inventory_age_s": 3.4},
    }


def test_the_daemons_snapshot_has_a_number_and_an_age(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load_topology(FOUR_GPUS).gpus[0]
    monkeypatch.setattr(client, "ask", lambda *_: status(first))
    _, text = shown(capsys, FOUR_GPUS, "--state-dir", "/nowhere")
    assert text.splitlines()[0].endswith("from simulated; the daemon's snapshot is number 7, 3 s old")
    assert "bad since then" in text
    document = json.loads(shown(capsys, FOUR_GPUS, "--state-dir", "/nowhere", "-o", "json")[1])
    check_shape(document, GPUS)
    assert document["snapshot"] == {"number": 7, "age_s": 3.4}
    assert document["gpus"][0]["unavailable"] == "bad since then because of XID 79"
    never = status(first) | {"node": {"inventory_number": 1, "inventory_age_s": None}}
    monkeypatch.setattr(client, "ask", lambda *_: never)
    assert "is number 1, not confirmed yet\n" in shown(capsys, FOUR_GPUS, "--state-dir", "/nowhere")[1]


@pytest.mark.parametrize("said", [{}, {"gpus": 3}, {"gpus": [], "node": {"inventory_number": "x"}}])
def test_a_daemon_that_says_what_nobody_understands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: dict[str, object]
) -> None:
    monkeypatch.setattr(client, "ask", lambda *_: said)
    code, text = shown(capsys, FOUR_GPUS, "--state-dir", "/nowhere")
    assert code == Exit.OK
    assert "snapshot" not in text


def test_without_a_daemon_there_is_no_snapshot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, text = shown(capsys, FOUR_GPUS, "--state-dir", str(tmp_path))
    assert "snapshot" not in text
    document = json.loads(shown(capsys, FOUR_GPUS, "--state-dir", str(tmp_path), "-o", "json")[1])
    assert document["snapshot"] is None


def test_a_record_is_of_the_node_and_not_of_its_bad_day(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What the daemon holds for bad now would stay unavailable in every simulation of it."""
    inventory = load_topology(FOUR_GPUS)
    monkeypatch.setattr(client, "ask", lambda *_: status(inventory.gpus[0]))
    file = tmp_path / "recorded.toml"
    assert shown(capsys, FOUR_GPUS, "--state-dir", "/nowhere", "--record", str(file))[0] == Exit.OK
    assert load_topology(file, wall=lambda: inventory.taken_at) == inventory
    assert load_topology(file).gpus[0].unavailable == ""


def test_how_a_gpu_is_set_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    facts = """[[gpu]]
architecture = "hopper"
cpus = "0-15"
compute_mode = "exclusive-process"
persistence = true
ecc = true
ecc_pending = false
addressing = "hmm"
fabric = { state = "completed", cluster = "01234567-89ab-cdef-0123-456789abcdef", clique = 3, health_mask = 2 }"""
    modules = '[node.modules]\nnvidia = "580.95.05"\n\n'
    file.write_text(FOUR_GPUS.read_text().replace("[[gpu]]", modules + facts, 1))
    code, table = shown(capsys, file)
    assert code == Exit.OK
    assert "ok, exclusive-process" in table.splitlines()[2]
    document = json.loads(shown(capsys, file, "-o", "json")[1])
    check_shape(document, GPUS)
    assert document["modules"] == {"nvidia": "580.95.05"}
    first = document["gpus"][0]
    assert first["architecture"] == "hopper"
    assert (first["cpus"], first["compute_mode"], first["persistence"]) == ("0-15", "exclusive-process", True)
    assert (first["ecc"], first["addressing"]) == ({"current": True, "pending": False}, "hmm")
    assert first["fabric"] == {
        "state": "completed",
        "status": 0,
        "cluster": "01234567-89ab-cdef-0123-456789abcdef",
        "clique": 3,
        "health_mask": 2,
    }


def test_a_gpu_in_prohibited_mode_says_the_way_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(FOUR_GPUS.read_text().replace("[[gpu]]\n", '[[gpu]]\ncompute_mode = "prohibited"\n', 1))
    _, text = shown(capsys, file)
    assert "nvidia-smi -i" in text.splitlines()[2]
    assert [bool(gpu["unavailable"]) for gpu in json.loads(shown(capsys, file, "-o", "json")[1])["gpus"]] == [
        *(True, False, False, False)
    ]


@pytest.fixture
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs on its bus, and no driver: the kernel is the one thing that no option says."""
    make_pci(tmp_path / "sys/bus", "0000:10:00.0", "")
    make_pci(tmp_path / "sys/bus", "0000:11:00.0", "nvidia")
    make_information(tmp_path / "proc/driver", "0000:11:00.0", {"Model": "NVIDIA L4"})
    places = {"proc": tmp_path / "proc", "sysfs": str(tmp_path / "sys")}
    monkeypatch.setattr(NvmlSource.__init__, "__kwdefaults__", {**(NvmlSource.__init__.__kwdefaults__ or {}), **places})
    return tmp_path / "none"


def test_without_nvml_the_kernel_names_the_gpus(no_driver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--driver-root", str(no_driver)]) == Exit.UNAVAILABLE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 GPUs, driver ?, CUDA ?, from NVML"
    assert lines[1].startswith("GPU 0000:10:00.0 cannot be granted: not bound to a driver")
    assert lines[2] == "GPU 0000:11:00.0 NVIDIA L4 is seen by the kernel only"
    assert lines[3].startswith("libnvidia-ml.so.1 was not found below the driver root")
    assert len(lines) == 4
    assert main(["gpus", "-o", "json", "--driver-root", str(no_driver)]) == Exit.UNAVAILABLE
    parsed = json.loads(capsys.readouterr().out)
    check_shape(parsed, GPUS)
    assert [gpu["pci_bus_id"] for gpu in parsed["unlisted"]] == ["0000:10:00.0", "0000:11:00.0"]
    assert parsed["unlisted"][1]["reason"] == parsed["fault"]


def test_there_is_nothing_to_record_of_them(
    no_driver: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "node.toml"
    assert main(["gpus", "--driver-root", str(no_driver), "--record", str(record)]) == Exit.UNAVAILABLE
    assert "was not found" in capsys.readouterr().err
    assert not record.exists()
