"""Other injectors of GPUs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.finding import Level
from nri_gpu.policy.model import Disarm, EnvironmentSettings, VisibleDevices
from tests.unit.doctor.node import CONFIG, HEALTHY_POLICY, DoctorNode, installed

IDLE = replace(HEALTHY_POLICY, environment=EnvironmentSettings(visible_devices=VisibleDevices.VOID, disarm=Disarm.ALL))
DEFAULT = CONFIG + (
    '[plugins."io.containerd.cri.v1.runtime".containerd]\n  default_runtime_name = "nvidia"\n'
    '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]\n  runtime_type = "io.containerd.runc.v2"\n'
)


def test_nvidia_as_the_default_runtime(node: DoctorNode) -> None:
    node.write("etc/containerd/config.toml", DEFAULT)
    found = node.found()
    assert (found["default runtime"].level, found["default runtime"].fix[1]) == (
        Level.ERROR,
        'default_runtime_name = "runc"',
    )
    assert "default runtime" not in node.found(policy=IDLE)


def test_nvidia_as_the_default_runtime_of_crio(node: DoctorNode) -> None:
    node.process(700, "crio", "/usr/bin/crio")
    node.program("1.33.1")
    node.write("etc/crio/crio.conf.d/99-nvidia.conf", '[crio.runtime]\ndefault_runtime = "nvidia"\n')
    found = node.found(status=None)
    assert found["default runtime"].fix[1] == 'default_runtime = "crun"'


@pytest.mark.parametrize(("text", "found"), [('{"default-runtime": "nvidia"}', True), ("{}", False), ("{", False)])
def test_nvidia_as_the_default_runtime_of_docker(node: DoctorNode, text: str, found: bool) -> None:
    node.write("etc/docker/daemon.json", text)
    assert ("Docker" in node.found()) is found


def test_an_installed_runtime_and_what_to_write_into_the_policy(node: DoctorNode) -> None:
    installed(node)
    advice = [each for each in node.examine().findings if each.subject == "other injectors"]
    assert [each.level for each in advice] == [Level.WARNING] * 2
    assert advice[0].fix[1] == 'visible_devices = "void"    # below [environment]'
    assert node.found(policy=IDLE).keys() <= {"policy advice"}
