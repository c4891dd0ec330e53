"""A fix names the file in which a setting counts, one that is not written anew, and the unit that is there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nri_gpu.doctor.runtimes import container_runtime
from tests.unit.doctor.node import CONFIG, DoctorNode

TOML = "etc/containerd/config.toml"
DROPIN = "etc/containerd/conf.d/99-nvidia.toml"
CRI = '[plugins."io.containerd.cri.v1.runtime".containerd]\n'
OFF = '[plugins."io.containerd.nri.v1.nri"]\ndisable = true\n'
IMPORTING = f'imports = ["/etc/containerd/conf.d/*.toml"]\n{CONFIG}'
RANCHER = "var/lib/rancher/{}/agent/etc/containerd"


def imported(node: DoctorNode, text: str, *, version: str = "2.2.1") -> None:
    node.program(version)
    node.write(TOML, IMPORTING)
    node.write(DROPIN, f"version = 3\n{text}")


def kubelet(node: DoctorNode) -> None:
    node.listen("var/lib/kubelet/device-plugins/kubelet.sock")
    node.write("var/lib/kubelet/config.yaml", "cgroupDriver: systemd\n")


def test_the_issues_drop_in(node: DoctorNode) -> None:
    imported(node, f'{CRI}default_runtime_name = "nvidia"\n')
    fix = node.found(status=None)["default runtime"].fix
    assert fix[0] == f"# in /{DROPIN}, below the CRI plugin's [containerd] table:"
    assert fix[1:] == ('default_runtime_name = "runc"', "systemctl restart containerd    # containers go on running")


def test_each_setting_has_a_file_of_its_own(node: DoctorNode) -> None:
    imported(node, OFF)
    assert node.found(status=None)["NRI"].fix[0].endswith(f" /{DROPIN}")
    imported(node, 'disabled_plugins = ["io.containerd.nri.v1.nri"]\n')
    node.write(TOML, f'disabled_plugins = ["io.containerd.nri.v1.nri"]\n{IMPORTING}')
    fix = node.found(status=None)["NRI"].fix
    assert [line.split(",")[0] for line in fix[:-1]] == [f"# in /{TOML}", f"# in /{DROPIN}"]


def test_the_cgroup_drivers_file(node: DoctorNode) -> None:
    kubelet(node)
    imported(node, CRI.replace("]", ".runtimes.runc.options]") + "SystemdCgroup = false\n")
    assert node.found()["cgroup driver"].fix[0].startswith(f"# in /{DROPIN}, in the options table")


def test_files_of_versions_2_and_3_together(node: DoctorNode) -> None:
    """Before 2.3 the older file's handlers mean nothing: its cgroup driver is no finding, its default is none."""
    kubelet(node)
    systemd = CRI.replace("]", ".runtimes.runc.options]") + "SystemdCgroup = true\n"
    old = systemd.replace("true", "false").replace("cri.v1.runtime", "grpc.v1.cri")
    handler = f'{CRI}default_runtime_name = "nvidia"\n'.replace("cri.v1.runtime", "grpc.v1.cri")
    imported(node, systemd)
    node.write(TOML, IMPORTING.replace("version = 3", "version = 2") + old + handler)
    assert node.found(status=None).keys() == set()
    node.program("2.3.7")
    assert node.found(status=None).keys() >= {"default runtime", "cgroup driver"}


def test_crios_drop_in(node: DoctorNode) -> None:
    node.process(700, "crio", "/usr/bin/crio")
    node.program("1.33.1")
    node.write("etc/crio/crio.conf", "[crio.nri]\nenable_nri = true\n")
    node.write("etc/crio/crio.conf.d/99-off.conf", "[crio.nri]\nenable_nri = false\n")
    assert node.found(status=None)["NRI"].fix[0] == "# in /etc/crio/crio.conf.d/99-off.conf, below [crio.nri]:"


WRITTEN: dict[str, tuple[str, Mapping[str, str], str, str]] = {
    "K3s, a template": (
        RANCHER.format("k3s") + "/config.toml",
        {"": CONFIG},
        "/config-v3.toml.tmpl, behind {{ template",
        "k3s",
    ),
    "K3s, its folder of drop-ins": (
        RANCHER.format("k3s") + "/config.toml",
        {"": f'imports = ["/{RANCHER.format("k3s")}/config-v3.toml.d/*.toml"]\n{CONFIG}'},
        "/config-v3.toml.d/nri-gpu.toml, below",
        "k3s",
    ),
    "RKE2": (RANCHER.format("rke2") + "/config.toml", {"": CONFIG}, "/config-v3.toml.tmpl, behind", "rke2-server"),
    "MicroK8s": (
        "var/snap/microk8s/7/args/containerd.toml",
        {"": CONFIG},
        "/containerd-template.toml,",
        "snap.microk8s",
    ),
    "k0s": (
        "etc/k0s/containerd.toml",
        {"": "# k0s_managed=true\nversion = 3\nimports = ['/run/k0s/*.toml']\n", "run/k0s/containerd-cri.toml": CONFIG},
        "# in /etc/k0s/containerd.d/nri-gpu.toml, below",
        "k0sworker",
    ),
    "k0s, its user's": ("etc/k0s/containerd.toml", {"": CONFIG}, "# in /etc/k0s/containerd.toml, below", "k0sworker"),
}


@pytest.mark.parametrize(("config", "files", "words", "unit"), WRITTEN.values(), ids=WRITTEN)
def test_a_file_that_is_written_anew_is_not_named(
    node: DoctorNode, config: str, files: Mapping[str, str], words: str, unit: str
) -> None:
    node.process(700, "containerd", "containerd", "--config", f"/{config}")
    for path, text in files.items():
        node.write(path or config, text.replace("disable = false", "disable = true"))
    fix = node.found(status=None)["NRI"].fix
    assert words in fix[0]
    assert fix[-1].startswith(f"systemctl restart {unit}")


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("etc/systemd/system/k3s-agent.service", "k3s-agent"),
        ("usr/local/lib/systemd/system/k3s-agent.service", "k3s-agent"),
        ("proc/700/cgroup", "k3s-gpu"),
    ],
)
def test_the_unit_is_one_that_is_there(node: DoctorNode, path: str, unit: str) -> None:
    node.process(700, "containerd", "containerd", "-c", f"/{RANCHER.format('k3s')}/config.toml")
    node.write(path, "0::/system.slice/k3s-gpu.service/containerd\n")
    runtime = container_runtime(node.seen)
    assert runtime
    assert runtime.service == unit


@pytest.mark.parametrize("unit", ["k3s", "rke2-agent"])
def test_another_data_dir(node: DoctorNode, unit: str) -> None:
    """`--data-dir /mnt/disk`: the file is written anew there, too."""
    node.process(700, "containerd", "containerd", "-c", "/mnt/disk/agent/etc/containerd/config.toml")
    node.write("mnt/disk/agent/etc/containerd/config.toml", CONFIG.replace("false", "true"))
    node.write("proc/700/cgroup", f"0::/system.slice/{unit}.service\n")
    found = container_runtime(node.seen)
    assert found
    assert found.distribution
    assert found.distribution.units.count(unit) == 1
    assert "/config-v3.toml.tmpl, behind" in node.found(status=None)["NRI"].fix[0]


@pytest.mark.parametrize(
    ("config", "unit"),
    [
        (f"{RANCHER.format('rke2')}/config.toml", "rke2-server"),
        ("var/snap/microk8s/7/args/containerd.toml", "snap.microk8s.daemon-kubelite"),
        ("etc/k0s/containerd.toml", "k0sworker"),
    ],
)
def test_its_kubelet_is_in_a_unit_of_its_own(node: DoctorNode, config: str, unit: str) -> None:
    node.process(700, "containerd", "containerd", "-c", f"/{config}")
    node.write(config, CONFIG)
    node.dead_socket("var/lib/kubelet/device-plugins/kubelet.sock")
    assert node.found()["kubelet"].fix == (f"systemctl restart {unit}    # pods go on running",)
    node.write("var/lib/kubelet/device-plugins/kubelet_internal_checkpoint", "{")
    assert node.found()["kubelet checkpoint"].fix[-1].startswith(f"systemctl restart {unit}")


def k3s(node: DoctorNode, name: str = "k3s") -> str:
    """A node that K3s or RKE2 made, and its file. Its base template has the table of the default runtime."""
    config = f"{RANCHER.format(name)}/config.toml"
    node.process(700, "containerd", "containerd", "-c", f"/{config}")
    node.write(config, f'{CONFIG}{CRI}default_runtime_name = "nvidia"\n{CRI.replace("]", ".runtimes.nvidia]")}')
    return config


@pytest.mark.parametrize("name", ["k3s", "rke2"])
@pytest.mark.parametrize("where", ["config.yaml", "config.yaml.d/nvidia.yaml", "config.yaml.d/GPU.Yml"])
def test_a_default_runtime_of_their_own_configuration_is_taken_out_there(
    node: DoctorNode, name: str, where: str
) -> None:
    k3s(node, name)
    node.write(f"etc/rancher/{name}/{where}", 'token: hunter2\ndefault-runtime: "nvidia"\n')
    fix = node.found(status=None)["default runtime"].fix
    assert fix[:2] == (f"# in /etc/rancher/{name}/{where}, remove the line:", 'default-runtime: "nvidia"')
    assert fix[2].startswith(f"systemctl restart {name}")
    assert "hunter2" not in str(fix)


def test_or_out_of_the_command(node: DoctorNode) -> None:
    k3s(node)
    (line, *_) = node.found(status=None)["default runtime"].fix
    assert (
        line
        == "# remove default-runtime from /etc/rancher/k3s/config.yaml, or --default-runtime from the command of k3s"
    )


def test_their_kubelet_reads_another_file(node: DoctorNode) -> None:
    """A file of kubeadm's is left; their base template has the table of runc's options."""
    kubelet(node)
    config = k3s(node)
    node.write(config, CONFIG + CRI.replace("]", ".runtimes.runc.options]") + "SystemdCgroup = false\n")
    assert "cgroup driver" not in node.found()


def test_a_template_of_the_users_with_a_default_runtime_is_changed(node: DoctorNode) -> None:
    template = k3s(node).replace("config.toml", "config-v3.toml.tmpl")
    node.write(template, 'default_runtime_name = "nvidia"\n')
    assert node.found(status=None)["default runtime"].fix[0].startswith(f"# in /{template}")


def test_a_default_runtime_without_a_toolkit(node: DoctorNode) -> None:
    """K3s writes a table for each of NVIDIA's programs that it finds."""
    config = k3s(node)
    node.write(config, f'{CONFIG}{CRI}default_runtime_name = "nvidia"\n')
    node.write("etc/rancher/k3s/config.yaml", "default-runtime: nvidia\n")
    found = node.found(status=None)["CRI"]
    assert "has no table below runtimes" in found.meaning
    assert found.fix[0].startswith("# in /etc/rancher/k3s/config.yaml, remove")
    assert found.fix[-1].startswith("systemctl restart k3s")


def test_a_drop_in_would_hide_a_table_of_the_same_plugin_before_2_0(node: DoctorNode) -> None:
    config = k3s(node)
    node.program("1.7.27")
    nri = OFF.replace("true", "false")
    node.write(config, f'version = 2\nimports = ["/{config}.d/*.toml"]\n{nri}plugin_request_timeout = "9ms"\n')
    assert "/config.toml.tmpl, behind" in node.found(status=None)["NRI timeouts"].fix[0]
    node.write(config, f'version = 2\nimports = ["/{config}.d/*.toml"]\n')
    assert f"# in /{config}.d/nri-gpu.toml, below" in node.found(status=None)["NRI"].fix[0]


@pytest.mark.parametrize("sign", ["etc/eks/nodeadm.d/a.yaml", "etc/systemd/system/nodeadm-config.service"])
def test_a_file_that_is_written_anew_at_boot(node: DoctorNode, sign: str) -> None:
    node.write(TOML, CONFIG.replace("false", "true"))
    assert "user data" not in str(node.found(status=None)["NRI"].fix)
    node.write(sign, "")
    fix = node.found(status=None)["NRI"].fix
    assert fix[0].startswith(f"# in /{TOML}, below")
    assert "in the user data, spec.containerd.config of NodeConfig: EKS writes that file anew at each boot" in fix[2]
    assert fix[3].startswith("systemctl restart containerd ")
    node.write(TOML, 'version = 3\ndisabled_plugins = ["io.containerd.nri.v1.nri"]\n')
    assert "user data" in node.found(status=None)["NRI"].fix[1]
    for text in ("version = 3\nroot = 1\n", "version = \n"):
        node.write(TOML, text)
        assert "user data" in node.found()["runtime configuration"].fix[1]


def test_canonicals_units(node: DoctorNode) -> None:
    """Its containerd reads the file that everybody's reads."""
    node.write("proc/700/cgroup", "0::/system.slice/snap.k8s.containerd.service\n")
    node.write(TOML, CONFIG.replace("false", "true"))
    node.dead_socket("var/lib/kubelet/device-plugins/kubelet.sock")
    found = node.found(status=None)
    assert found["kubelet"].fix == ("systemctl restart snap.k8s.kubelet    # pods go on running",)
    assert found["NRI"].fix[-1].startswith("systemctl restart snap.k8s.containerd")
    assert found["NRI"].fix[0].startswith(f"# in /{TOML}, below")
    node.program("1.7.24")
    node.remove(TOML)
    assert node.found(status=None)["NRI"].fix[1].startswith(f"# in /{TOML}, below")


def test_a_kubelet_that_runs_names_its_unit(node: DoctorNode) -> None:
    node.process(701, "kubelet", "/snap/kubelet-eks/1/kubelet")
    node.write("proc/701/cgroup", "0::/system.slice/snap.kubelet-eks.daemon.service\n")
    node.dead_socket("var/lib/kubelet/device-plugins/kubelet.sock")
    assert node.found()["kubelet"].fix == ("systemctl restart snap.kubelet-eks.daemon    # pods go on running",)
