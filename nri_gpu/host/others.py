"""What of NVIDIA's own injection is installed on this host: found and told of, never changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.policy.model import Disarm, Policy, VisibleDevices
from nri_gpu.system.storage import text_of


class Kind(StrEnum):
    """What was found. It decides the advice."""

    RUNTIME = "runtime"  # NVIDIA's runtime or its hook: obeys NVIDIA_VISIBLE_DEVICES
    SPECIFICATION = "specification"  # a CDI specification of NVIDIA devices that has hooks


class Leftover(Struct, frozen=True):
    """One of them. path: on the host, as found."""

    kind: Kind
    path: str


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

_FILES_MAX: Final = 64  # of one folder
_TEXT_MAX: Final = 1 << 20  # bytes of one file: a specification for a full node has some 50 kB
_RUNTIME: Final = re.compile(r"nvidia-container-runtime|\bruntimes\.[\"']?nvidia\b")
_NVIDIA_KIND: Final = re.compile(r"""\bkind["']?\s*:\s*["']?[\w.-]*\bnvidia\.com/""")
_HOOKS: Final = re.compile(r"""\bhooks["']?\s*:\s*(?!\s*(?:\[\s*\]|null|~))""")


def leftovers(root: Path = Path("/")) -> tuple[Leftover, ...]:
    """Everything found below `root`. What cannot be read is passed over: this is advice."""
    return tuple(_runtimes(root)) + tuple(_specifications(root))


def specifications_of(root: Path, vendor: str) -> tuple[str, ...]:
    """CDI specifications of one vendor's devices, with hooks or without."""
    found = (path for path in _files(root, _CDI_FOLDERS, (".yaml", ".yml", ".json")) if vendor in _told(path))
    return tuple(_shown(root, path) for path in found)


def _runtimes(root: Path) -> Iterator[Leftover]:
    for name in _FILES:
        if _is_there(root / name):
            yield Leftover(Kind.RUNTIME, f"/{name}")
    for path in _files(root, _HOOK_FOLDERS, (".json",)):
        if "nvidia-container-" in _told(path):
            yield Leftover(Kind.RUNTIME, _shown(root, path))
    for path in _files(root, _CONTAINERD, (".toml",)):
        if _RUNTIME.search("\n".join(line.partition("#")[0] for line in _told(path).splitlines())):
            yield Leftover(Kind.RUNTIME, _shown(root, path))


def _specifications(root: Path) -> Iterator[Leftover]:
    for path in _files(root, _CDI_FOLDERS, (".yaml", ".yml", ".json")):
        text = _told(path)
        if _NVIDIA_KIND.search(text) and _HOOKS.search(text):
            yield Leftover(Kind.SPECIFICATION, _shown(root, path))


def _files(root: Path, folders: tuple[str, ...], endings: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        try:
            inside = sorted(islice((root / folder).iterdir(), _FILES_MAX))
        except OSError:
            continue
        yield from (path for path in inside if path.suffix in endings and _is_there(path))


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _told(path: Path) -> str:
    return text_of(path, _TEXT_MAX, "utf-8") or ""


def _shown(root: Path, path: Path) -> str:
    return ascii(f"/{path.relative_to(root)}")[1:-1]


class Who(StrEnum):
    """Whom it is a sign of."""

    DEVICE_PLUGIN = "device plugin"  # NVIDIA's, or one that goes by its names, such as HAMi's
    DEVICE_PLUGIN_CDI = "device plugin's CDI"  # it gives by CDI, so the runtime itself injects
    OPERATOR = "GPU Operator"
    OPERATOR_DRIVER = "GPU Operator's driver"  # a driver container's tree
    DRA = "DRA driver"


class Other(Struct, frozen=True):
    """One sign. path: on the host. name: a device plugin's resource; empty for the others."""

    who: Who
    path: str
    name: str = ""


# NVIDIA/k8s-device-plugin: internal/plugin/server.go; its sockets are called for the part behind the slash.
_PLUGIN_SOCKETS: Final = "nvidia-*.sock"
_PLUGIN_CDI: Final = "k8s.device-plugin.nvidia.com"
# NVIDIA/gpu-operator: its validator's folder of status files, and where its driver container has its tree.
_VALIDATIONS: Final = "run/nvidia/validations"
_DRIVER_TREE: Final = "run/nvidia/driver"
_DRA: Final = ("gpu.nvidia.com", "compute-domain.nvidia.com")
_DRA_CDI: Final = "k8s.gpu.nvidia.com"


def others(
    root: Path = Path("/"), device_plugins: str = "/var/lib/kubelet/device-plugins", kubelet: str = "/var/lib/kubelet"
) -> tuple[Other, ...]:
    """All that is found below `root`; what cannot be read is passed over: this is advice.

    device_plugins: the folder there. kubelet: its root folder, which may be elsewhere.
    """
    return (*_device_plugins(root, device_plugins), *_operator(root), *_dra(root, kubelet))


def _device_plugins(root: Path, folder: str) -> Iterator[Other]:
    for path in _inside(root / folder.strip("/"), _PLUGIN_SOCKETS):
        if path.is_socket():
            resource = f"nvidia.com/{path.name.removeprefix('nvidia-').removesuffix('.sock')}"
            yield Other(Who.DEVICE_PLUGIN, _shown(root, path), resource)
    yield from (Other(Who.DEVICE_PLUGIN_CDI, path) for path in specifications_of(root, _PLUGIN_CDI))


def _operator(root: Path) -> Iterator[Other]:
    if any(_inside(root / _VALIDATIONS, "*")):
        yield Other(Who.OPERATOR, f"/{_VALIDATIONS}")
    if any(_inside(root / _DRIVER_TREE, "usr")):
        yield Other(Who.OPERATOR_DRIVER, f"/{_DRIVER_TREE}")


def _dra(root: Path, kubelet: str) -> Iterator[Other]:
    folder = root / kubelet.strip("/")
    for name in _DRA:
        yield from (Other(Who.DRA, _shown(root, path)) for path in _inside(folder / "plugins", name))
        yield from (Other(Who.DRA, _shown(root, path)) for path in _inside(folder / "plugins_registry", f"*{name}*"))
    yield from (Other(Who.DRA, path) for path in specifications_of(root, _DRA_CDI))


def _inside(folder: Path, pattern: str) -> tuple[Path, ...]:
    try:
        return tuple(sorted(islice(folder.glob(pattern), _FILES_MAX)))
    except OSError:
        return ()


SHOWN_MAX: Final = 3  # paths in a sentence


def node_advice(policy: Policy, root: Path = Path("/")) -> tuple[str, ...]:
    """One sentence a thing to be done."""
    kubelet = str(Path(policy.kubelet.registry_dir).parent)
    return (*_sentences(policy, leftovers(root)), *_of_others(policy, others(root, policy.kubelet.dir, kubelet)))


def _sentences(policy: Policy, found: tuple[Leftover, ...]) -> Iterator[str]:
    runtimes, specifications = (tuple(each.path for each in found if each.kind is kind) for kind in Kind)
    environment = policy.environment
    if runtimes and environment.visible_devices is not VisibleDevices.VOID:
        yield (
            f"an NVIDIA runtime or hook is installed on this node ({_paths(runtimes)}) and would serve containers that "
            'nri-gpu has served already: set environment.visible_devices = "void", or uninstall it'
        )
    if runtimes and environment.disarm is not Disarm.ALL:
        yield (
            f"an NVIDIA runtime or hook is installed on this node ({_paths(runtimes)}), which gives GPUs to any image "
            'that sets NVIDIA_VISIBLE_DEVICES, past this policy: set environment.disarm = "all" unless NVIDIA\'s '
            "device plugin is used, or uninstall it"
        )
    if specifications:
        yield (
            f"CDI specifications with hooks lie on this node ({_paths(specifications)}): whoever names their devices "
            "runs those hooks; `nri-gpu cdi generate` writes one without"
        )


def _of_others(policy: Policy, found: tuple[Other, ...]) -> Iterator[str]:
    signs = {who: tuple(each for each in found if each.who is who) for who in Who}
    yield from _of_device_plugin(policy, signs[Who.DEVICE_PLUGIN], by_cdi=bool(signs[Who.DEVICE_PLUGIN_CDI]))
    if (driver := signs[Who.OPERATOR_DRIVER]) and policy.driver.root == "/":
        yield (
            f"the GPU Operator's driver container has its tree at {driver[0].path}: where the host has no driver of "
            "its own, set driver.root to that"
        )
    if operator := signs[Who.OPERATOR]:
        yield (
            f"the GPU Operator looks after this node ({_places(operator)}): its toolkit makes NVIDIA's runtime a "
            "runtime class, and its device plugin gives out every GPU; docs/kubernetes.md says what to switch "
            "off in it"
        )
    if dra := signs[Who.DRA]:
        yield (
            f"NVIDIA's DRA driver serves claims on this node ({_places(dra)}): whom it gives GPUs gets them by CDI and "
            "counts as served by others here, but what it has allocated is known only with the container, so keep "
            "annotations off its GPUs by a [[pool]]"
        )


def _of_device_plugin(policy: Policy, found: tuple[Other, ...], *, by_cdi: bool) -> Iterator[str]:
    """Whose containers NVIDIA's runtime, the container runtime by CDI, or we inject."""
    if not found:
        return
    kubelet, names = policy.kubelet, tuple(dict.fromkeys(each.name for each in found))
    sockets = _places(found)
    same = kubelet.resource + ".shared" * (kubelet.rename and kubelet.replicas > 1)
    left = tuple(name for name in names if kubelet.inject_for.first(name) is None)
    if kubelet.enabled and same in names:
        yield (
            f"NVIDIA's device plugin serves {same} ({sockets}), as nri-gpu is to: set kubelet.resource to another name "
            "for as long as both are here, or take that one off the node"
        )
    elif left and by_cdi:
        yield (
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}) by CDI: its containers count as served by "
            "others, and what it has allocated is known only with the container"
        )
    elif left:
        yield (
            f"NVIDIA's device plugin serves {', '.join(left)} ({sockets}), by a variable that NVIDIA's runtime or hook "
            f"obeys: to have nri-gpu inject those GPUs instead set kubelet.inject_for = [{_listed(left)}]"
        )
    if left and not by_cdi and policy.environment.disarm is Disarm.ALL:
        yield (
            "environment.disarm takes from NVIDIA's device plugin the variable that it gives GPUs by: list its "
            "resources in kubelet.inject_for, or set it to none"
        )


def _places(found: tuple[Other, ...]) -> str:
    return _paths(tuple(each.path for each in found))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _paths(paths: tuple[str, ...]) -> str:
    more = len(paths) - SHOWN_MAX
    return ", ".join(paths[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
