"""Containers that open GPUs which nri-gpu did not grant them."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.finding import Finding, Level
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import ForeignSettings
from tests.support import builders as make
from tests.support.podresources import PodResourcesThread
from tests.unit.doctor.node import HEALTHY_POLICY, DoctorNode

SUBJECT: Final = "external holders"


def opened(node: DoctorNode, *indices: int, name: str = "plugin", watched: tuple[int, ...] = ()) -> DaemonStatus:
    """One container opens these GPUs, and watches some of them."""
    other = replace(make.foreign(*indices, of=name), watched=frozenset(map(make.uuid, watched)))
    return node.status(ledger=make.ledger(others=[other]))


def every(node: DoctorNode) -> tuple[int, ...]:
    return tuple(range(len(node.status().gpus)))


def about(node: DoctorNode, status: DaemonStatus, subject: str = SUBJECT) -> Finding:
    (finding,) = [each for each in node.examine(status=status).findings if each.subject == subject]
    return finding


def test_how_many_each_keeps_from_others(node: DoctorNode) -> None:
    finding = about(node, opened(node, 0))
    assert finding.level is Level.OK
    assert finding.meaning == (
        "ml/plugin, container main, opens 1 GPU that nri-gpu did not grant to it: no other container gets them "
        "exclusively"
    )


def test_a_device_that_nvidias_dra_driver_prepared_is_an_allocation(node: DoctorNode) -> None:
    other = replace(make.foreign(*every(node)), device="gpu-6")
    finding = about(node, node.status(ledger=make.ledger(others=[other])))
    assert finding.level is Level.OK
    assert finding.meaning == (
        "ml/plugin, container main, has a claim of gpu.nvidia.com, which prepared gpu-6 for it: no other container "
        "gets them exclusively"
    )


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("dcgm-exporter-x2k9v", "ml/dcgm-exporter-*"),
        ("validator-7d4b9c6f8d-x2k9v", "ml/validator-*"),
        ("exporter", "ml/exporter"),
    ],
)
def test_who_opens_all_and_was_allocated_none_is_for_the_list(node: DoctorNode, name: str, pattern: str) -> None:
    finding = about(node, opened(node, *every(node), name=name))
    assert finding.level is Level.WARNING
    assert finding.fix[1] == f'monitors = ["{pattern}"]    # below [foreign]'


def test_the_list_keeps_what_it_has(node: DoctorNode) -> None:
    policy = replace(HEALTHY_POLICY, foreign=ForeignSettings(monitors=Globs(("ml/a-*",))))
    finding = node.found(status=opened(node, *every(node)), policy=policy)[SUBJECT]
    assert finding.fix[1] == 'monitors = ["ml/a-*", "ml/plugin"]    # below [foreign]'


def test_what_the_kubelet_allocated_to_it(node: DoctorNode) -> None:
    """A device plugin's container on a node whose every GPU it has."""
    status = opened(node, *every(node))
    policy = replace(
        node.seen.policy, kubelet=replace(node.seen.policy.kubelet, podresources="/pod-resources/kubelet.sock")
    )
    node.seen = replace(node.seen, policy=policy)
    node.dead_socket("pod-resources/kubelet.sock")
    assert about(node, status).level is Level.UNSEEN
    with PodResourcesThread(node.root) as told:
        assert about(node, status).level is Level.WARNING
        told.pods["ml", "plugin"] = {"main": {"nvidia.com/gpu": [make.uuid(each) for each in every(node)]}}
        assert about(node, status).level is Level.OK


def test_a_monitor_is_named_and_holds_nothing(node: DoctorNode) -> None:
    status = opened(node, *every(node), watched=every(node))
    assert about(node, status, "monitors").meaning == "ml/plugin: GPUs that they open stay available to others"
    assert SUBJECT not in {each.subject for each in node.examine(status=status).findings}
