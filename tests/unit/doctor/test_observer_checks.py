"""A node that is observed: no fault of a daemon that nobody means to run, and what the observer says of itself."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.answers import AllocationStatus, DaemonStatus, ObservedFinding, ObserverStatus, PolicyStatus
from nri_gpu.doctor.examine import DoctorDocument
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.doctor.support_bundle import bundle
from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.domain.finding import Level
from nri_gpu.domain.finding_kind import FindingKind
from tests.support import builders as make
from tests.unit.doctor.node import DoctorNode, away

GIVEN = AllocationStatus(gpu_uuid=make.uuid(0), namespace="ml", pod="train", by="device plugin nvidia.com/gpu")
STRAY = ObservedFinding(kind=FindingKind.NOT_GIVEN, message="ml/train opened GPU 1, which nobody gave it")
PRIVILEGED = ObservedFinding(kind=FindingKind.PRIVILEGED, message="privileged pods open GPUs: ops/agent")
SECRET = "hunter2"


def observed(node: DoctorNode, policy: PolicyStatus | None = None, fault: str = "", **fields: Any) -> DaemonStatus:  # noqa: ANN401
    """The answer of an observer that looked 7 s ago; fields: of its own part."""
    now = node.seen.now_s
    own = {"looked_s": now - 7, "kubelet_s": now - 3, "kubelet": True, "allocations": (GIVEN,), **fields}
    return node.status(
        policy=policy or PolicyStatus("the built-in defaults", ""),
        connection=away(ready=False, fault="an observer joins no runtime"),
        inventory_fault=fault,
        observer=ObserverStatus(**own),
    )


def examined(node: DoctorNode, status: DaemonStatus | None = None, **changes: Any) -> DoctorDocument:  # noqa: ANN401
    changes = {"status": None, "silence": FileNotFoundError(), "observer": status or observed(node), **changes}
    return node.examine(**changes)


def bare(node: DoctorNode) -> DoctorNode:
    """A host with Docker where nothing of nri-gpu was ever but the observer."""
    for folder in ("run/nri-gpu", "run/nri-gpu-guard", "run/nri"):
        shutil.rmtree(node.root / folder)
    for name in ("nri-gpu", "nri-gpu-guard"):
        node.remove(f"etc/systemd/system/{name}.service")
    node.process(701, "dockerd", "/usr/bin/dockerd")
    node.write("etc/containerd/config.toml", 'disabled_plugins = ["cri"]\n')
    node.write("etc/docker/daemon.json", '{"default-runtime": "nvidia"}')
    return node


def test_a_host_with_docker_and_the_observer_has_no_fault(node: DoctorNode) -> None:
    found = examined(bare(node))
    assert [each.name for each in found.sections] == ["driver", "host", "observer", "nri-gpu's files"]
    (odd,) = (each for each in found.findings if each.level is not Level.OK)
    assert (odd.level, odd.subject) == (Level.NOTE, "observer")
    assert "it grants nothing" in odd.meaning
    said = " ".join(each.meaning for each in found.findings)
    assert "looked at containers and processes 7 s ago, and knows 1 allocation" in said
    assert "told what it allocated 3 s ago" in said
    assert "the observer knows" in said
    assert "NVML" not in said  # it may know them by the kernel alone
    assert not [word for word in ("refuses every", "restart nri-gpu", "without GPUs") if word in said]


def test_a_daemon_that_is_meant_to_run_is_missed_all_the_same(node: DoctorNode) -> None:
    node.write("etc/systemd/system/multi-user.target.wants/nri-gpu.service", "")
    levels = {(each.level, each.subject) for each in examined(node).findings}
    assert {(Level.ERROR, "daemon"), (Level.NOTE, "observer")} <= levels


def test_a_daemon_alone_has_no_word_of_an_observer(node: DoctorNode) -> None:
    assert "observer" not in [each.name for each in node.examine().sections]


SEEN: dict[str, tuple[dict[str, Any], Level, str]] = {
    "no look yet": ({"looked_s": None}, Level.UNSEEN, "has not looked"),
    "a late look": ({"looked_s": 1.0}, Level.WARNING, "its next look is late"),
    "no rules": ({"unseen": ("the kernel's rules: bpf(2) is not permitted",)}, Level.UNSEEN, "bpf(2)"),
    "no NVML": ({"fault": "libnvidia-ml.so.1 was not found"}, Level.UNSEEN, "libnvidia-ml"),
    "a silent kubelet": ({"kubelet_s": None}, Level.UNSEEN, "has not told"),
    "a stray": ({"findings": (STRAY,)}, Level.WARNING, "which nobody gave it"),
    "privileged pods": ({"findings": (PRIVILEGED,)}, Level.NOTE, "ops/agent"),
    "a rejected policy": ({"policy": PolicyStatus("/p", "", "no TOML")}, Level.WARNING, "the last good policy"),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_it_says_of_itself(node: DoctorNode, name: str) -> None:
    fields, level, words = SEEN[name]
    found = [each for each in examined(bare(node), observed(node, **fields)).findings if each.level is not Level.OK]
    assert [words in each.meaning for each in found if each.level is level and each.subject != "daemon"].count(
        True
    ) == 1
    assert len(found) == 2  # and that it answers


def test_a_fault_of_the_policy_file_is_no_error_beside_an_observer(node: DoctorNode) -> None:
    wrong = PolicyError((Fault("policy.toml", "observe.look_s", "must be a number", 3),))
    (found,) = (each for each in examined(node, policy_error=wrong).findings if each.subject == "policy")
    assert (found.level, "observe.look_s" in found.meaning) == (Level.WARNING, True)


def test_a_host_without_a_kubelet_is_told_so(node: DoctorNode) -> None:
    (found,) = (each for each in examined(node, observed(node, kubelet=False)).findings if each.subject == "kubelet")
    assert (found.level, "none here" in found.meaning) == (Level.OK, True)


def test_a_simulated_node_is_called_one(node: DoctorNode) -> None:
    status = observed(node)
    simulated = replace(status, node=replace(status.node, simulated=True))
    assert examined(node, simulated).simulated


def test_the_bundle_has_its_answer_and_none_of_what_it_looks_at(node: DoctorNode) -> None:
    """Whatever lies in the files that an observer reads."""
    env = [f"TOKEN={SECRET}", "NVIDIA_VISIBLE_DEVICES=all"]
    spec = {"process": {"env": env, "args": [SECRET]}, "annotations": {"secret": SECRET}, "hostname": SECRET}
    docker = {"Name": "/train", "Config": {"Env": env, "Cmd": [SECRET], "Labels": {"a": SECRET}}}
    for folder in ("run/containerd/io.containerd.runtime.v2.task/moby/1", "var/lib/containers/overlay-containers/1"):
        node.write(f"{folder}/config.json", json.dumps(spec))
    node.write("var/lib/docker/containers/1/config.v2.json", json.dumps(docker))
    node.write("var/lib/docker/containers/1/hostconfig.json", json.dumps({"Binds": [SECRET], "DeviceRequests": []}))
    node.write("etc/docker/daemon.json", json.dumps({"log-opts": {"token": SECRET}}))
    node.process(902, "python3", "train.py", f"--password={SECRET}")
    node.write("proc/902/environ", f"TOKEN={SECRET}\0")
    node.write("run/nri-gpu-observe/control.sock", SECRET)
    seen = node.seen.__class__(root=node.root, observer=observed(node), now_s=node.seen.now_s)
    with tarfile.open(fileobj=io.BytesIO(bundle(seen, container_runtime(seen), {})), mode="r:gz") as archive:
        files = {each.name: archive.extractfile(each) for each in archive.getmembers()}
        texts = {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file}
    assert json.loads(texts["observer.json"])["observer"]["allocations"][0]["by"] == GIVEN.by
    assert "/run/nri-gpu-observe/control.sock: " in texts["files.txt"]
    assert [name for name, text in texts.items() if SECRET in text] == []
