"""The table of the driver's files: the capability each belongs to, and where distributions keep them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from posixpath import join
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.driver.elf import EM_386, EM_AARCH64, EM_X86_64, Elf

VERSION: Final = r"\d+\.\d+(?:\.\d+)?"
V: Final = "{V}"  # in a suffix: the driver's version


class DriverLibrary(Struct, frozen=True):
    """A library of the driver."""

    name: str
    capabilities: Capabilities  # a container with one of them gets it
    # Machines whose current driver (580) has it; a driver without it is reported.
    expected_on: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = (V,)  # what may follow `<name>.so.` in the file's own name, best first
    folder: str = ""  # below a library folder in our trees, and on most hosts; Debian's files lie beside the others
    since: int = 0  # the first major version that is known to have it

    def expected(self, machine: str, version: str) -> bool:
        """Return whether a driver of this version has the library for that machine."""
        return machine in self.expected_on and int(version.partition(".")[0]) >= self.since

    def file_names(self, version: str) -> tuple[str, ...]:
        """Return paths below a library folder that the file may have in a driver of this version."""
        names = tuple(f"{self.name}.so.{suffix.replace(V, version)}" for suffix in self.suffixes)
        return tuple(dict.fromkeys((*(join(self.folder, name) for name in names), *names)))


class Machine(Struct, frozen=True):
    """A processor architecture the driver is made for."""

    name: str  # as `uname -m`
    elf: int
    triple: str  # Debian's multiarch folder
    interpreter: str  # the loader of its programs, by the path that every glibc image has it at
    folders: tuple[str, ...]  # below a driver root, where distributions keep its libraries, in search order
    bits: int = 64

    @property
    def wrong_class(self) -> str:
        """Return why a library that this machine does not run is of no use."""
        return f"not a {self.bits}-bit {self.name} library"

    def runs(self, elf: Elf) -> bool:
        """Return whether a file is of this machine's class."""
        return (elf.bits, elf.machine) == (self.bits, self.elf)


def _folders(triple: str) -> tuple[str, ...]:
    """Return the folders; the first is the root itself. A flat root such as `/usr/local/nvidia` uses `lib64`.

    Source: NVIDIA/nvidia-container-toolkit pkg/lookup/library.go. The last two are of Arch Linux.
    """
    usr, plain = f"usr/lib/{triple}", f"lib/{triple}"
    debian = (usr, f"{usr}/nvidia/current"), (plain, f"{plain}/nvidia/current")
    return ("", "usr/lib64", *debian[0], "lib64", *debian[1], "usr/lib", "lib")


MACHINES: Final = {
    machine.name: machine
    for machine in (
        Machine("x86_64", EM_X86_64, "x86_64-linux-gnu", "/lib64/ld-linux-x86-64.so.2", _folders("x86_64-linux-gnu")),
        Machine(
            "aarch64", EM_AARCH64, "aarch64-linux-gnu", "/lib/ld-linux-aarch64.so.1", _folders("aarch64-linux-gnu")
        ),
    )
}
# For compat32. `usr/lib` is where RHEL has 32-bit libraries; elsewhere it holds others, which are skipped.
I386: Final = Machine(
    "i386",
    EM_386,
    "i386-linux-gnu",
    "/lib/ld-linux.so.2",
    (*_folders("i386-linux-gnu")[2:4], "usr/lib32", "usr/lib", *_folders("i386-linux-gnu")[5:7], "lib32", "lib"),
    bits=32,
)
COMPATIBLE: Final = {"x86_64": I386}

ALL: Final = frozenset(MACHINES)
X86: Final = frozenset({"x86_64"})
WITH_32: Final = ALL | {I386.name}
COMPUTE, UTILITY = frozenset({Capability.COMPUTE}), frozenset({Capability.UTILITY})
VIDEO, GRAPHICS = frozenset({Capability.VIDEO}), frozenset({Capability.GRAPHICS})
DISPLAY, NGX = frozenset({Capability.DISPLAY}), frozenset({Capability.NGX})
# Packages with versions of their own: found by the link of their SONAME, whatever the file's name.
SO1, SO4 = ("1",), ("4",)

# We print them in this order. Those without `expected_on` are old, new, or come in packages of their own.
# Source: NVIDIA/libnvidia-container src/nvc_info.c, src/options.h (which capability); the file lists of 580 and 595 in
# bottlerocket-os/bottlerocket-kernel-kit packages/kmod-6.12-nvidia-r{580,595}/*.spec (which exist, under which name);
# Debian's packages of 470, 535 and 550, and openSUSE/nvidia-driver-G06 of 550 (since when, and for 32 bits);
# NVIDIA/nvidia-container-toolkit internal/discover/graphics.go (platform libraries of EGL).
LIBRARIES: Final = (
    DriverLibrary("libcuda", COMPUTE, WITH_32),
    DriverLibrary("libcudadebugger", COMPUTE, ALL, since=535),
    DriverLibrary("libnvidia-opencl", COMPUTE, WITH_32),
    # The shader compiler of Vulkan and OpenGL too; and the allocator is also what GBM loads (ALWAYS_LINKED).
    DriverLibrary("libnvidia-gpucomp", COMPUTE | GRAPHICS, WITH_32, since=550),
    DriverLibrary("libnvidia-ptxjitcompiler", COMPUTE, WITH_32),
    DriverLibrary("libnvidia-nvvm", COMPUTE, WITH_32, (V, "4.0.0")),  # 4.0.0 in older drivers
    DriverLibrary("libnvidia-nvvm70", COMPUTE, frozenset(), SO4),
    DriverLibrary("libnvidia-pkcs11", COMPUTE, X86, since=535),
    DriverLibrary("libnvidia-pkcs11-openssl3", COMPUTE, X86, since=535),
    DriverLibrary("libnvidia-allocator", COMPUTE | GRAPHICS),
    DriverLibrary("libnvidia-tileiras", COMPUTE),  # from 595
    DriverLibrary("libnvidia-fatbinaryloader", COMPUTE),  # until 450
    DriverLibrary("libnvidia-compiler", COMPUTE),  # until 520
    DriverLibrary("libnvidia-ml", UTILITY, WITH_32),
    DriverLibrary("libnvidia-cfg", UTILITY, ALL),
    DriverLibrary("libnvidia-nscq", UTILITY),
    DriverLibrary("libnvcuvid", VIDEO, WITH_32),
    DriverLibrary("libnvidia-encode", VIDEO, WITH_32),
    DriverLibrary("libnvidia-opticalflow", VIDEO, WITH_32),
    DriverLibrary("libvdpau_nvidia", VIDEO, WITH_32, folder="vdpau"),
    DriverLibrary("libGLX_nvidia", GRAPHICS, WITH_32),
    DriverLibrary("libEGL_nvidia", GRAPHICS, WITH_32),
    DriverLibrary("libGLESv2_nvidia", GRAPHICS, WITH_32),
    DriverLibrary("libGLESv1_CM_nvidia", GRAPHICS, WITH_32),
    DriverLibrary("libnvidia-glcore", GRAPHICS, WITH_32),
    DriverLibrary("libnvidia-eglcore", GRAPHICS, WITH_32),
    DriverLibrary("libnvidia-glsi", GRAPHICS, WITH_32),
    DriverLibrary("libnvidia-tls", GRAPHICS, WITH_32),
    DriverLibrary("libnvidia-glvkspirv", GRAPHICS, WITH_32),
    DriverLibrary("libnvidia-rtcore", GRAPHICS, ALL),
    DriverLibrary("libnvoptix", GRAPHICS, ALL),
    DriverLibrary("libnvidia-fbc", GRAPHICS, WITH_32),
    DriverLibrary("libnvidia-present", GRAPHICS, X86, since=580),
    DriverLibrary("libnvidia-wayland-client", GRAPHICS),
    DriverLibrary("libnvidia-vksc-core", GRAPHICS),
    DriverLibrary("libnvidia-api", GRAPHICS, frozenset(), SO1),
    DriverLibrary("libnvidia-egl-gbm", GRAPHICS, ALL, SO1, since=495),
    DriverLibrary("libnvidia-egl-wayland", GRAPHICS, ALL, SO1),
    DriverLibrary("libnvidia-egl-wayland2", GRAPHICS, frozenset(), SO1),  # from 595
    DriverLibrary("libnvidia-egl-xcb", GRAPHICS, frozenset(), SO1),
    DriverLibrary("libnvidia-egl-xlib", GRAPHICS, frozenset(), SO1),
    DriverLibrary("libnvidia-vulkan-producer", GRAPHICS),  # old drivers
    DriverLibrary("libnvidia-ifr", GRAPHICS),  # until 470
    DriverLibrary("libnvidia-cbl", GRAPHICS),  # until 470
    DriverLibrary("libnvidia-ngx", NGX, ALL),
)

# The libraries that each stand for a capability. Graphics stand for display, any 32-bit library for compat32.
STANDS_FOR: Final[Mapping[Capability, tuple[str, ...]]] = {
    Capability.COMPUTE: ("libcuda",),
    Capability.UTILITY: ("libnvidia-ml",),
    Capability.VIDEO: ("libnvcuvid", "libnvidia-encode"),
    Capability.GRAPHICS: ("libGLX_nvidia", "libEGL_nvidia"),
    Capability.NGX: ("libnvidia-ngx",),
}

# Links every container gets although the host may lack them: programs open them by these names. Each leads to the
# library's SONAME; the paths are below the library folder. Source: NVIDIA/libnvidia-container src/nvc_mount.c,
# NVIDIA/nvidia-container-toolkit internal/discover/{symlinks,graphics}.go. VDPAU's loader falls back to the plain
# folders when its own has no driver (libvdpau: src/vdpau_wrapper.c).
ALWAYS_LINKED: Final[Mapping[str, tuple[str, ...]]] = {
    "libcuda": ("libcuda.so",),
    "libnvidia-opticalflow": ("libnvidia-opticalflow.so",),
    "libGLX_nvidia": ("libGLX_indirect.so.0",),
    "libvdpau_nvidia": ("libvdpau_nvidia.so.1", "libvdpau_nvidia.so"),
    "libnvidia-allocator": ("gbm/nvidia-drm_gbm.so",),
    "libnvidia-vulkan-producer": ("libnvidia-vulkan-producer.so",),
}

# Known, and never given to containers; any other `lib*.so.V` is reported as unknown.
OTHERS: Final = frozenset(
    {
        "libglxserver_nvidia",  # a module of the X server: see `single_files`
        # Loaders that images have themselves; of two with one SONAME only one works.
        *("libGL", "libEGL", "libGLESv2", "libGLESv1_CM"),
        # parts of programs that never belong in a container, and of NVIDIA's own injection
        *("libnvidia-gtk2", "libnvidia-gtk3", "libnvidia-wfb", "libnvidia-sandboxutils"),
    }
)

BINARIES: Final = {
    "nvidia-smi": UTILITY,
    "nvidia-debugdump": UTILITY,
    "nvidia-persistenced": UTILITY,
    "nvidia-cuda-mps-control": COMPUTE,
    "nvidia-cuda-mps-server": COMPUTE,
    "nvidia-xconfig": GRAPHICS,
}
BINARY_FOLDERS: Final = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "opt/bin")

X_DRIVER, X_GLX = "nvidia_drv.so", "libglxserver_nvidia.so"
X_NAMES: Final = (X_DRIVER, X_GLX)
# Where X servers look for modules: Debian-like and RHEL-like images.
X_PLACES: Final = ("/usr/lib/xorg/modules", "/usr/lib64/xorg/modules")
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


class SingleFile(Struct, frozen=True):
    """A file that programs look for in one place only: configuration, or a module for a program of the image.

    Loaders of Vulkan, EGL and OpenCL read folders that images fill too, so each file has a mount of its own.
    """

    names: tuple[str, ...]  # on the host, best first
    capabilities: Capabilities
    places: tuple[str, ...]  # in the container, the same content at each


def single_files(machine: Machine, version: str) -> Iterator[SingleFile]:
    """Yield each such file that a driver of this version may have."""
    for folder, names, capabilities in _CONFIGS:
        for name in (each.format(machine=machine.name) for each in names):
            yield SingleFile((name,), capabilities, (f"{folder}/{name}",))
    drivers, extensions = ([f"{place}/{kind}" for place in X_PLACES] for kind in ("drivers", "extensions"))
    yield SingleFile((X_DRIVER,), DISPLAY, tuple(f"{folder}/{X_DRIVER}" for folder in drivers))
    yield SingleFile((f"{X_GLX}.{version}", X_GLX), DISPLAY, tuple(f"{folder}/{X_GLX}" for folder in extensions))
    # Mesa's GBM loads the allocator under another name.
    gbm = (f"/usr/lib/{machine.triple}/gbm/nvidia-drm_gbm.so", "/usr/lib64/gbm/nvidia-drm_gbm.so")
    yield SingleFile((f"libnvidia-allocator.so.{version}",), GRAPHICS, gbm)
