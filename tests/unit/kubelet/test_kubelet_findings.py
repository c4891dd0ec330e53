"""What the kubelet can give, as `check` hears it from a real server."""

from __future__ import annotations

from pathlib import Path

import grpc

from nri_gpu.kubelet.kubelet_findings import kubelet_advice
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.model import Policy
from tests.support.builders import mig_uuid, uuid
from tests.support.podresources import PodResourcesServer, PodResourcesThread

NODE: dict[str, list[str]] = {
    "nvidia.com/gpu": [uuid(0), f"{uuid(1)}::0"],
    "nvidia.com/mig-1g.5gb": [mig_uuid(0)],
    "example.com/gpu": [uuid(2)],
    "example.com/nic": ["eth0"],
}


def advice(server: PodResourcesServer, **settings: object) -> tuple[str, ...]:
    server.give("any", {"main": NODE})
    found = kubelet_advice(Policy(kubelet=KubeletSettings(podresources=str(server.socket), **settings)))  # type: ignore[arg-type] # a test's own
    return tuple(each.meaning for each in found)


def test_who_is_served_by_others(folder: Path) -> None:
    with PodResourcesThread(folder) as server:
        ours, gpu, mig = advice(server)
        assert "1 of example.com/gpu" in ours
        assert "2 of nvidia.com/gpu" in gpu
        assert "1 of nvidia.com/mig-1g.5gb" in mig
        theirs = Globs(("nvidia.com/*",))
        assert advice(server, enabled=True, resource="example.com/gpu", inject_for=theirs) == ()


def test_a_pattern_of_nothing(folder: Path) -> None:
    with PodResourcesThread(folder) as server:
        (only,) = advice(server, inject_for=Globs(("*/gpu", "nvidia.com/mig-*", "nvidia.com/mig-3g.*")))
        assert 'kubelet.inject_for[2] = "nvidia.com/mig-3g.*" matches no resource' in only


def test_a_kubelet_that_does_not_answer_and_none_at_all(folder: Path) -> None:
    with PodResourcesThread(folder) as server:
        server.fault = (grpc.StatusCode.PERMISSION_DENIED, "no")
        (only,) = advice(server)
        assert "does not list what it can allocate" in only
    assert advice(server) == ()
    assert kubelet_advice(Policy(kubelet=KubeletSettings(podresources=""))) == ()
