"""A reload of systemd, refused while a container would lose its GPU by it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.enable.node_limits import require_safe_reload
from nri_gpu.host.actions import MakeLink, make_plan
from tests.unit.host.host_tree import NVIDIA, HostTree
from tests.unit.verify.test_oci_bundles import annotated, write


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    """Two GPUs with their nodes and no links, and a container that has the first of them."""
    tree = HostTree(tmp_path).loaded()
    for minor in tree.minors:
        tree.bind(minor, "nvidia")
        tree.node(f"nvidia{minor}", NVIDIA, minor)
    device = {"path": "/dev/nvidia0", "type": "c", "major": NVIDIA, "minor": 0}
    allowed = {"allow": True, "type": "c", "major": NVIDIA, "minor": 0, "access": "rw"}
    linux = {"devices": [device], "resources": {"devices": [{"allow": False, "access": "rwm"}, allowed]}}
    write(tmp_path / "run/containerd", {**annotated(), "linux": linux})
    return tree


def test_a_container_that_would_lose_its_gpu(host: HostTree) -> None:
    with pytest.raises(CommandError) as refused:
        asyncio.run(require_safe_reload(host.base))
    said = str(refused.value)
    assert refused.value.code == Exit.FINDING
    assert "containers lose their GPUs at the next `systemctl daemon-reload` (containers that have GPUs now: " in said
    assert "research/train" in said
    assert said.endswith("run `nri-gpu prepare` first, or leave --now out; nothing was changed")


def test_with_the_links_of_prepare_none_does(host: HostTree) -> None:
    for action in make_plan(host.look()).actions:
        if isinstance(action, MakeLink):
            link = host.places.dev / action.path
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(action.target)
    asyncio.run(require_safe_reload(host.base))


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    asyncio.run(require_safe_reload(tmp_path))
