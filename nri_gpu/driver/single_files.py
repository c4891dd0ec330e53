"""Driver files that programs look for in one place only: configuration, and modules for programs of the image.

Loaders of Vulkan, EGL and OpenCL read folders that images fill too, so each file has a mount of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from posixpath import dirname
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import Capabilities
from nri_gpu.driver.elf import read_elf
from nri_gpu.driver.host_file import distinct_folders
from nri_gpu.driver.table import COMPUTE, DISPLAY, GRAPHICS, Machine

CONFIG_BYTES_MAX: Final = 64 * 1024
X_DRIVER, X_GLX = "nvidia_drv.so", "libglxserver_nvidia.so"
X_NAMES: Final = (X_DRIVER, X_GLX)
# Where X servers look for modules: Debian-like and RHEL-like images.
X_PLACES: Final = ("/usr/lib/xorg/modules", "/usr/lib64/xorg/modules")
# On the host, below a library folder, and then below the root.
# Source: NVIDIA/nvidia-container-toolkit internal/discover/graphics.go.
X_FOLDERS: Final = (
    "nvidia/xorg",
    *(f"xorg/modules/{part}{kind}" for part in ("", "updates/") for kind in ("drivers", "extensions")),
)
X_ROOTS: Final = ("usr/lib", "usr/lib64", "usr/X11R6/lib", "usr/X11R6/lib64")
# In the driver's own search order; a flat root such as /usr/local/nvidia has the same folders without `usr`.
CONFIG_ROOTS: Final = ("etc", "usr/local/share", "usr/share", "share")

# In containers the driver lies elsewhere, so a library must not be named with its folder.
_ABSOLUTE: Final = re.compile(rb'"library_path"\s*:\s*"/|\A\s*/')
_SONAME_ONLY: Final = "names a library by a path that containers do not have"


class SingleFile(Struct, frozen=True):
    """One such file. names: on the host, best first. places: in the container, the same content at each."""

    names: tuple[str, ...]
    capabilities: Capabilities
    places: tuple[str, ...]


def single_files(machine: Machine, version: str) -> Iterator[SingleFile]:
    """Every such file that a driver of this version may have."""
    for folder, names, capabilities in _CONFIGS:
        for name in (each.format(machine=machine.name) for each in names):
            yield SingleFile((name,), capabilities, (f"{folder}/{name}",))
    drivers, extensions = ([f"{place}/{kind}" for place in X_PLACES] for kind in ("drivers", "extensions"))
    yield SingleFile((X_DRIVER,), DISPLAY, tuple(f"{folder}/{X_DRIVER}" for folder in drivers))
    yield SingleFile((f"{X_GLX}.{version}", X_GLX), DISPLAY, tuple(f"{folder}/{X_GLX}" for folder in extensions))
    # Mesa's GBM loads the allocator under another name.
    gbm = (f"/usr/lib/{machine.triple}/gbm/nvidia-drm_gbm.so", "/usr/lib64/gbm/nvidia-drm_gbm.so")
    yield SingleFile((f"libnvidia-allocator.so.{version}",), GRAPHICS, gbm)


# (folder in the container, files, capabilities)
# Source: NVIDIA/nvidia-container-toolkit internal/discover/graphics.go, pkg/nvcdi/driver-nvml.go.
_CONFIGS: Final = (
    ("/etc", ("OpenCL/vendors/nvidia.icd",), COMPUTE),
    (
        "/etc",
        (
            "vulkan/icd.d/nvidia_icd.json",
            "vulkan/icd.d/nvidia_icd.{machine}.json",
            "vulkan/icd.d/nvidia_layers.json",
            "vulkan/implicit_layer.d/nvidia_layers.json",
        ),
        GRAPHICS,
    ),
    (
        "/usr/share",
        (
            "glvnd/egl_vendor.d/10_nvidia.json",
            "egl/egl_external_platform.d/15_nvidia_gbm.json",
            "egl/egl_external_platform.d/10_nvidia_wayland.json",
            "egl/egl_external_platform.d/09_nvidia_wayland2.json",
            "egl/egl_external_platform.d/20_nvidia_xcb.json",
            "egl/egl_external_platform.d/20_nvidia_xlib.json",
            "nvidia/nvoptix.bin",
        ),
        GRAPHICS,
    ),
    ("/usr/share", ("X11/xorg.conf.d/10-nvidia.conf", "X11/xorg.conf.d/nvidia-drm-outputclass.conf"), DISPLAY),
)


def candidates(file: SingleFile, root: Path, libraries: Sequence[Path], library_dirs: Sequence[str]) -> Iterator[Path]:
    """Where below `root` the file may be, best first. libraries: the folders that may hold the driver's libraries."""
    name = file.names[0]
    if "/" in name:
        beside = (f"{dirname(folder)}/{kind}".lstrip("/") for folder in library_dirs for kind in ("share", "etc"))
        folders = (*beside, *CONFIG_ROOTS, *(("",) if name.startswith("vulkan/") else ()))
        return (folder / name for folder in distinct_folders(root, (root / each for each in folders)))
    below = [folder / each for folder in libraries for each in ("", *X_FOLDERS)]
    below += [root / folder / each for folder in X_ROOTS for each in X_FOLDERS]
    known = tuple(distinct_folders(root, below))
    return (folder / each for each in file.names for folder in known)


def why_unusable(path: Path, machine: Machine) -> str:
    """Why a trusted file is of no use, a clause; empty when it is usable. Raises: DriverError, OSError."""
    if ".so" in path.name:
        elf = read_elf(path)
        fits = elf is not None and (elf.bits, elf.machine) == (machine.bits, machine.elf)
        return "" if fits else f"not a {machine.bits}-bit {machine.name} library"
    if path.suffix not in {".json", ".icd"}:
        return ""
    with path.open("rb") as file:
        return _SONAME_ONLY if _ABSOLUTE.search(file.read(CONFIG_BYTES_MAX)) else ""
