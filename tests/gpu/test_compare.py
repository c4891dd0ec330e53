"""The script that compares us with nvidia-smi, on what both tell of the same simulated GPUs."""

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

GPUS = [
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
    return build_fake_nvml(tmp_path / "root", GPUS)


def ours(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    nri_gpu(["gpus", "--driver-root", str(root), "--state-dir", str(root), "-o", "json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_same_gpus_agrees_in_every_field(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = compare(ours(root, capsys), smi_document(GPUS))
    assert differences(rows) == []
    assert len(rows) == 3 + len(GPUS) * len(FIELDS) + 2 * len(MIG_FIELDS)
    # This nvidia-smi has no UUIDs of MIG devices; all else was compared.
    assert [row.what for row in rows if row.verdict is Verdict.NOT_TOLD] == ["GPU 1 MIG 0 uuid", "GPU 1 MIG 4 uuid"]
    assert sum(row.theirs == "N/A" for row in rows) < len(rows) / 3


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_node_agrees(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = load_topology(path)
    gpus, ancestors = gpus_of(inventory)
    fake = build_fake_nvml(tmp_path, gpus, ancestors=ancestors, driver=inventory.driver_version)
    assert differences(compare(ours(fake, capsys), smi_of(inventory))) == []


def test_an_older_nvidia_smi_tells_less_and_that_is_no_difference(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line for line in smi_document(GPUS).splitlines() if "addressing" not in line and "Architecture" not in line
    ]
    assert differences(compare(ours(root, capsys), "\n".join(lines))) == []


def test_the_program(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_smi(root, smi_document(GPUS))
    assert main(["--driver-root", str(root)]) == 0
    table = capsys.readouterr().out
    assert "DIFFERS" not in table
    assert "GPU 0 fabric cluster" in table
    assert table.splitlines()[-1].endswith("fields compared, 0 differ")
    said, xml = tmp_path / "ours.json", tmp_path / "smi.xml"
    said.write_text(json.dumps(ours(root, capsys)))
    xml.write_text(smi_document(GPUS, driver="570.26"))
    assert main(["--ours", str(said), "--smi", str(xml)]) == 1
    table = capsys.readouterr().out
    assert table.splitlines()[1].split() == ["driver", "version", "580.95.05", "570.26", "DIFFERS"]
    assert table.splitlines()[-1].endswith("fields compared, 1 differ")
