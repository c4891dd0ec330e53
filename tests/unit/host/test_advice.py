"""Advice about NVIDIA's own tools, and silence once the policy has taken them into account."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.host.advice import node_advice
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import Disarm, DriverSettings, EnvironmentSettings, Policy, VisibleDevices
from tests.unit.host.test_others import listen

IDLE = EnvironmentSettings(visible_devices=VisibleDevices.VOID, disarm=Disarm.ALL)


def install(root: Path, *names: str, text: str = "") -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_runtime_that_would_serve_a_container_twice(tmp_path: Path) -> None:
    install(tmp_path, "usr/bin/nvidia-container-runtime", "etc/nvidia-container-runtime/config.toml")
    twice, past = node_advice(Policy(), tmp_path)
    assert 'visible_devices = "void"' in twice
    assert "(/etc/nvidia-container-runtime/config.toml, /usr/bin/nvidia-container-runtime)" in twice
    assert 'disarm = "all"' in past
    assert node_advice(Policy(environment=IDLE), tmp_path) == ()


def test_specifications_with_hooks(tmp_path: Path) -> None:
    names = [f"etc/cdi/{number}.yaml" for number in range(5)]
    install(tmp_path, *names, text="kind: nvidia.com/gpu\nhooks:\n- x\n")
    (only,) = node_advice(Policy(environment=IDLE), tmp_path)
    assert "(/etc/cdi/0.yaml, /etc/cdi/1.yaml, /etc/cdi/2.yaml and 2 more)" in only
    assert "nri-gpu cdi generate" in only


THEIRS = KubeletSettings(enabled=True, resource="example.com/gpu", inject_for=Globs(("nvidia.com/*",)))


@pytest.fixture
def plugin(folder: Path) -> Path:
    """A node with NVIDIA's device plugin."""
    listen(folder / "var/lib/kubelet/device-plugins/nvidia-gpu.sock")
    return folder


def test_nvidias_device_plugin_that_nobody_injects_for(plugin: Path) -> None:
    (only,) = node_advice(Policy(), plugin)
    assert "serves nvidia.com/gpu (/var/lib/kubelet/device-plugins/nvidia-gpu.sock)" in only
    assert 'kubelet.inject_for = ["nvidia.com/gpu"]' in only
    assert node_advice(Policy(kubelet=THEIRS), plugin) == ()


def test_nvidias_device_plugin_of_our_name(plugin: Path) -> None:
    (only,) = node_advice(Policy(kubelet=KubeletSettings(enabled=True)), plugin)
    assert "set kubelet.resource to another name" in only


def test_nvidias_device_plugin_by_cdi(plugin: Path) -> None:
    install(plugin, "var/run/cdi/dp.json", text='{"kind": "k8s.device-plugin.nvidia.com/gpu"}')
    (only,) = node_advice(Policy(), plugin)
    assert "by CDI: nri-gpu does not inject into its containers" in only


def test_a_disarmed_variable_of_the_device_plugins(plugin: Path) -> None:
    _, taken = node_advice(Policy(environment=IDLE), plugin)
    assert "removes the variable by which NVIDIA's device plugin gives GPUs" in taken
    assert node_advice(Policy(environment=IDLE, kubelet=THEIRS), plugin) == ()


def test_the_gpu_operator_and_its_driver(tmp_path: Path) -> None:
    install(tmp_path, "run/nvidia/validations/driver-ready", "run/nvidia/driver/usr/bin/nvidia-smi")
    driver, operator = node_advice(Policy(), tmp_path)
    assert "set driver.root to that" in driver
    assert "/run/nvidia/driver" in driver
    assert "docs/kubernetes.md" in operator
    placed = Policy(driver=DriverSettings(root="/run/nvidia/driver"))
    assert node_advice(placed, tmp_path) == (operator,)


def test_a_dra_driver(tmp_path: Path) -> None:
    (tmp_path / "var/lib/kubelet/plugins/gpu.nvidia.com").mkdir(parents=True)
    (only,) = node_advice(Policy(), tmp_path)
    assert "DRA driver serves claims" in only
    assert "[[pool]]" in only


def test_a_node_without_any(tmp_path: Path) -> None:
    assert node_advice(Policy(), tmp_path) == ()
