"""Runtimes that have no NRI, of which nobody knows whether they have, or that their distribution cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.doctor.runtime_settings import NRI
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.domain.finding import Level
from tests.unit.doctor.node import CONFIG, CONTAINERD, DOCKERS, K3S, TOML, DoctorNode, stopped

MICROK8S = "var/snap/microk8s/7001/args/containerd.toml"


def brought(node: DoctorNode, program: str, config: str, version: str) -> None:
    """A distribution's containerd instead of the node's, without an NRI socket."""
    node.process(700, "containerd", program, "--config", f"/{config}")
    node.remove("proc/700/exe")
    (node.root / "proc/700/exe").symlink_to(program)
    (node.root / program.lstrip("/")).parent.mkdir(parents=True)
    node.write(program.lstrip("/"), CONTAINERD.format(version=version)).chmod(0o755)
    node.write(config, "version = 2\n")
    node.remove("run/nri/nri.sock")
    (node.root / "proc/700/fd/2").unlink()


BROUGHT = {
    "MicroK8s": ("/snap/microk8s/7001/bin/containerd", MICROK8S),
    "k0s": ("/var/lib/k0s/bin/containerd", "etc/k0s/containerd.toml"),
}


@pytest.mark.parametrize(("program", "config"), BROUGHT.values(), ids=BROUGHT)
def test_a_program_says_that_nri_was_never_there(node: DoctorNode, program: str, config: str) -> None:
    brought(node, program, config, "1.6.36")
    finding = node.only(status=None)
    assert "containerd 1.6.36 has no NRI: nri-gpu needs 1.7 or newer" in finding.meaning
    assert finding.fix[0].startswith("# upgrade ")


def test_or_never_on(node: DoctorNode) -> None:
    brought(node, *BROUGHT["MicroK8s"], "1.7.25")
    finding = node.only(status=None)
    assert "NRI is off, as by default before 2" in finding.meaning
    assert "/containerd-template.toml, below" in finding.fix[0]


@pytest.mark.parametrize(
    ("release", "version", "table"),
    [("1.7.24", "", "nri"), ("1.7.24", "version = 2\n", NRI), ("2.1.9", "", NRI)],
)
def test_the_fix_names_the_table_that_is_read(node: DoctorNode, release: str, version: str, table: str) -> None:
    """A file without a version, as Docker's package brings it, has another name for it before 2.0."""
    node.program(release)
    node.write(TOML, f'{version}[plugins."{table}"]\ndisable=true\n')
    assert node.found(status=None)["NRI"].fix[0] == f'# in /{TOML}, below [plugins."{table}"]:'


@pytest.mark.parametrize("mode", [0o777, None])
def test_without_a_version_it_is_not_mentioned(node: DoctorNode, mode: int | None) -> None:
    """Its program may not be run: others can write it, or it lies elsewhere."""
    brought(node, *(BROUGHT["MicroK8s"] if mode else ("/home/me/containerd", MICROK8S)), "1.6.36")
    if mode:
        (node.root / "snap/microk8s/7001/bin/containerd").chmod(mode)
    finding = node.only(status=None)
    assert f"NRI is not mentioned in /{MICROK8S}, and off by default before 2.0" in finding.meaning
    assert finding.level is Level.ERROR


def test_a_k3s_whose_file_is_not_toml(node: DoctorNode) -> None:
    stopped(node)
    node.remove(TOML)
    node.remove("run/nri/nri.sock")
    node.process(900, "k3s-server", "/usr/local/bin/k3s server", "--token=hunter2")
    node.write("etc/systemd/system/k3s.service", "")
    node.write(K3S, "version = \n")
    found = node.found(status=None)
    which = found["container runtime"]
    assert which.level is Level.ERROR
    assert f"K3s (pid 900) runs, but its containerd does not, because /{K3S} is not TOML" in which.meaning
    assert which.fix[0].startswith("journalctl -u k3s")
    assert found["runtime configuration"].fix[0].startswith(f"# fix /{Path(K3S).parent}/config.toml.tmpl")
    assert not any("enable --now" in line for each in found.values() for line in each.fix)
    assert "hunter2" not in repr(container_runtime(node.seen))


def test_a_k3s_whose_file_lies_elsewhere(node: DoctorNode) -> None:
    stopped(node)
    node.remove(TOML)
    node.process(900, "k3s-server", "/usr/local/bin/k3s server")
    which = node.found(status=None)["container runtime"]
    assert "K3s (pid 900) runs, but its containerd does not" in which.meaning
    assert which.fix[0].startswith("journalctl -u k3s")


@pytest.mark.parametrize("template", ["config.toml.tmpl", "config-v3.toml.tmpl"])
@pytest.mark.parametrize("runs", [True, False])
def test_the_template_that_is_there_is_to_be_mended(node: DoctorNode, template: str, *, runs: bool) -> None:
    """What it makes is not TOML, so nothing tells its version."""
    node.process(700, *(("containerd", "containerd", "-c", f"/{K3S}") if runs else ("k3s-server", "k3s server")))
    node.write(K3S, "version = \n")
    node.write(K3S.replace("config.toml", template), '{{ template "base" . }}\nversion = \n')
    found = node.examine(status=None)
    (fault,) = (each for each in found.findings if each.subject == "runtime configuration")
    assert fault.fix[0].startswith(f"# fix /{Path(K3S).parent}/{template}, behind")
    assert not any("no file at" in each.meaning for each in found.findings)


def test_a_file_that_is_there_is_not_written_over(node: DoctorNode) -> None:
    node.write(TOML, "version = \n")
    node.listen("var/lib/kubelet/device-plugins/kubelet.sock")
    node.write("var/lib/kubelet/config.yaml", "cgroupDriver: systemd\n")
    found = node.found(status=None)
    assert {"runtime configuration", "cgroup driver"} <= found.keys()
    assert not any("config default" in line for each in found.values() for line in each.fix)


def test_beside_dockers_containerd(node: DoctorNode) -> None:
    node.write(TOML, DOCKERS)
    (node.root / "proc/700/fd/2").unlink()
    node.process(900, "rke2", "/usr/local/bin/rke2 server")
    node.write(K3S.replace("k3s", "rke2"), "version = \n")
    found = node.found(status=None)
    assert "RKE2 (pid 900) runs, but its containerd does not" in found["container runtime"].meaning
    assert "CRI" not in found


def test_a_k3s_that_is_stopped_beside_dockers_containerd(node: DoctorNode) -> None:
    node.write(TOML, DOCKERS)
    (node.root / "proc/700/fd/2").unlink()
    node.write("etc/systemd/system/k3s-agent.service", "")
    node.write(K3S, CONFIG)
    found = node.found(status=None)
    assert found["container runtime"].fix == ("systemctl enable --now k3s-agent",)
    assert "CRI" not in found


def test_a_leftover_file_of_k3s_is_nobodys(node: DoctorNode) -> None:
    stopped(node)
    node.write(K3S, "version = \n")
    assert "containerd 2.1.9 is configured but does not run" in node.found()["container runtime"].meaning
