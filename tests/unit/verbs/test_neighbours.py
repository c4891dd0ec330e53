"""Advice about NVIDIA's own tools, and silence once the policy has taken them into account."""

from __future__ import annotations

from pathlib import Path

from nri_gpu.policy.model import Disarm, EnvironmentSettings, Policy, VisibleDevices
from nri_gpu.verbs.neighbours import node_advice

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


def test_a_node_without_any(tmp_path: Path) -> None:
    assert node_advice(Policy(), tmp_path) == ()
