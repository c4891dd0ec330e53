"""The same GPUs with a mount for each of the driver's names: what nri-gpu does not do, as a reply of fixed bytes."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.process import EIGHT_GPUS
from nri_gpu.domain.container import Container, ContainerId, Pod, PodId, PodUid
from nri_gpu.domain.edits import Mount
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, DriverTree
from nri_gpu.driver.scan import scan
from nri_gpu.driver.stage import stage
from nri_gpu.injection.plan import Share, plan
from nri_gpu.inventory.topology import load_topology
from nri_gpu.nri.convert import reply_to_pb

ANYBODY: Final = Container(
    id=ContainerId(""), name="", pod=Pod(id=PodId(""), uid=PodUid(""), name="", namespace="default")
)
PLACES: Final = {"lib64": f"/usr/lib/{platform.machine()}-linux-gnu", "bin": "/usr/bin"}


def reply(driver_root: Path, stage_dir: Path) -> bytes:
    """CreateContainerResponse for all 8 GPUs; the driver is staged there, as the daemon would."""
    inventory, capabilities = load_topology(EIGHT_GPUS), DEFAULT_CAPABILITIES
    tree = stage(scan(driver_root), stage_dir).trees[capabilities]
    share = Share(
        container=ANYBODY, gpus=inventory.gpus, capabilities=capabilities, inventory=inventory, tree=tree, void=False
    )
    files = {mount.destination: mount for mount in _mounts(tree)}
    return reply_to_pb(replace(plan(share), mounts=files))


def _mounts(tree: DriverTree) -> Iterator[Mount]:
    """Every name a program may ask for, where a loader looks without being told."""
    for folder, place in PLACES.items():
        for file in sorted(Path(tree.path, folder).iterdir()):
            yield Mount(f"{place}/{file.name}", str(file.resolve()))
