"""Pieces of topology files, and the faults of a whole one."""

from __future__ import annotations

import pytest

from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.topology_file import TopologyError, parse_topology

NODE = "schema = 1\n[node]\n"
GPU = """[[gpu]]
index = 0
minor = 0
uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
bus_id = "0000:3b:00.0"
model = "NVIDIA H100 80GB HBM3"
memory_bytes = 85_520_809_984
arch = "9.0"
"""
SECOND = GPU.replace("= 0\n", "= 1\n").replace("GPU-0", "GPU-1").replace("3b", "3c")
LINK = '[[link]]\na = 0\nb = 1\npcie = "PIX"\n'
MIG = """[[gpu.mig]]
uuid = "MIG-01234567-89ab-5def-8123-456789abcdef"
profile = "1g.10gb"
gi = 9
ci = 0
memory_bytes = 10_200_547_328
"""
# What an earlier version played.
FORMER = f"""[[change]]
at_s = 3.5
gpu = 1
lost = true
recovery_action = "gpu-reset"
[[change]]
at_s = 1
gpu = 0
{MIG.replace("gpu.mig", "change.mig")}
[[change]]
at_s = 30
fault = ""
driver = "590.10"
majors = {{ nvidia = 195 }}
"""


def parse(text: str) -> Inventory:
    return parse_topology(text, "node.toml", 5.0)


def faults(text: str) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        parse(text)
    assert all(str(fault) in str(caught.value) for fault in caught.value.faults)
    return [f"{fault.key}: {fault.message}" for fault in caught.value.faults]


def part(number: int, **values: object) -> str:
    """One more MIG device; its GPU instance has the number too."""
    said = {
        "uuid": f"MIG-{number:08x}-89ab-5def-8123-456789abcdef",
        "profile": "1g.10gb",
        "gi": number,
        "ci": 0,
        "memory_bytes": 10_200_547_328,
        **values,
    }
    return "[[gpu.mig]]\n" + "".join(f"{key} = {value!r}\n" for key, value in said.items())
