"""What `nvidia-smi -q -x` prints of the GPUs that the made-up library plays: as version 12 of its schema has it.

Only elements that somebody reads, and some of those around them; in their order, with blanks where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nri_gpu.domain.node import Inventory
from tests.support.nvml.build import DRIVER, FakeFabric, FakeGpu, FakeMig, gpus_of

# Its own spelling, by nvml.h's numbers.
BRANDS = {
    0: "Unknown",
    1: "Quadro",
    2: "Tesla",
    5: "GeForce",
    11: "NVIDIA Cloud Gaming",
    13: "NVIDIA RTX",
    14: "NVIDIA",
}
ARCHITECTURES = {5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace", 9: "Hopper", 10: "Blackwell"}
COMPUTE_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
ADDRESSING = ("None", "HMM", "ATS")
FABRIC_STATES = ("N/A", "Not Started", "In Progress", "Completed")
SWITCHES = ("Disabled", "Enabled")


def smi_document(gpus: Sequence[FakeGpu], *, driver: str = DRIVER, cuda: str = "13.0") -> str:
    """The whole document."""
    lines = [
        '<?xml version="1.0" ?>',
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">',
        "<nvidia_smi_log>",
        "\t<timestamp>Mon Oct 13 00:25:36 2025</timestamp>",
        f"\t<driver_version>{driver}</driver_version>",
        f"\t<cuda_version>{cuda}</cuda_version>",
        f"\t<attached_gpus>{len(gpus)}</attached_gpus>",
    ]
    for index, gpu in enumerate(gpus):
        lines += [f"\t{line}" for line in _gpu(index, gpu)]
    return "\n".join([*lines, "</nvidia_smi_log>", ""])


def smi_of(inventory: Inventory) -> str:
    """The same of a topology."""
    return smi_document(gpus_of(inventory)[0], driver=inventory.driver_version)


def write_smi(driver_root: Path, document: str) -> None:
    """A program that prints it, where the driver's own would be."""
    program = driver_root / "usr/bin/nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '-q -x' ] && exec cat <<'END'\n{document}END\n", encoding="utf-8")
    program.chmod(0o755)


def _word(words: Sequence[str] | dict[int, str], number: int) -> str:
    return "N/A" if number < 0 else words[number]


def _gpu(index: int, gpu: FakeGpu) -> Iterator[str]:
    bus_id = f"{gpu.domain:08X}:{0x10 + index if gpu.bus is None else gpu.bus:02X}:00.0"
    facts = gpu.facts
    yield f'<gpu id="{bus_id}">'
    yield f"\t<product_name>{gpu.model}</product_name>"
    yield f"\t<product_brand>{_word(BRANDS, gpu.brand)}</product_brand>"
    yield f"\t<product_architecture>{_word(ARCHITECTURES, facts.architecture if facts else -1)}</product_architecture>"
    yield "\t<display_mode>Requested functionality has been deprecated</display_mode>"
    yield f"\t<persistence_mode>{_word(SWITCHES, facts.persistence if facts else -1)}</persistence_mode>"
    yield f"\t<addressing_mode>{_word(ADDRESSING, facts.addressing if facts else -1)}</addressing_mode>"
    yield "\t<mig_mode>"
    yield f"\t\t<current_mig>{_word(SWITCHES, gpu.mig[0])}</current_mig>"
    yield f"\t\t<pending_mig>{_word(SWITCHES, gpu.mig[1])}</pending_mig>"
    yield "\t</mig_mode>"
    yield "\t<mig_devices>"
    for part in gpu.parts:
        yield from (f"\t\t{line}" for line in _part(part))
    if not gpu.parts:
        yield "\t\tNone"
    yield "\t</mig_devices>"
    yield "\t<serial>N/A</serial>"
    yield f"\t<uuid>{gpu.uuid or f'GPU-{index:x}fa4e000-0000-4000-8000-{index:012d}'}</uuid>"
    yield f"\t<minor_number>{index if gpu.minor is None else gpu.minor}</minor_number>"
    yield "\t<pci>"
    yield f"\t\t<pci_domain>{gpu.domain:04X}</pci_domain>"
    yield f"\t\t<pci_bus_id>{bus_id}</pci_bus_id>"
    yield "\t</pci>"
    yield from (f"\t{line}" for line in _memory(gpu.memory_bytes // 2**20))
    yield f"\t<compute_mode>{_word(COMPUTE_MODES, facts.compute_mode if facts else -1)}</compute_mode>"
    yield "\t<ecc_mode>"
    yield f"\t\t<current_ecc>{_word(SWITCHES, facts.ecc[0] if facts else -1)}</current_ecc>"
    yield f"\t\t<pending_ecc>{_word(SWITCHES, facts.ecc[1] if facts else -1)}</pending_ecc>"
    yield "\t</ecc_mode>"
    yield from (f"\t{line}" for line in _fabric(gpu.fabric))
    yield "</gpu>"


def _memory(total_mib: int) -> Iterator[str]:
    yield "<fb_memory_usage>"
    yield f"\t<total>{total_mib} MiB</total>"
    yield "\t<reserved>0 MiB</reserved>"
    yield "\t<used>0 MiB</used>"
    yield "</fb_memory_usage>"


def _part(part: FakeMig) -> Iterator[str]:
    yield "<mig_device>"
    yield f"\t<index>{part.place}</index>"
    yield f"\t<gpu_instance_id>{part.gi}</gpu_instance_id>"
    yield f"\t<compute_instance_id>{part.ci}</compute_instance_id>"
    yield from (f"\t{line}" for line in _memory(part.memory_mib))
    yield "</mig_device>"


def _fabric(fabric: FakeFabric | None) -> Iterator[str]:
    told = fabric if fabric and fabric.state else None
    cluster = told.cluster if told else ""
    cut = f"{cluster[:8]}-{cluster[8:12]}-{cluster[12:16]}-{cluster[16:20]}-{cluster[20:]}"
    yield "<fabric>"
    yield f"\t<state>{FABRIC_STATES[told.state] if told else 'N/A'}</state>"
    yield f"\t<status>{('Unknown Error' if told.status else 'Success') if told else 'N/A'}</status>"
    yield f"\t<cliqueId>{told.clique if told else 'N/A'}</cliqueId>"
    yield f"\t<clusterUuid>{cut if told else 'N/A'}</clusterUuid>"
    yield "</fabric>"
