"""The program that compares us with nvidia-smi, on what that prints of a GPU which a made-up NVML plays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nri_gpu.cli.main import main as nri_gpu
from tests.gpu.compare import FIELDS, MIG_FIELDS, main
from tests.support.nvml import FakeFabric, FakeFacts, FakeGpu, FakeMig, build_fake_nvml

GPU = FakeGpu(
    minor=6,
    uuid="GPU-0fa4e000-0000-4000-8000-000000000000",
    mig=(1, 1),
    facts=FakeFacts(ecc=(1, 0)),
    fabric=FakeFabric(clique=5, cluster="0123456789abcdef" * 2),
    parts=(FakeMig(place=4, uuid="MIG-11234567-89ab-5def-8123-456789abcdef", gi=2, slices=3, memory_mib=40192),),
)
DOCUMENT = """<nvidia_smi_log>
    <driver_version>580.95.05</driver_version>
    <cuda_version>13.0</cuda_version>
    <attached_gpus>1</attached_gpus>
    <gpu id="00000000:10:00.0">
        <product_name>NVIDIA H100 80GB HBM3</product_name>
        <product_brand>NVIDIA</product_brand>
        <product_architecture>Hopper</product_architecture>
        <persistence_mode>Enabled</persistence_mode>
        <addressing_mode>None</addressing_mode>
        <mig_mode><current_mig>Enabled</current_mig></mig_mode>
        <mig_devices>
            <mig_device>
                <index>4</index>
                <gpu_instance_id>2</gpu_instance_id>
                <compute_instance_id>0</compute_instance_id>
                <fb_memory_usage><total>40192 MiB</total></fb_memory_usage>
            </mig_device>
        </mig_devices>
        <uuid>GPU-0fa4e000-0000-4000-8000-000000000000</uuid>
        <minor_number>6</minor_number>
        <pci><pci_bus_id>00000000:10:00.0</pci_bus_id></pci>
        <fb_memory_usage><total>81559 MiB</total></fb_memory_usage>
        <compute_mode>Default</compute_mode>
        <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Disabled</pending_ecc></ecc_mode>
        <gpu_recovery_action>None</gpu_recovery_action>
        <remapped_rows><remapped_row_pending>N/A</remapped_row_pending></remapped_rows>
        <fabric>
            <state>Completed</state>
            <status>Success</status>
            <cliqueId>5</cliqueId>
            <clusterUuid>01234567-89ab-cdef-0123-456789abcdef</clusterUuid>
        </fabric>
    </gpu>
</nvidia_smi_log>
"""
COMPARED = 3 + len(FIELDS) + len(MIG_FIELDS) - 1  # this nvidia-smi has no UUIDs of MIG devices


@pytest.mark.parametrize(
    ("document", "told", "differs"),
    [
        pytest.param(DOCUMENT, COMPARED, [], id="the same"),
        pytest.param(DOCUMENT.replace("580.95.05", "570.26"), COMPARED, ["driver version"], id="another driver"),
        pytest.param(DOCUMENT.replace("addressing_mode", "unknown"), COMPARED - 1, [], id="an older nvidia-smi"),
    ],
)
def test_what_differs_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: str, told: int, differs: list[str]
) -> None:
    root = build_fake_nvml(tmp_path / "root", [GPU])
    nri_gpu(["gpus", "--driver-root", str(root), "--state-dir", str(root), "-o", "json"])
    said, xml = tmp_path / "ours.json", tmp_path / "smi.xml"
    said.write_text(json.dumps(json.loads(capsys.readouterr().out)))
    xml.write_text(document)
    assert main(["--ours", str(said), "--smi", str(xml)]) == bool(differs)
    *table, verdict = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:2]) for line in table if line.endswith("DIFFERS")] == differs
    assert verdict == f"{told} fields compared, {len(differs)} differ"
