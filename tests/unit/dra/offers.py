"""What a node offers, for tests of what becomes of it."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from nri_gpu.dra.questions import Attribute, Capacity, NodeView, OfferedDevice, Taint

GIB: Final = 1 << 30
BAD: Final = Taint("gpu.nri.io/unhealthy", "bad", "NoSchedule")


def view(*devices: OfferedDevice, **parts: object) -> NodeView:
    whole = NodeView(number=1, driver="gpu.nri.io", dir="", registry_dir="", cdi_dir="", known=True, devices=devices)
    return replace(whole, **parts)


def device(
    name: str = "gpu-0", *taints: Taint, attributes: dict[str, Attribute] | None = None, **parts: object
) -> OfferedDevice:
    made = OfferedDevice(
        name=name, attributes=attributes or {"type": "gpu"}, capacity={"memory": Capacity(80 * GIB, 20 * GIB)}
    )
    return replace(made, taints=taints, **parts)
