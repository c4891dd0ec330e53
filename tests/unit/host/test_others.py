"""ComponentKind else gives GPUs to pods: read off folder trees as their installers leave them."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.host.components import Component, ComponentKind, allocators


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
    assert tuple(allocators(root)) == ()
    write(root / "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
    write(root / "var/lib/kubelet/device-plugins/nvidia-gpu.sock")  # a file is no socket
    listen(root / "var/lib/kubelet/device-plugins/kubelet.sock")
    listen(root / "var/lib/kubelet/device-plugins/nri-gpu-gpu-1a2b3c4d.sock")
    write(root / "var/run/cdi/nri-gpu.json", '{"kind": "nvidia.com/gpu"}')
    (root / "run/nvidia/driver").mkdir(parents=True)
    (root / "run/nvidia/validations").mkdir()
    assert tuple(allocators(root)) == ()


def test_device_plugins_by_their_sockets(root: Path) -> None:
    for name in ("nvidia-gpu.sock", "nvidia-mig-1g.10gb.sock"):
        listen(root / "mnt/kubelet/device-plugins" / name)
    assert tuple(allocators(root, "/mnt/kubelet/device-plugins")) == (
        Component(ComponentKind.DEVICE_PLUGIN, "/mnt/kubelet/device-plugins/nvidia-gpu.sock", "nvidia.com/gpu"),
        Component(
            ComponentKind.DEVICE_PLUGIN, "/mnt/kubelet/device-plugins/nvidia-mig-1g.10gb.sock", "nvidia.com/mig-1g.10gb"
        ),
    )
    assert tuple(allocators(root)) == ()


def test_a_device_plugin_that_gives_by_cdi(root: Path) -> None:
    write(root / "var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json", '{"kind": "k8s.device-plugin.nvidia.com/gpu"}')
    (found,) = tuple(allocators(root))
    assert found == Component(ComponentKind.DEVICE_PLUGIN_CDI, "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json")


def test_the_gpu_operator(root: Path) -> None:
    write(root / "run/nvidia/validations/toolkit-ready")
    write(root / "run/nvidia/driver/usr/bin/nvidia-smi")
    assert tuple(allocators(root)) == (
        Component(ComponentKind.OPERATOR, "/run/nvidia/validations"),
        Component(ComponentKind.OPERATOR_DRIVER, "/run/nvidia/driver"),
    )


def test_a_dra_driver(root: Path) -> None:
    (root / "var/lib/kubelet/plugins/gpu.nvidia.com").mkdir(parents=True)
    listen(root / "var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock")
    write(root / "var/run/cdi/k8s.gpu.nvidia.com-claim.json", '{"kind": "k8s.gpu.nvidia.com/claim"}')
    assert {each.kind for each in tuple(allocators(root))} == {ComponentKind.DRA}
    assert len(tuple(allocators(root))) == 3
