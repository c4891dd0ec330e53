"""The components on this host that inject or allocate NVIDIA GPUs besides us, and what `check` advises about them.

Nothing is changed. A file that cannot be read is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from os.path import isfile
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.finding import Finding, in_policy, warning
from nri_gpu.domain.text import listed
from nri_gpu.policy.model import Disarm, Policy, VisibleDevices
from nri_gpu.system.storage import text_of

OTHERS: Final = "other injectors"
SHOWN_MAX: Final = 3  # paths in a sentence


def node_advice(policy: Policy, root: Path = Path("/")) -> tuple[Finding, ...]:
    """Return a finding for each thing to do."""
    kubelet = str(Path(policy.kubelet.registry_dir).parent)
    found: dict[ComponentKind, list[Component]] = {kind: [] for kind in ComponentKind}
    for each in components(root, policy.kubelet.dir, kubelet):
        found[each.kind].append(each)
    by_cdi = bool(found[ComponentKind.DEVICE_PLUGIN_CDI])
    return (
        *_on_runtimes(policy, found[ComponentKind.RUNTIME]),
        *_on_device_plugin(policy, found[ComponentKind.DEVICE_PLUGIN], by_cdi=by_cdi),
        *_on_others(policy, found),
    )


def _on_runtimes(policy: Policy, runtimes: Sequence[Component]) -> Iterator[Finding]:
    if not runtimes:
        return
    environment = policy.environment
    installed = f"an NVIDIA runtime or hook is installed on this node ({_paths(runtimes)})"
    if environment.visible_devices is not VisibleDevices.VOID:
        yield in_policy(
            f"{installed} and would inject into containers that already have nri-gpu's GPUs, unless their pod's "
            'runtime handler begins with nvidia: set environment.visible_devices = "void", or uninstall it',
            "environment.visible_devices",
            '"void"',
            OTHERS,
        )
    if environment.disarm is not Disarm.ALL:
        yield in_policy(
            f"{installed}, which gives GPUs to any image that sets NVIDIA_VISIBLE_DEVICES, past this policy: set "
            'environment.disarm = "all" unless NVIDIA\'s device plugin is used, or uninstall it',
            "environment.disarm",
            '"all"',
            OTHERS,
        )


def _on_device_plugin(policy: Policy, found: Sequence[Component], *, by_cdi: bool) -> Iterator[Finding]:
    """Yield who is to inject what NVIDIA's device plugin allocates: NVIDIA's runtime, the runtime by CDI, or we."""
    if not found:
        return
    kubelet, names = policy.kubelet, tuple(dict.fromkeys(each.resource for each in found))
    sockets = _paths(found)
    ours = ", ".join(name for each in kubelet.names if (name := each + kubelet.suffix) in names)
    left = tuple(name for name in names if not kubelet.inject_for.match(name))
    if kubelet.enabled and ours:
        yield in_policy(
            f"NVIDIA's device plugin serves {ours} ({sockets}), which nri-gpu is to serve: set kubelet.resource to "
            "another name for as long as both are here, or remove that device plugin from the node",
            "kubelet.resource",
            subject=OTHERS,
        )
    elif left and by_cdi:
        yield warning(
            OTHERS,
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}) by CDI: nri-gpu does not inject into its "
            "containers, and learns what it allocated only when they are created",
        )
    elif left:
        listed = ", ".join(f'"{name}"' for name in left)
        yield in_policy(
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}), by a variable that NVIDIA's runtime or hook "
            f"obeys: to have nri-gpu inject those GPUs instead set kubelet.inject_for = [{listed}]",
            "kubelet.inject_for",
            f"[{listed}]",
            OTHERS,
        )
    if left and not by_cdi and policy.environment.disarm is Disarm.ALL:
        yield in_policy(
            "environment.disarm removes the variable by which NVIDIA's device plugin gives GPUs: list its resources in "
            "kubelet.inject_for, or set environment.disarm to none",
            "environment.disarm",
            subject=OTHERS,
        )


def _on_others(policy: Policy, found: Mapping[ComponentKind, Sequence[Component]]) -> Iterator[Finding]:
    if specifications := found[ComponentKind.SPECIFICATION]:
        yield warning(
            OTHERS,
            f"this node has CDI specifications with hooks ({_paths(specifications)}), which run for containers that "
            "name their devices; `nri-gpu cdi generate` writes one without",
        )
    if (driver := found[ComponentKind.OPERATOR_DRIVER]) and policy.driver.root == "/":
        yield in_policy(
            f"the GPU Operator's driver container has its tree at {driver[0].path}: if the host has no driver of its "
            "own, set driver.root to that",
            "driver.root",
            subject=OTHERS,
        )
    if operator := found[ComponentKind.OPERATOR]:
        yield warning(
            OTHERS,
            f"the GPU Operator manages this node ({_paths(operator)}): its toolkit adds NVIDIA's runtime as a runtime "
            "class, and its device plugin allocates every GPU; docs/kubernetes.md says what to switch off in it",
        )
    if dra := found[ComponentKind.DRA]:
        yield in_policy(
            f"NVIDIA's DRA driver serves claims on this node ({_paths(dra)}): its containers get GPUs by CDI, and "
            "nri-gpu learns what it allocated only when they are created, so keep annotations off its GPUs by a "
            "[[pool]]",
            "the pools",
            subject=OTHERS,
        )


def _paths(found: Sequence[Component]) -> str:
    return listed((each.path for each in found), SHOWN_MAX)


class ComponentKind(StrEnum):
    """The kind of a component, which decides the advice."""

    RUNTIME = "runtime"  # NVIDIA's runtime or its hook, which obeys NVIDIA_VISIBLE_DEVICES
    SPECIFICATION = "specification"  # a CDI specification of NVIDIA devices that has hooks
    DEVICE_PLUGIN = "device plugin"  # NVIDIA's, or one with its names, such as HAMi's
    DEVICE_PLUGIN_CDI = "device plugin's CDI"  # it answers CDI devices, so the container runtime injects
    OPERATOR = "GPU Operator"
    OPERATOR_DRIVER = "GPU Operator's driver"  # the tree of a driver container
    DRA = "DRA driver"


class Component(Struct, frozen=True):
    """A component found. path: on the host. resource: of a device plugin."""

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
# NVIDIA/gpu-operator: the status files of its validator, and the tree of its driver container.
_VALIDATIONS: Final = "run/nvidia/validations"
_DRIVER_TREE: Final = "run/nvidia/driver"
_DRA: Final = ("gpu.nvidia.com", "compute-domain.nvidia.com")
# In CDI specifications that these components write, with hooks or without.
_CDI_VENDORS: Final = {
    "k8s.device-plugin.nvidia.com": ComponentKind.DEVICE_PLUGIN_CDI,
    "k8s.gpu.nvidia.com": ComponentKind.DRA,
}

_FILES_MAX: Final = 64  # of one folder
_TEXT_MAX: Final = 1 << 20  # bytes of one file; a specification of a full node has some 50 kB
_RUNTIME: Final = re.compile(r"nvidia-container-runtime|\bruntimes\.[\"']?nvidia\b")
_NVIDIA_KIND: Final = re.compile(r"""\bkind["']?\s*:\s*["']?[\w.-]*\bnvidia\.com/""")
_HOOKS: Final = re.compile(r"""\bhooks["']?\s*:\s*(?!\s*(?:\[\s*\]|null|~))""")


def components(
    root: Path = Path("/"), device_plugins: str = "/var/lib/kubelet/device-plugins", kubelet: str = "/var/lib/kubelet"
) -> Iterator[Component]:
    """Yield the components below `root`. device_plugins: the kubelet's socket folder. kubelet: its root folder."""
    for name in _FILES:
        if isfile(root / name):  # noqa: PTH113 - Path.is_file raises where a folder may not be searched
            yield Component(ComponentKind.RUNTIME, f"/{name}")
    for path in _files(root, _HOOK_FOLDERS, (".json",)):
        if "nvidia-container-" in _text(path):
            yield Component(ComponentKind.RUNTIME, _shown(root, path))
    for path in _files(root, _CONTAINERD, (".toml",)):
        if _RUNTIME.search("\n".join(line.partition("#")[0] for line in _text(path).splitlines())):
            yield Component(ComponentKind.RUNTIME, _shown(root, path))
    for path in _matching(root / device_plugins.strip("/"), _PLUGIN_SOCKETS):
        if path.is_socket():
            resource = f"nvidia.com/{path.name.removeprefix('nvidia-').removesuffix('.sock')}"
            yield Component(ComponentKind.DEVICE_PLUGIN, _shown(root, path), resource)
    if _matching(root / _VALIDATIONS, "*"):
        yield Component(ComponentKind.OPERATOR, f"/{_VALIDATIONS}")
    if _matching(root / _DRIVER_TREE, "usr"):
        yield Component(ComponentKind.OPERATOR_DRIVER, f"/{_DRIVER_TREE}")
    folder = root / kubelet.strip("/")
    for name in _DRA:
        for path in (*_matching(folder / "plugins", name), *_matching(folder / "plugins_registry", f"*{name}*")):
            yield Component(ComponentKind.DRA, _shown(root, path))
    for path in _files(root, _CDI_FOLDERS, _CDI_SUFFIXES):
        text = _text(path)
        if _NVIDIA_KIND.search(text) and _HOOKS.search(text):
            yield Component(ComponentKind.SPECIFICATION, _shown(root, path))
        for vendor, kind in _CDI_VENDORS.items():
            if vendor in text:
                yield Component(kind, _shown(root, path))


def _files(root: Path, folders: tuple[str, ...], suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in _matching(root / folder, "*") if path.suffix in suffixes)


def _matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    try:
        return tuple(sorted(islice(folder.glob(pattern), _FILES_MAX)))
    except OSError:
        return ()


def _text(path: Path) -> str:
    return text_of(path, _TEXT_MAX, "utf-8") or ""


def _shown(root: Path, path: Path) -> str:
    return ascii(f"/{path.relative_to(root)}")[1:-1]
