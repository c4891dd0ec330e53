"""Finds other components on this host that inject or allocate NVIDIA GPUs. Changes nothing.

What cannot be read is passed over, since this is only used for advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.system.storage import text_of


class ComponentKind(StrEnum):
    """What was found, which decides the advice."""

    RUNTIME = "runtime"  # NVIDIA's runtime or its hook, which obeys NVIDIA_VISIBLE_DEVICES
    SPECIFICATION = "specification"  # a CDI specification of NVIDIA devices that has hooks
    DEVICE_PLUGIN = "device plugin"  # NVIDIA's, or one with its names, such as HAMi's
    DEVICE_PLUGIN_CDI = "device plugin's CDI"  # it answers CDI devices, so the container runtime injects
    OPERATOR = "GPU Operator"
    OPERATOR_DRIVER = "GPU Operator's driver"  # the tree of a driver container
    DRA = "DRA driver"


class Component(Struct, frozen=True):
    """One component. path: on the host, as found. resource: of a device plugin."""

    kind: ComponentKind
    path: str
    resource: str = ""


_FOLDERS: Final = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "opt/nvidia/toolkit")
_PROGRAMS: Final = ("nvidia-container-runtime", "nvidia-container-runtime-hook")
_FILES: Final = (
    "etc/nvidia-container-runtime/config.toml",
    *(f"{folder}/{name}" for folder in _FOLDERS for name in _PROGRAMS),
)
# Where Podman and CRI-O look for hooks, and containerd for its runtimes (containers/common docs; containerd docs).
_HOOK_FOLDERS: Final = ("usr/share/containers/oci/hooks.d", "etc/containers/oci/hooks.d")
_CONTAINERD: Final = ("etc/containerd", "etc/containerd/conf.d")
_CDI_FOLDERS: Final = ("etc/cdi", "var/run/cdi")
_CDI_SUFFIXES: Final = (".yaml", ".yml", ".json")
# NVIDIA/k8s-device-plugin: internal/plugin/server.go; a socket has the part of the resource's name behind the slash.
_PLUGIN_SOCKETS: Final = "nvidia-*.sock"
_PLUGIN_CDI: Final = "k8s.device-plugin.nvidia.com"
# NVIDIA/gpu-operator: the status files of its validator, and the tree of its driver container.
_VALIDATIONS: Final = "run/nvidia/validations"
_DRIVER_TREE: Final = "run/nvidia/driver"
_DRA: Final = ("gpu.nvidia.com", "compute-domain.nvidia.com")
_DRA_CDI: Final = "k8s.gpu.nvidia.com"

_FILES_MAX: Final = 64  # of one folder
_TEXT_MAX: Final = 1 << 20  # bytes of one file; a specification of a full node has some 50 kB
_RUNTIME: Final = re.compile(r"nvidia-container-runtime|\bruntimes\.[\"']?nvidia\b")
_NVIDIA_KIND: Final = re.compile(r"""\bkind["']?\s*:\s*["']?[\w.-]*\bnvidia\.com/""")
_HOOKS: Final = re.compile(r"""\bhooks["']?\s*:\s*(?!\s*(?:\[\s*\]|null|~))""")


def injectors(root: Path = Path("/")) -> Iterator[Component]:
    """NVIDIA's runtimes and hooks below `root`, and CDI specifications with hooks."""
    for name in _FILES:
        if _is_file(root / name):
            yield Component(ComponentKind.RUNTIME, f"/{name}")
    for path in _files(root, _HOOK_FOLDERS, (".json",)):
        if "nvidia-container-" in _text(path):
            yield Component(ComponentKind.RUNTIME, _shown(root, path))
    for path in _files(root, _CONTAINERD, (".toml",)):
        if _RUNTIME.search("\n".join(line.partition("#")[0] for line in _text(path).splitlines())):
            yield Component(ComponentKind.RUNTIME, _shown(root, path))
    for path in _files(root, _CDI_FOLDERS, _CDI_SUFFIXES):
        text = _text(path)
        if _NVIDIA_KIND.search(text) and _HOOKS.search(text):
            yield Component(ComponentKind.SPECIFICATION, _shown(root, path))


def allocators(
    root: Path = Path("/"), device_plugins: str = "/var/lib/kubelet/device-plugins", kubelet: str = "/var/lib/kubelet"
) -> Iterator[Component]:
    """NVIDIA's device plugin, GPU Operator and DRA driver below `root`.

    device_plugins: the kubelet's folder for their sockets. kubelet: its root folder.
    """
    for path in _matching(root / device_plugins.strip("/"), _PLUGIN_SOCKETS):
        if path.is_socket():
            resource = f"nvidia.com/{path.name.removeprefix('nvidia-').removesuffix('.sock')}"
            yield Component(ComponentKind.DEVICE_PLUGIN, _shown(root, path), resource)
    yield from _specifications(root, _PLUGIN_CDI, ComponentKind.DEVICE_PLUGIN_CDI)
    if _matching(root / _VALIDATIONS, "*"):
        yield Component(ComponentKind.OPERATOR, f"/{_VALIDATIONS}")
    if _matching(root / _DRIVER_TREE, "usr"):
        yield Component(ComponentKind.OPERATOR_DRIVER, f"/{_DRIVER_TREE}")
    folder = root / kubelet.strip("/")
    for name in _DRA:
        for path in (*_matching(folder / "plugins", name), *_matching(folder / "plugins_registry", f"*{name}*")):
            yield Component(ComponentKind.DRA, _shown(root, path))
    yield from _specifications(root, _DRA_CDI, ComponentKind.DRA)


def _specifications(root: Path, vendor: str, kind: ComponentKind) -> Iterator[Component]:
    """CDI specifications of one vendor's devices, with hooks or without."""
    for path in _files(root, _CDI_FOLDERS, _CDI_SUFFIXES):
        if vendor in _text(path):
            yield Component(kind, _shown(root, path))


def _files(root: Path, folders: tuple[str, ...], suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in _matching(root / folder, "*") if path.suffix in suffixes and _is_file(path))


def _matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    try:
        return tuple(sorted(islice(folder.glob(pattern), _FILES_MAX)))
    except OSError:
        return ()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _text(path: Path) -> str:
    return text_of(path, _TEXT_MAX, "utf-8") or ""


def _shown(root: Path, path: Path) -> str:
    return ascii(f"/{path.relative_to(root)}")[1:-1]
