"""What is said of a node that changed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.gpu import GpuFault, Inventory, Majors
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.topology import load_topology
from tests.support.daemon import TOPOLOGIES

NODE = load_topology(TOPOLOGIES / "mig-a100.toml", wall=lambda: 1.0)
GPU = NODE.gpus[0]
CUT = NODE.gpus[1]


def other(at: int, **fields: object) -> Inventory:
    gpus = list(NODE.gpus)
    gpus[at] = replace(gpus[at], **fields)
    return replace(NODE, gpus=tuple(gpus))


CASES = {
    "a GPU fails": (other(0, unavailable="lost"), [f"GPU 0 ({GPU.uuid}) is unavailable: lost"]),
    "a GPU leaves": (replace(NODE, gpus=NODE.gpus[1:]), [f"GPU 0 ({GPU.uuid}) is gone"]),
    "a layout": (
        other(1, mig=CUT.mig[1:]),
        [f"MIG device 1:0 3g.40gb ({CUT.mig[0].uuid}) of GPU 1 is gone"],
    ),
    "MIG mode": (other(0, mig_enabled=True), [f"GPU 0 ({GPU.uuid}) is in MIG mode"]),
    "an index": (other(3, index=7), [f"GPU 7 ({NODE.gpus[3].uuid}) had index 3"]),
    "a minor": (other(0, minor_number=9), [f"GPU 0 ({GPU.uuid}) had minor 1, and has 9"]),
    "a driver": (replace(NODE, driver_version="590.1"), ["driver 580.95.05 -> 590.1"]),
    "modules": (replace(NODE, majors=Majors()), ["majors changed"]),
    "no name": (replace(NODE, faults=(GpuFault(4, "gone"),)), ["GPU 4 cannot be described: gone"]),
    "nobody answers": (replace(NODE, fault="no driver"), ["no driver"]),
    "time": (replace(NODE, taken_at=9.0), []),
}


@pytest.mark.parametrize(("after", "said"), CASES.values(), ids=CASES)
def test_sentences(after: Inventory, said: list[str]) -> None:
    assert list(changes(NODE, after)) == said


def test_and_back() -> None:
    assert changes(other(0, unavailable="lost"), NODE) == (f"GPU 0 ({GPU.uuid}) is available again",)
    assert changes(replace(NODE, gpus=NODE.gpus[1:]), NODE) == (f"GPU 0 ({GPU.uuid}) is new",)
    assert changes(replace(NODE, fault="x"), NODE) == ("the driver answers again",)
