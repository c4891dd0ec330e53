"""NVIDIA's own injection is found in every form that it is installed in, and nothing else is taken for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_gpu.host.components import Component, ComponentKind, injectors

HOOKED = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits:\n  hooks:\n  - hookName: createContainer\n"
JSON_HOOKED = '{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","containerEdits":{"hooks":[{"a":1}]}}'
FOUND = {
    "the runtime's configuration": ("etc/nvidia-container-runtime/config.toml", "", ComponentKind.RUNTIME),
    "the hook": ("usr/bin/nvidia-container-runtime-hook", "", ComponentKind.RUNTIME),
    "the operator's toolkit": ("usr/local/nvidia/toolkit/nvidia-container-runtime", "", ComponentKind.RUNTIME),
    "podman's hook": (
        "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
        '{"hook": {"path": "/usr/bin/nvidia-container-toolkit"}}',
        ComponentKind.RUNTIME,
    ),
    "containerd's runtime": (
        "etc/containerd/config.toml",
        'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\n',
        ComponentKind.RUNTIME,
    ),
    "containerd's drop-in": (
        "etc/containerd/conf.d/99-nvidia.toml",
        'BinaryName = "/x/nvidia-container-runtime"\n',
        ComponentKind.RUNTIME,
    ),
    "a specification": ("etc/cdi/nvidia.yaml", HOOKED, ComponentKind.SPECIFICATION),
    "the device plugin's": ("var/run/cdi/k8s.json", JSON_HOOKED, ComponentKind.SPECIFICATION),
}
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


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="latin-1")


@pytest.mark.parametrize(("name", "text", "kind"), FOUND.values(), ids=FOUND)
def test_it_is_found(tmp_path: Path, name: str, text: str, kind: ComponentKind) -> None:
    write(tmp_path, name, text)
    assert tuple(injectors(tmp_path)) == (Component(kind, f"/{name}"),)


@pytest.mark.parametrize(("name", "text"), NOTHING.values(), ids=NOTHING)
def test_it_is_none(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    assert tuple(injectors(tmp_path)) == ()


def test_a_host_without_any_folder(tmp_path: Path) -> None:
    assert tuple(injectors(tmp_path / "none")) == ()


def test_a_fifo_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:

    (tmp_path / "etc/cdi").mkdir(parents=True)
    os.mkfifo(tmp_path / "etc/cdi/nvidia.yaml")
    assert tuple(injectors(tmp_path)) == ()
