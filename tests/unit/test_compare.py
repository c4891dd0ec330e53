"""The script that holds us against nvidia-smi: it agrees where both tell the same, and finds each difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.cli.main import main as nri_gpu
from nri_gpu.simulation.topology import load_topology
from tests.gpu.compare import FIELDS, MIG_FIELDS, Verdict, compare, differences, main
from tests.support.daemon import TOPOLOGIES
from tests.support.nvml import FakeFabric, FakeFacts, FakeGpu, FakeMig, build_fake_nvml, gpus_of
from tests.support.nvml.smi import smi_document, smi_of, write_smi

SCENE = [
    FakeGpu(minor=6, facts=FakeFacts(ecc=(1, 0)), fabric=FakeFabric(clique=5, cluster="0123456789abcdef" * 2)),
    FakeGpu(
        brand=2,
        mig=(1, 1),
        facts=FakeFacts(compute_mode=2, persistence=0, addressing=1),
        parts=(
            FakeMig(place=0, uuid="MIG-01234567-89ab-5def-8123-456789abcdef", gi=9),
            FakeMig(place=4, uuid="MIG-11234567-89ab-5def-8123-456789abcdef", gi=2, slices=3, memory_mib=40192),
        ),
    ),
    FakeGpu(brand=13, facts=FakeFacts(architecture=8, ecc=(-1, -1)), fabric=FakeFabric(state=2, status=999)),
    FakeGpu(brand=-1, mig=(-1, -1), domain=0x10000),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return build_fake_nvml(tmp_path / "root", SCENE)


def ours(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    nri_gpu(["gpus", "--driver-root", str(root), "--state-dir", str(root), "-o", "json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_same_scene_agrees_in_every_field(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = compare(ours(root, capsys), smi_document(SCENE))
    assert differences(rows) == []
    assert len(rows) == 3 + len(SCENE) * len(FIELDS) + 2 * len(MIG_FIELDS)
    # This nvidia-smi has no UUIDs of MIG devices; all else was compared.
    assert [row.what for row in rows if row.verdict is Verdict.NOT_TOLD] == ["GPU 1 MIG 0 uuid", "GPU 1 MIG 4 uuid"]
    assert sum(row.theirs == "N/A" for row in rows) < len(rows) / 3


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_node_agrees(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = load_topology(path)
    gpus, ancestors = gpus_of(inventory)
    fake = build_fake_nvml(tmp_path, gpus, ancestors=ancestors, driver=inventory.driver_version)
    assert differences(compare(ours(fake, capsys), smi_of(inventory))) == []


CHANGED = {
    "driver version": ("<driver_version>580.95.05", "<driver_version>580.95.06"),
    "CUDA version": ("<cuda_version>13.0", "<cuda_version>13.1"),
    "number of GPUs": ("<attached_gpus>4", "<attached_gpus>5"),
    "GPU 0 minor": ("<minor_number>6", "<minor_number>0"),
    "GPU 0 uuid": ("<uuid>GPU-0", "<uuid>GPU-f"),
    "GPU 0 bus id": ("<pci_bus_id>00000000:10", "<pci_bus_id>00000000:1f"),
    "GPU 3 bus id": ("<pci_bus_id>00010000:13", "<pci_bus_id>00000000:13"),
    "GPU 0 product name": ("<product_name>NVIDIA H100 80GB HBM3", "<product_name>NVIDIA H100 PCIe"),
    "GPU 1 brand": ("<product_brand>Tesla", "<product_brand>GeForce"),
    "GPU 2 brand": ("<product_brand>NVIDIA RTX", "<product_brand>N/A"),
    "GPU 0 architecture": ("<product_architecture>Hopper", "<product_architecture>Ampere"),
    "GPU 2 architecture": ("<product_architecture>Ada Lovelace", "<product_architecture>Ada"),
    "GPU 0 memory": ("<total>81559 MiB", "<total>81560 MiB"),
    "GPU 0 MIG mode": ("<current_mig>Disabled", "<current_mig>Enabled"),
    "GPU 1 compute mode": ("<compute_mode>Prohibited", "<compute_mode>Default"),
    "GPU 0 persistence": ("<persistence_mode>Enabled", "<persistence_mode>Disabled"),
    "GPU 3 persistence": ("<persistence_mode>N/A", "<persistence_mode>Disabled"),
    "GPU 0 ECC": ("<current_ecc>Enabled", "<current_ecc>Disabled"),
    "GPU 0 ECC pending": ("<pending_ecc>Disabled", "<pending_ecc>N/A"),
    "GPU 1 addressing": ("<addressing_mode>HMM", "<addressing_mode>ATS"),
    "GPU 0 fabric state": ("<state>Completed", "<state>In Progress"),
    "GPU 0 fabric status": ("<status>Success", "<status>Insufficient Resources"),
    "GPU 2 fabric status": ("<status>Unknown Error", "<status>Success"),
    "GPU 0 fabric clique": ("<cliqueId>5", "<cliqueId>0"),
    "GPU 0 fabric cluster": ("<clusterUuid>01234567", "<clusterUuid>00000000"),
    "GPU 1 MIG 0 GPU instance": ("<gpu_instance_id>9", "<gpu_instance_id>8"),
    "GPU 1 MIG 0 compute instance": ("<compute_instance_id>0", "<compute_instance_id>1"),
    "GPU 1 MIG 0 uuid": ("<index>0</index>", "<index>0</index><uuid>MIG-f</uuid>"),
    "GPU 1 MIG 4 memory": ("<total>40192 MiB", "<total>40193 MiB"),
}


@pytest.mark.parametrize(("what", "change"), CHANGED.items(), ids=CHANGED)
def test_each_difference_is_found_and_no_other(
    root: Path, capsys: pytest.CaptureFixture[str], what: str, change: tuple[str, str]
) -> None:
    document = smi_document(SCENE)
    assert change[0] in document
    found = differences(compare(ours(root, capsys), document.replace(*change, 1)))
    assert [row.what for row in found] == [what]


def test_every_field_has_a_row_above() -> None:
    assert {field.name for field in FIELDS} <= {what.split(" ", 2)[2] for what in CHANGED if what.startswith("GPU")}
    assert {field.name for field in MIG_FIELDS} <= {what.split(" ", 4)[4] for what in CHANGED if what.count(" ") > 3}


def test_what_one_of_them_does_not_know(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = ours(root, capsys)
    fewer = differences(compare(document, smi_document(SCENE[:3])))
    assert [(row.what, row.theirs) for row in fewer] == [("number of GPUs", "3"), ("GPU 3", "missing")]
    more = differences(compare(document, smi_document([*SCENE, FakeGpu()])))
    assert [(row.what, row.ours) for row in more] == [("number of GPUs", "4"), ("GPU 4", "missing")]
    cut = smi_document(SCENE).replace("<index>4", "<index>5")
    assert [row.what for row in differences(compare(document, cut))] == ["GPU 1 MIG 5", "GPU 1 MIG 4"]
    document["gpus"][0]["ecc"] = None
    assert [row.what for row in differences(compare(document, smi_document(SCENE)))] == [
        "GPU 0 ECC",
        "GPU 0 ECC pending",
    ]


def test_an_older_nvidia_smi_tells_less_and_that_is_no_difference(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line for line in smi_document(SCENE).splitlines() if "addressing" not in line and "Architecture" not in line
    ]
    assert differences(compare(ours(root, capsys), "\n".join(lines))) == []


def test_the_program(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_smi(root, smi_document(SCENE))
    assert main(["--driver-root", str(root)]) == 0
    table = capsys.readouterr().out
    assert "DIFFERS" not in table
    assert "GPU 0 fabric cluster" in table
    assert table.splitlines()[-1].endswith("fields compared, 0 differ")
    said, xml = tmp_path / "ours.json", tmp_path / "smi.xml"
    said.write_text(json.dumps(ours(root, capsys)))
    xml.write_text(smi_document(SCENE, driver="570.26"))
    assert main(["--ours", str(said), "--smi", str(xml)]) == 1
    table = capsys.readouterr().out
    assert table.splitlines()[1].split() == ["driver", "version", "580.95.05", "570.26", "DIFFERS"]
    assert table.splitlines()[-1].endswith("fields compared, 1 differ")
