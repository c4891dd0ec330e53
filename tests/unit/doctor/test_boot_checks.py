"""The order at boot: after the runtime and before the kubelet, whatever a distribution calls their units."""

from __future__ import annotations

import pytest

from nri_gpu.domain.finding import Finding, Level
from tests.support.unit_file import OURS
from tests.unit.doctor.node import CONFIG, K3S, DoctorNode

UNITS = ("nri-gpu.service", "nri-gpu-guard.service")
SNAPS = OURS.with_name("nri-gpu.service.d") / "snaps.conf"
MICROK8S = "var/snap/microk8s/current/args/containerd.toml"


@pytest.fixture
def booted(node: DoctorNode) -> DoctorNode:
    """A node with our own units, both enabled, and a kubeadm's kubelet."""
    wants = node.root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    for unit in UNITS:
        node.write(f"etc/systemd/system/{unit}", OURS.with_name(unit).read_text())
        (wants / unit).symlink_to(f"../{unit}")
    node.write("proc/700/cgroup", "0::/system.slice/containerd.service\n")
    kubelet(node, "kubelet", "kubelet")
    return node


def kubelet(node: DoctorNode, name: str, unit: str) -> None:
    node.process(900, name, f"/usr/bin/{name}")
    node.write("proc/900/cgroup", f"0::/system.slice/{unit}.service\n")


def found(node: DoctorNode) -> Finding:
    (finding,) = (each for each in node.examine().findings if each.subject == "order at boot")
    return finding


def drop_in(node: DoctorNode, text: str, *units: str) -> None:
    for unit in units:
        node.write(f"etc/systemd/system/{unit}.d/order.conf", text)


def microk8s(node: DoctorNode) -> None:
    node.process(700, "containerd", "containerd", "--config", f"/{MICROK8S}")
    node.write(MICROK8S, CONFIG)
    node.write("proc/700/cgroup", "0::/system.slice/snap.microk8s.daemon-containerd.service\n")
    kubelet(node, "kubelite", "snap.microk8s.daemon-kubelite")


def k3s(node: DoctorNode) -> None:
    node.process(700, "containerd", "containerd", "-c", f"/{K3S}")
    node.write(K3S, CONFIG)
    node.write("proc/700/cgroup", "0::/system.slice/k3s.service\n")
    kubelet(node, "k3s-server", "k3s")


def test_a_kubeadm_nodes_kubelet_waits(booted: DoctorNode) -> None:
    assert found(booted).level is Level.OK


def test_a_kubelet_of_another_name_waits_with_the_drop_in_alone(booted: DoctorNode) -> None:
    microk8s(booted)
    late = found(booted)
    assert late.level is Level.WARNING
    assert (
        "snap.microk8s.daemon-kubelite.service does not wait for nri-gpu.service, nri-gpu-guard.service" in late.meaning
    )
    assert "After=snap.microk8s.daemon-containerd.service" in late.fix
    drop_in(booted, SNAPS.read_text(), "nri-gpu.service")
    assert "does not wait for nri-gpu-guard.service:" in found(booted).meaning
    drop_in(booted, SNAPS.read_text(), *UNITS)
    assert found(booted).level is Level.OK


def test_the_lines_of_the_fix_are_enough(booted: DoctorNode) -> None:
    kubelet(booted, "kubelet", "our-kubelet")
    lines = [line for line in found(booted).fix if not line.startswith(("#", "systemctl"))]
    drop_in(booted, "\n".join(lines), *UNITS)
    assert found(booted).level is Level.OK


OURS_ALL = " ".join(UNITS)
# Drop-ins of an order: file -> text. `{unit}`: each unit of ours.
ORDERED: dict[str, dict[str, str]] = {
    "blanks": {"etc/systemd/system/{unit}.d/a.conf": "[Unit]\n Before = our-kubelet.service\n"},
    "a line that goes on": {
        "etc/systemd/system/{unit}.d/a.conf": "[Unit]\nBefore=a.service \\\n  our-kubelet.service\n"
    },
    "a package's": {"usr/lib/systemd/system/{unit}.d/a.conf": "[Unit]\nBefore=our-kubelet.service\n"},
    "the kubelet's unit": {"etc/systemd/system/our-kubelet.service": f"[Unit]\nAfter=network.target {OURS_ALL}\n"},
    "the kubelet's drop-in": {"run/systemd/system/our-kubelet.service.d/a.conf": f"[Unit]\nAfter={OURS_ALL}\n"},
}
UNORDERED: dict[str, dict[str, str]] = {
    "a comment": {"etc/systemd/system/{unit}.d/a.conf": "[Unit]\n#Before=our-kubelet.service\n"},
    "hidden by one of the same name": {
        "usr/lib/systemd/system/{unit}.d/a.conf": "[Unit]\nBefore=our-kubelet.service\n",
        "etc/systemd/system/{unit}.d/a.conf": "[Unit]\n",
    },
    "the wrong way": {"etc/systemd/system/our-kubelet.service": f"[Unit]\nBefore={OURS_ALL}\n"},
}


@pytest.mark.parametrize("name", [*ORDERED, *UNORDERED])
def test_an_order_is_read_as_systemd_reads_it(booted: DoctorNode, name: str) -> None:
    kubelet(booted, "kubelet", "our-kubelet")
    for path, text in (ORDERED | UNORDERED)[name].items():
        for unit in UNITS:
            booted.write(path.format(unit=unit), text)
    assert found(booted).level is (Level.OK if name in ORDERED else Level.WARNING)


def test_one_unit_for_both_cannot_be_ordered(booted: DoctorNode) -> None:
    k3s(booted)
    finding = found(booted)
    assert finding.level is Level.OK
    assert "k3s.service runs both runtime and kubelet" in finding.meaning


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("nri-gpu-guard.service.d/a.conf", "Before=network.target k3s.service"),
        ("k3s.service.d/a.conf", "After=nri-gpu-guard.service"),
    ],
)
def test_a_unit_for_both_that_waits_for_ours_stands_still(booted: DoctorNode, file: str, line: str) -> None:
    k3s(booted)
    booted.write(f"etc/systemd/system/{file}", f"[Unit]\n{line}\n")
    held = found(booted)
    assert held.level is Level.ERROR
    assert held.meaning.startswith("k3s.service waits for nri-gpu-guard.service, and nri-gpu for the runtime in")


@pytest.mark.parametrize(
    "missing", [("proc/900/comm",), tuple(f"etc/systemd/system/multi-user.target.wants/{unit}" for unit in UNITS)]
)
def test_without_a_kubelet_or_units_of_ours_nothing_is_ordered(booted: DoctorNode, missing: tuple[str, ...]) -> None:
    for path in missing:
        booted.remove(path)
    assert "order at boot" not in {each.subject for each in booted.examine().findings}
