"""Who else gives GPUs to pods: read off folder trees as their installers leave them."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.host.others import Other, Who, others


@pytest.fixture
def root() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-test-") as made:
        yield Path(made)


def listen(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_nobody(root: Path) -> None:
    assert others(root) == ()
    write(root / "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
    write(root / "var/lib/kubelet/device-plugins/nvidia-gpu.sock")  # a file is no socket
    listen(root / "var/lib/kubelet/device-plugins/kubelet.sock")
    listen(root / "var/lib/kubelet/device-plugins/nri-gpu-gpu-1a2b3c4d.sock")
    write(root / "var/run/cdi/nri-gpu.json", '{"kind": "nvidia.com/gpu"}')
    (root / "run/nvidia/driver").mkdir(parents=True)
    (root / "run/nvidia/validations").mkdir()
    assert others(root) == ()


def test_device_plugins_by_their_sockets(root: Path) -> None:
    for name in ("nvidia-gpu.sock", "nvidia-mig-1g.10gb.sock"):
        listen(root / "mnt/kubelet/device-plugins" / name)
    assert others(root, "/mnt/kubelet/device-plugins") == (
        Other(Who.DEVICE_PLUGIN, "/mnt/kubelet/device-plugins/nvidia-gpu.sock", "nvidia.com/gpu"),
        Other(Who.DEVICE_PLUGIN, "/mnt/kubelet/device-plugins/nvidia-mig-1g.10gb.sock", "nvidia.com/mig-1g.10gb"),
    )
    assert others(root) == ()


def test_a_device_plugin_that_gives_by_cdi(root: Path) -> None:
    write(root / "var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json", '{"kind": "k8s.device-plugin.nvidia.com/gpu"}')
    (found,) = others(root)
    assert found == Other(Who.DEVICE_PLUGIN_CDI, "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json")


def test_the_gpu_operator(root: Path) -> None:
    write(root / "run/nvidia/validations/toolkit-ready")
    write(root / "run/nvidia/driver/usr/bin/nvidia-smi")
    assert others(root) == (
        Other(Who.OPERATOR, "/run/nvidia/validations"),
        Other(Who.OPERATOR_DRIVER, "/run/nvidia/driver"),
    )


def test_a_dra_driver(root: Path) -> None:
    (root / "var/lib/kubelet/plugins/gpu.nvidia.com").mkdir(parents=True)
    listen(root / "var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock")
    write(root / "var/run/cdi/k8s.gpu.nvidia.com-claim.json", '{"kind": "k8s.gpu.nvidia.com/claim"}')
    assert {each.who for each in others(root)} == {Who.DRA}
    assert len(others(root)) == 3
