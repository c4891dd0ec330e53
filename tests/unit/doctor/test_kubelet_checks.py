"""The kubelet: none, one that is away, one that has lost its memory, and what it allocates."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.answers import ClaimStatus, DraStatus, KubeletStatus
from nri_gpu.doctor.kubelet_checks import kubelet_findings
from nri_gpu.domain.allocation import ResourceStatus
from nri_gpu.domain.finding import Level, ok
from nri_gpu.dra.questions import DriverReport
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.kubelet_settings import KubeletSettings, Registration
from nri_gpu.policy.model import Policy
from tests.support.builders import uuid
from tests.support.podresources import PodResourcesThread
from tests.unit.doctor.node import CHECKPOINT, CONFIG, HEALTHY, HEALTHY_POLICY, PLUGINS, DoctorNode

OFFERED = ResourceStatus("nvidia.com/gpu", registered=True, since_s=1.0, fault="")


def enabled(**fields: Any) -> Policy:  # noqa: ANN401 - of KubeletSettings
    return replace(HEALTHY_POLICY, kubelet=KubeletSettings(enabled=True, podresources="", **fields))


@pytest.fixture
def served(node: DoctorNode) -> DoctorNode:
    """A node whose kubelet has our device plugin."""
    node.listen(f"{PLUGINS}/kubelet.sock")
    node.process(900, "kubelet", "/usr/bin/kubelet")
    node.write(CHECKPOINT, HEALTHY)
    node.seen = replace(
        node.seen, policy=enabled(), status=node.status(kubelet=KubeletStatus(enabled=True, resources=(OFFERED,)))
    )
    return node


def test_a_kubelet_with_our_plugin(served: DoctorNode) -> None:
    assert served.found() == {}
    assert "2 of nvidia.com/gpu" in [each.meaning for each in served.examine().findings]


def test_a_kubelet_that_is_away(served: DoctorNode) -> None:
    served.dead_socket(f"{PLUGINS}/kubelet.sock")
    finding = served.only()
    assert (finding.level, finding.subject) == (Level.ERROR, "kubelet")
    assert "left behind by a process that has ended" in finding.meaning
    assert finding.fix[0].startswith("systemctl restart kubelet")
    away = served.found(policy=replace(HEALTHY_POLICY, kubelet=KubeletSettings(podresources="")), status=None)
    assert away["kubelet"].level is Level.WARNING


@pytest.mark.parametrize(
    ("status", "level", "words"),
    [
        (replace(OFFERED, since_s=None, fault="refused"), Level.ERROR, "not registered with the kubelet: refused"),
        (replace(OFFERED, since_s=None), Level.ERROR, "the kubelet has not answered"),
    ],
)
def test_a_resource_that_is_not_registered(
    served: DoctorNode, status: ResourceStatus, level: Level, words: str
) -> None:
    finding = served.only(status=served.status(kubelet=KubeletStatus(enabled=True, resources=(status,))))
    assert (finding.level, words in finding.meaning) == (level, True)


def test_only_the_guard_is_left(served: DoctorNode) -> None:
    kubelet = KubeletStatus(enabled=True, resources=(OFFERED,), guard_alone="NRI 0.6")
    finding = served.only(status=served.status(kubelet=kubelet))
    assert (finding.level, "NRI 0.6" in finding.meaning) == (Level.WARNING, True)


def test_a_registry_folder_that_is_not_there(served: DoctorNode) -> None:
    policy = enabled(registration=Registration.WATCHER)
    assert "/var/lib/kubelet/plugins_registry does not exist" in served.only(policy=policy).meaning
    (served.root / "var/lib/kubelet/plugins_registry").mkdir()
    assert served.found(policy=policy) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"Data": {"RegisteredDevices": 3}}', '{"Checksum": 1}', "\x00" * 100])
def test_a_checkpoint_that_is_damaged(served: DoctorNode, text: str) -> None:
    served.write(CHECKPOINT, text)
    finding = served.only()
    assert (finding.level, finding.subject) == (Level.ERROR, "kubelet checkpoint")
    assert f"mv /{CHECKPOINT} /{CHECKPOINT}.broken" in finding.fix[0]


REGISTERED = '{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {"nvidia.com/gpu": null}}, "Checksum": 1}'
ALLOCATED = (
    '{"Data": {"PodDeviceEntries": [{"PodUID": "gone", "ContainerName": "main", "ResourceName": "nvidia.com/gpu", '
    '"DeviceIDs": {"0": ["GPU-1"]}, "AllocResp": ""}], "RegisteredDevices": {}}, "Checksum": 1}'
)
OTHERS = ALLOCATED.replace("nvidia.com/gpu", "example.com/nic")


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        (REGISTERED, {}, True),
        (ALLOCATED, {}, True),
        (OTHERS, {}, False),
        (ALLOCATED, {"kubelet": KubeletSettings(enabled=True, podresources="")}, False),
        (ALLOCATED, {"dra": DraSettings()}, False),
    ],
    ids=["registered", "allocated", "of others", "beside our device plugin", "no claims"],
)
def test_a_checkpoint_that_remembers_a_device_plugin_where_claims_allocate(
    served: DoctorNode, text: str, changes: dict[str, Any], said: bool
) -> None:
    served.write(CHECKPOINT, text)
    policy = replace(HEALTHY_POLICY, kubelet=KubeletSettings(podresources=""), dra=DraSettings(enabled=True))
    found = served.found(policy=replace(policy, **changes), status=served.status())
    assert found.keys() == ({"kubelet checkpoint"} if said else set())
    if said:
        finding = found["kubelet checkpoint"]
        assert (finding.level, "nvidia.com/gpu" in finding.meaning) == (Level.WARNING, True)
        assert f"rm /{CHECKPOINT}" in finding.fix


@pytest.mark.parametrize("ours", [True, False])
def test_two_cgroup_drivers(served: DoctorNode, ours: bool) -> None:
    options = '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]\nSystemdCgroup = '
    served.write("etc/containerd/config.toml", f"{CONFIG}{options}{str(ours).lower()}\n")
    served.write("var/lib/kubelet/config.yaml", 'kind: KubeletConfiguration\ncgroupDriver: "systemd"\n')
    found = served.found()
    assert found.keys() == (set() if ours else {"cgroup driver"})
    if not ours:
        assert found["cgroup driver"].fix[1] == "SystemdCgroup = true"


def test_what_another_device_plugin_allocates(served: DoctorNode) -> None:
    with PodResourcesThread(served.root / "run") as server:
        server.give("any", {"main": {"example.com/gpu": [uuid(0)]}})
        settings = KubeletSettings(enabled=True, podresources="/run/pod-resources/kubelet.sock")
        finding = served.only(policy=replace(HEALTHY_POLICY, kubelet=settings))
    assert (finding.level, "1 of example.com/gpu" in finding.meaning) == (Level.WARNING, True)


ASKED = DraStatus(enabled=True, driver="gpu.nri.io", asked_s=1000.0, silent_s=1.0, report=DriverReport(8))
DRA: dict[str, DraStatus] = {
    "never asked": replace(ASKED, asked_s=None, silent_s=None),
    "silent": replace(ASKED, silent_s=101.0),
    "not served": replace(ASKED, fault="no socket"),
    "its own fault": replace(ASKED, report=DriverReport(0, (), "HTTP 403")),
    "a file that cannot be written": replace(ASKED, report=DriverReport(8, unwritten="/run/cdi/x cannot be written")),
    "somebody who removes files": replace(ASKED, report=DriverReport(8, restored=3)),
    "an old API server": replace(ASKED, report=DriverReport(8, ("DRADeviceTaints",))),
}
GOOD_DRA = {"all is well": ASKED, "the time of day was set": replace(ASKED, asked_s=-86400.0)}


@pytest.mark.parametrize("there", [True, False])
def test_the_file_of_a_prepared_claim(served: DoctorNode, there: bool) -> None:
    claim = ClaimStatus(uid="uid-1", namespace="ml", name="train", pods=(), devices=())
    served.write("var/run/cdi/nri-gpu-claim-uid-1.json" if there else "var/run/cdi/other.json", "{}")
    seen = replace(served.seen, status=replace(served.status(dra=ASKED), claims=(claim,)), now_s=1001.0)
    said = [each.meaning for each in kubelet_findings(seen, None) if each.level is Level.WARNING]
    assert said == ([] if there else [said[0]])
    assert there or "lacks the CDI specification of claim ml/train" in said[0]


@pytest.mark.parametrize("name", DRA)
def test_a_driver_process_with_a_fault(served: DoctorNode, name: str) -> None:
    kubelet = KubeletStatus(enabled=True, resources=(OFFERED,))
    served.hold("dra", DRA, name, status=served.status(kubelet=kubelet, dra=DRA[name]))


@pytest.mark.parametrize("dra", GOOD_DRA.values(), ids=GOOD_DRA)
def test_a_driver_process(served: DoctorNode, dra: DraStatus) -> None:
    seen = replace(served.seen, status=served.status(dra=dra))
    assert ok("DRA driver", "gpu.nri.io publishes 8 devices") in [*kubelet_findings(seen, None)]
