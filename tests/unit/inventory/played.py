"""One look at a made-up machine, by the NVML process itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.child import NvmlChild
from tests.support.nvml import Act, FakeGpu, build_fake_nvml


def played(tmp_path: Path, gpus: Sequence[FakeGpu], acts: Sequence[Act] = (), without: Sequence[str] = ()) -> Inventory:
    root = build_fake_nvml(tmp_path / "driver", gpus, acts, without=without)

    async def once() -> Inventory:
        child = NvmlChild(str(root), sysfs=str(tmp_path))
        try:
            return await child.refresh()
        finally:
            await child.close()

    return asyncio.run(once())
