"""What `check` finds of NVIDIA's own tools and advises about them, and silence once the policy provides for them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nri_gpu.host.components import Component, ComponentKind, components, node_advice
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.model import Disarm, DriverSettings, EnvironmentSettings, Policy, VisibleDevices

IDLE = EnvironmentSettings(visible_devices=VisibleDevices.VOID, disarm=Disarm.ALL)
THEIRS = KubeletSettings(enabled=True, resource="example.com/gpu", inject_for=Globs(("nvidia.com/*",)))

HOOKED = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits:\n  hooks:\n  - hookName: createContainer\n"
JSON_HOOKED = '{"cdiVersion":"0.5.0","kind":"management.nvidia.com/gpu","containerEdits":{"hooks":[{"a":1}]}}'
HOOK = '{"hook": {"path": "/usr/bin/nvidia-container-toolkit"}}'
CONTAINERD = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\n'
RUNTIMES = {
    "etc/nvidia-container-runtime/config.toml": "",
    "usr/bin/nvidia-container-runtime-hook": "",
    "usr/local/nvidia/toolkit/nvidia-container-runtime": "",  # the operator's
    "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": HOOK,  # podman's
    "etc/containerd/config.toml": CONTAINERD,
    "etc/containerd/conf.d/99-nvidia.toml": 'BinaryName = "/x/nvidia-container-runtime"\n',
}
SPECIFICATIONS = {"etc/cdi/nvidia.yaml": HOOKED, "var/run/cdi/k8s.json": JSON_HOOKED}
NOTHING = {
    "a commented runtime": ("etc/containerd/config.toml", "# runtimes.nvidia: nvidia-container-runtime\n"),
    "another runtime": ("etc/containerd/config.toml", "[runtimes.nvidiax]\n"),
    "a specification without hooks": ("etc/cdi/nri-gpu.json", '{"kind": "nvidia.com/gpu", "devices": []}'),
    "an empty list of hooks": ("etc/cdi/a.json", '{"kind": "nvidia.com/gpu", "containerEdits": {"hooks": []}}'),
    "another vendor's": ("etc/cdi/a.yaml", HOOKED.replace("nvidia.com", "notnvidia.com")),
    "an editor's copy": ("etc/cdi/nvidia.yaml~", HOOKED),
    "a folder": ("etc/cdi/nvidia.yaml/x", ""),
    "bytes": ("etc/cdi/nvidia.yaml", "\x80\x81"),
}


def said(policy: Policy, root: Path) -> tuple[str, ...]:
    return tuple(each.meaning for each in node_advice(policy, root))


def write(root: Path, *names: str, text: str = "") -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="latin-1")
    return root


def listen(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.fixture
def plugin(folder: Path) -> Path:
    """A node with NVIDIA's device plugin."""
    listen(folder / "var/lib/kubelet/device-plugins/nvidia-gpu.sock")
    return folder


@pytest.mark.parametrize(("name", "text"), [*RUNTIMES.items(), *SPECIFICATIONS.items()])
def test_injectors_are_found(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text=text)
    kind = ComponentKind.RUNTIME if name in RUNTIMES else ComponentKind.SPECIFICATION
    assert tuple(components(tmp_path)) == (Component(kind, f"/{name}"),)


@pytest.mark.parametrize(("name", "text"), NOTHING.values(), ids=NOTHING)
def test_nothing_else_is_taken_for_one(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text=text)
    assert tuple(components(tmp_path)) == ()
    assert said(Policy(), tmp_path) == ()


def test_a_fifo_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "etc/cdi").mkdir(parents=True)
    os.mkfifo(tmp_path / "etc/cdi/nvidia.yaml")
    assert tuple(components(tmp_path)) == ()


def test_files_and_sockets_of_others_are_no_allocators(folder: Path) -> None:
    write(folder, "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
    write(folder, "var/lib/kubelet/device-plugins/nvidia-gpu.sock")  # a file is no socket
    listen(folder / "var/lib/kubelet/device-plugins/kubelet.sock")
    listen(folder / "var/lib/kubelet/device-plugins/nri-gpu-gpu-1a2b3c4d.sock")
    write(folder, "var/run/cdi/nri-gpu.json", text='{"kind": "nvidia.com/gpu"}')
    (folder / "run/nvidia/driver").mkdir(parents=True)
    (folder / "run/nvidia/validations").mkdir()
    assert tuple(components(folder)) == ()


def test_device_plugins_are_found_by_their_sockets(folder: Path) -> None:
    for name in ("nvidia-gpu.sock", "nvidia-mig-1g.10gb.sock"):
        listen(folder / "mnt/kubelet/device-plugins" / name)
    plugins = "/mnt/kubelet/device-plugins"
    assert tuple(components(folder, plugins)) == (
        Component(ComponentKind.DEVICE_PLUGIN, f"{plugins}/nvidia-gpu.sock", "nvidia.com/gpu"),
        Component(ComponentKind.DEVICE_PLUGIN, f"{plugins}/nvidia-mig-1g.10gb.sock", "nvidia.com/mig-1g.10gb"),
    )
    assert tuple(components(folder)) == ()


def test_a_runtime_that_would_serve_a_container_twice(tmp_path: Path) -> None:
    write(tmp_path, "usr/bin/nvidia-container-runtime", "etc/nvidia-container-runtime/config.toml")
    twice, past = said(Policy(), tmp_path)
    assert 'visible_devices = "void"' in twice
    assert "(/etc/nvidia-container-runtime/config.toml, /usr/bin/nvidia-container-runtime)" in twice
    assert 'disarm = "all"' in past
    assert said(Policy(environment=IDLE), tmp_path) == ()


def test_specifications_with_hooks(tmp_path: Path) -> None:
    names = [f"etc/cdi/{number}.yaml" for number in range(5)]
    write(tmp_path, *names, text="kind: nvidia.com/gpu\nhooks:\n- x\n")
    (only,) = said(Policy(environment=IDLE), tmp_path)
    assert "(/etc/cdi/0.yaml, /etc/cdi/1.yaml, /etc/cdi/2.yaml and 2 more)" in only
    assert "nri-gpu cdi generate" in only


PLUGINS = {
    "injected for by nobody": (Policy(), 'kubelet.inject_for = ["nvidia.com/gpu"]'),
    "of our name": (Policy(kubelet=KubeletSettings(enabled=True)), "set kubelet.resource to another name"),
    "injected for": (Policy(kubelet=THEIRS), None),
}


@pytest.mark.parametrize(("policy", "words"), PLUGINS.values(), ids=PLUGINS)
def test_nvidias_device_plugin(plugin: Path, policy: Policy, words: str | None) -> None:
    found = said(policy, plugin)
    assert len(found) == (words is not None)
    assert all("serves nvidia.com/gpu (/var/lib/kubelet/device-plugins/nvidia-gpu.sock)" in each for each in found)
    assert all(words in each for each in found if words)


def test_nvidias_device_plugin_by_cdi(plugin: Path) -> None:
    write(plugin, "var/run/cdi/dp.json", text='{"kind": "k8s.device-plugin.nvidia.com/gpu"}')
    (only,) = said(Policy(), plugin)
    assert "by CDI: nri-gpu does not inject into its containers" in only


def test_a_disarmed_variable_of_the_device_plugins(plugin: Path) -> None:
    _, taken = said(Policy(environment=IDLE), plugin)
    assert "removes the variable by which NVIDIA's device plugin gives GPUs" in taken
    assert said(Policy(environment=IDLE, kubelet=THEIRS), plugin) == ()


def test_the_gpu_operator_and_its_driver(tmp_path: Path) -> None:
    write(tmp_path, "run/nvidia/validations/driver-ready", "run/nvidia/driver/usr/bin/nvidia-smi")
    driver, operator = said(Policy(), tmp_path)
    assert "set driver.root to that" in driver
    assert "/run/nvidia/driver" in driver
    assert "docs/kubernetes.md" in operator
    placed = Policy(driver=DriverSettings(root="/run/nvidia/driver"))
    assert said(placed, tmp_path) == (operator,)


def test_a_dra_driver(folder: Path) -> None:
    (folder / "var/lib/kubelet/plugins/gpu.nvidia.com").mkdir(parents=True)
    listen(folder / "var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock")
    write(folder, "var/run/cdi/k8s.gpu.nvidia.com-claim.json", text='{"kind": "k8s.gpu.nvidia.com/claim"}')
    assert [each.kind for each in components(folder)] == [ComponentKind.DRA] * 3
    (only,) = said(Policy(), folder)
    assert "DRA driver serves claims" in only
    assert "[[pool]]" in only
