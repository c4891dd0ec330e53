"""What the chart's pods show of a node: no error for what cannot be otherwise, no advice that no pod can follow."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.finding import Level
from nri_gpu.policy.kubelet_settings import KubeletSettings
from tests.unit.doctor.node import HEALTHY_POLICY, DoctorNode

MOUNTS = ("etc/nri-gpu", "run/nri-gpu-guard")


@pytest.fixture
def pod(node: DoctorNode, monkeypatch: pytest.MonkeyPatch) -> DoctorNode:
    """The guard's: a ConfigMap and an emptyDir, no folders of the kubelet, and a /dev of its own."""
    policy = node.write("etc/nri-gpu/..1/policy.toml", "").parent.parent
    (policy / "..data").symlink_to("..1")
    (policy / "policy.toml").symlink_to("..data/policy.toml")
    policy.chmod(0o777)
    own = node.root / "run/nri-gpu-guard"
    own.chmod(0o1777)
    monkeypatch.setattr(Path, "is_mount", lambda self: self in {policy, own})
    for path in (node.root / "dev").glob("nvidia*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    settings = replace(HEALTHY_POLICY, source=str(policy / "policy.toml"), kubelet=KubeletSettings(enabled=True))
    node.seen = replace(node.seen, in_pod=True, policy=settings)
    return node


def test_nothing_is_an_error_that_cannot_be_otherwise(pod: DoctorNode) -> None:
    found = pod.found()
    assert {each.level for each in found.values()} == {Level.UNSEEN}
    assert found.keys() == {"device nodes", "kubelet"}


def test_outside_of_a_pod_it_is(pod: DoctorNode) -> None:
    found = pod.found(in_pod=False)
    assert {"device nodes", "kubelet", "our files"} <= {key for key, each in found.items() if each.level is Level.ERROR}


@pytest.mark.parametrize("path", [*MOUNTS, "var/lib/nri-gpu/drivers"])
def test_only_these_mounts_are_excused(pod: DoctorNode, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (pod.root / path).mkdir(parents=True, exist_ok=True)
    (pod.root / path).chmod(0o777)
    mounts = {pod.root / each for each in MOUNTS} - ({pod.root / path} if path in MOUNTS else set())
    monkeypatch.setattr(Path, "is_mount", lambda self: self in mounts | {pod.root / "var/lib/nri-gpu/drivers"})
    assert path in pod.found()["our files"].meaning


def test_a_driver_root_that_only_the_daemon_has(pod: DoctorNode) -> None:
    driver = replace(pod.seen.policy.driver, root="/driver-root", host_root="/")
    assert pod.found(policy=replace(pod.seen.policy, driver=driver))["driver versions"].level is Level.UNSEEN


def test_what_the_node_must_do_is_said_so(pod: DoctorNode) -> None:
    fix = pod.found(status=None, silence=TimeoutError())["daemon"].fix
    assert fix[0] == "# on the node, not in this pod:"
    assert fix[1].startswith("journalctl")
