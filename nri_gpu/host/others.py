"""Who else gives GPUs on this host to pods: found by the files they leave, told of, never fought."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.host.leftovers import specifications_of


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


_FILES_MAX: Final = 64  # of one folder
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


def _shown(root: Path, path: Path) -> str:
    return ascii(f"/{path.relative_to(root)}")[1:-1]
