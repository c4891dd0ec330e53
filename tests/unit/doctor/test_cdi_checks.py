"""A node as docs/quickstart/docker.md makes it: CDI is what counts, and no daemon is missed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any, Final

import pytest

from nri_gpu.doctor.examine import DoctorDocument
from nri_gpu.domain.allocation import REQUIRED_KIND
from nri_gpu.domain.finding import Finding, Level
from nri_gpu.kubelet.required_device import FILE_NAME
from tests.unit.doctor.node import VERSION, DoctorNode

Break = Callable[[DoctorNode], object]
SPECIFICATION = "run/cdi/nri-gpu.json"
STAGED = f"/var/lib/nri-gpu/cdi/{VERSION}-1/lib64/libcuda.so.{VERSION}"
OWN_CONTAINERD = "/var/run/docker/containerd/containerd.toml"


def specification(node: DoctorNode, *, uvm: int = 1511, staged: str = STAGED, kind: str = "nvidia.com/gpu") -> str:
    (node.root / staged.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
    node.write(STAGED.lstrip("/"), "")
    nodes = [{"path": "/dev/nvidiactl", "major": 1510, "minor": 255}, {"path": "/dev/nvidia-uvm", "major": uvm}]
    edits = {"deviceNodes": nodes, "mounts": [{"hostPath": staged, "containerPath": "/usr/lib64/libcuda.so.1"}]}
    device = {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "major": 1510, "minor": 0}]}}
    return json.dumps({"cdiVersion": "0.5.0", "kind": kind, "containerEdits": edits, "devices": [device]})


def enable(node: DoctorNode, unit: str) -> None:
    folder = node.root / "etc/systemd/system/multi-user.target.wants"
    folder.mkdir(exist_ok=True)
    (folder / unit).symlink_to(f"/usr/lib/systemd/system/{unit}")


@pytest.fixture
def docker(node: DoctorNode) -> DoctorNode:
    """Docker 28.5 with its own containerd, the specification, and neither daemon nor guard."""
    node.write(SPECIFICATION, specification(node))
    enable(node, "nri-gpu-cdi.path")
    node.process(700, "containerd", "containerd", "--config", OWN_CONTAINERD)
    shutil.rmtree(node.root / "proc/700/fd")
    node.write(OWN_CONTAINERD.replace("/var/run", "run"), 'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
    node.process(800, "dockerd", "/usr/bin/dockerd")
    (node.root / "proc/800/exe").symlink_to("/usr/bin/dockerd")
    dockerd(node, "28.5.2")
    for path in ("run/nri/nri.sock", "run/nri-gpu-guard/guard.json"):
        node.remove(path)
    return node


def dockerd(node: DoctorNode, version: str) -> None:
    node.write("usr/bin/dockerd", f"#!/bin/sh\necho Docker version {version}, build abc\n").chmod(0o755)


SILENT: Final[dict[str, Any]] = {"status": None, "silence": FileNotFoundError()}


def silent(node: DoctorNode) -> DoctorDocument:
    return node.examine(**SILENT)


def bad(node: DoctorNode) -> list[Finding]:
    return [each for each in silent(node).findings if each.level is not Level.OK]


def test_the_node_of_the_page_is_healthy(docker: DoctorNode) -> None:
    found = silent(docker)
    assert bad(docker) == []
    assert not {"container runtime", "nri-gpu"}.intersection(each.name for each in found.sections)
    assert [each.subject for each in next(each for each in found.sections if each.name == "CDI").findings] == [
        "CDI specification",
        "Docker and CDI",
    ]


def daemon_json(text: str) -> Break:
    return lambda node: node.write("etc/docker/daemon.json", text)


def snap(text: str) -> Break:
    """Docker as a snap, whose settings lie elsewhere, and a file that it does not read."""
    path = "/var/snap/docker/2976/config/daemon.json"

    def change(node: DoctorNode) -> None:
        daemon_json("[")(node)
        node.write(path[1:], text)
        node.process(800, "dockerd", "dockerd", "--exec-root=/run/snap.docker", f"--config-file={path}")
        node.write("proc/800/cgroup", "0::/system.slice/snap.docker.dockerd.service\n")

    return change


def wrong(**changes: str | int) -> Break:
    return lambda node: node.write(SPECIFICATION, specification(node, **changes))  # type: ignore[arg-type]


def older(version: str, text: str = "{}") -> Break:
    def change(node: DoctorNode) -> None:
        dockerd(node, version)
        daemon_json(text)(node)

    return change


def files_of_another_driver(node: DoctorNode) -> None:
    wrong(staged="/var/lib/nri-gpu/cdi/570.1-1/x")(node)
    node.write("var/lib/nri-gpu/cdi/570.1-1/x", "")


THEIRS: Final = """---
cdiVersion: 0.5.0
containerEdits:
  hooks:
  - {hookName: createContainer, path: /usr/bin/nvidia-cdi-hook}
devices:
- containerEdits: {}
  name: "0"
kind: nvidia.com/gpu
"""


def theirs(*paths: str, ours: str = SPECIFICATION) -> Break:
    """NVIDIA's file at these places, and ours somewhere or nowhere."""

    def change(node: DoctorNode) -> None:
        for path in paths:
            node.write(path, THEIRS)
        if ours != SPECIFICATION:
            (node.root / SPECIFICATION).unlink()
        if ours:
            node.write(ours, specification(node))

    return change


BROKEN: dict[str, Break] = {
    "no specification": lambda node: node.remove(SPECIFICATION),
    "an old major": wrong(uvm=1601),
    "an old driver": wrong(staged="/var/lib/nri-gpu/cdi/570.1-1/lib64/libcuda.so.570.1"),
    "an old driver's files, still there": files_of_another_driver,
    "NVIDIA's file beside it": theirs("run/cdi/nvidia.yaml"),
    "NVIDIA's file in the later folder": theirs("run/cdi/nvidia.yaml", ours="etc/cdi/nri-gpu.json"),
    "two files of NVIDIA's in the earlier folder": theirs("etc/cdi/nvidia.yaml", "etc/cdi/old.yaml"),
    "NVIDIA's file instead": theirs("run/cdi/nvidia.yaml", ours=""),
    "a second file without hooks beside it": lambda node: node.write("run/cdi/a.json", specification(node)),
    "CDI off": daemon_json('{"features": {"cdi": false}}'),
    "CDI off in the settings of a snap": snap('{"features": {"cdi": false}}'),
    "no JSON in the settings of a snap": snap("{"),
    "not on by default": older("28.1.1"),
    "another folder": daemon_json('{"cdi-spec-dirs": ["/etc/cdi"]}'),
    "too old": older("24.0.9"),
    "no JSON": daemon_json("{"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_found_with_its_fix(docker: DoctorNode, name: str) -> None:
    BROKEN[name](docker)
    docker.hold("cdi", BROKEN, name, **SILENT)


def test_where_neither_file_counts_nothing_is_said_to_work(docker: DoctorNode) -> None:
    BROKEN["NVIDIA's file beside it"](docker)
    (section,) = (each for each in silent(docker).sections if each.name == "CDI")
    assert [each.level for each in section.findings] == [Level.ERROR]


def test_a_file_in_the_earlier_folder_is_covered(docker: DoctorNode) -> None:
    theirs("etc/cdi/nvidia.yaml")(docker)
    assert not [each for each in bad(docker) if each.subject == "CDI specification"]


def test_switched_on_by_hand(docker: DoctorNode) -> None:
    older("25.0.0", '{"features": {"cdi": true}}')(docker)
    assert bad(docker) == []


ELSEWHERE: dict[str, Break] = {
    "the daemon is enabled": lambda node: enable(node, "nri-gpu.service"),
    "its unit is not installed": lambda node: node.remove("etc/systemd/system/nri-gpu.service"),
    "a kubelet runs": lambda node: node.process(900, "kubelet", "/usr/bin/kubelet"),
    "k3s runs": lambda node: node.process(900, "k3s-server", "/usr/local/bin/k3s"),
}


@pytest.mark.parametrize("broken", ELSEWHERE.values(), ids=ELSEWHERE)
def test_elsewhere_a_dead_daemon_is_an_error(docker: DoctorNode, broken: Break) -> None:
    broken(docker)
    found = silent(docker)
    assert {"container runtime", "nri-gpu", "CDI"} <= {each.name for each in found.sections}
    assert next(each for each in found.findings if each.subject == "daemon").level is Level.ERROR
    assert not any("containerd.toml" in line for each in found.findings for line in (each.meaning, *each.fix))


@pytest.mark.parametrize(
    ("where", "meant"), [("etc/systemd/system", True), ("usr/lib/systemd/system", False)], ids=["ours", "a package's"]
)
def test_a_path_unit_without_a_specification(node: DoctorNode, where: str, meant: bool) -> None:
    node.write(f"{where}/nri-gpu-cdi.path", "")
    assert ("CDI specification" in {each.subject for each in bad(node)}) is meant
    assert ("daemon" in {each.subject for each in bad(node)}) is not meant


def test_what_is_no_specification_of_ours(node: DoctorNode) -> None:
    node.write(f"run/cdi/{FILE_NAME}", specification(node, kind=REQUIRED_KIND))
    hooked = json.loads(specification(node)) | {"containerEdits": {"hooks": [{"hookName": "createContainer"}]}}
    node.write("etc/cdi/nvidia.json", json.dumps(hooked))
    node.write("etc/cdi/broken.json", "{")
    found = silent(node)
    assert "CDI" not in {each.name for each in found.sections}
    assert next(each for each in found.findings if each.subject == "daemon").level is Level.ERROR


def test_a_missing_topology_file(node: DoctorNode) -> None:
    fault = "/etc/nri-gpu/none.toml: No such file or directory"
    status = node.status(inventory_fault=fault, options={"topology": "/etc/nri-gpu/none.toml"})
    finding = node.only(status=status)
    assert (finding.subject, finding.fix[0].startswith("ls -l /etc/nri-gpu/none.toml")) == ("inventory", True)
    assert not any("restart" in line for line in finding.fix)
