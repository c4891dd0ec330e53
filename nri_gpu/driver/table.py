"""Which of the driver's files belong to which capability, and where distributions keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nri_gpu.domain.gpu import Capability
from nri_gpu.driver.elf import EM_AARCH64, EM_X86_64

VERSION: Final = r"\d+\.\d+(?:\.\d+)?"
V: Final = "{V}"  # in a suffix: the driver's version


@dataclass(frozen=True, slots=True)
class Library:
    """One library of the driver.

    suffixes: what may follow `<name>.so.` in the name of the file itself, best first.
    expected_on: machines whose current driver (580) has it; missing there is worth telling a person.
    """

    name: str
    capability: Capability
    expected_on: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = (V,)

    def file_names(self, version: str) -> tuple[str, ...]:
        """Names the file may have in a driver of this version."""
        return tuple(f"{self.name}.so.{suffix.replace(V, version)}" for suffix in self.suffixes)


@dataclass(frozen=True, slots=True)
class Machine:
    """A processor architecture the driver is made for. name: as `uname -m`; triple: Debian's multiarch folder."""

    name: str
    elf: int
    triple: str


MACHINES: Final = {
    machine.name: machine
    for machine in (
        Machine("x86_64", EM_X86_64, "x86_64-linux-gnu"),
        Machine("aarch64", EM_AARCH64, "aarch64-linux-gnu"),
    )
}

ALL: Final = frozenset(MACHINES)
X86: Final = frozenset({"x86_64"})
COMPUTE, UTILITY = Capability.COMPUTE, Capability.UTILITY

# Order is the order of everything we print. Those without `expected_on` are old, new, or come in packages of their own.
# Source: NVIDIA/libnvidia-container src/nvc_info.c, src/options.h (which capability); the file lists of 580 and 595 in
# bottlerocket-os/bottlerocket-kernel-kit packages/kmod-6.12-nvidia-r{580,595}/*.spec (which exist, under which name).
LIBRARIES: Final = (
    Library("libcuda", COMPUTE, ALL),
    Library("libcudadebugger", COMPUTE, ALL),
    Library("libnvidia-opencl", COMPUTE, ALL),
    Library("libnvidia-gpucomp", COMPUTE, ALL),
    Library("libnvidia-ptxjitcompiler", COMPUTE, ALL),
    Library("libnvidia-nvvm", COMPUTE, ALL, (V, "4.0.0")),  # 4.0.0 in older drivers
    Library("libnvidia-nvvm70", COMPUTE, frozenset(), ("4",)),
    Library("libnvidia-pkcs11", COMPUTE, X86),
    Library("libnvidia-pkcs11-openssl3", COMPUTE, X86),
    Library("libnvidia-allocator", COMPUTE),
    Library("libnvidia-tileiras", COMPUTE),  # from 595
    Library("libnvidia-fatbinaryloader", COMPUTE),  # until 450
    Library("libnvidia-compiler", COMPUTE),  # until 520
    Library("libnvidia-ml", UTILITY, ALL),
    Library("libnvidia-cfg", UTILITY, ALL),
    Library("libnvidia-nscq", UTILITY),
)

# The driver's version is read off these two, in this order; they must agree.
VERSION_LIBRARIES: Final = ("libcuda", "libnvidia-ml")

# Links every container gets although the host may lack them: programs open them by these names.
# Source: NVIDIA/libnvidia-container src/nvc_mount.c.
ALWAYS_LINKED: Final = {"libcuda": ("libcuda.so",)}

# Known, and of no capability that is injected today; any other `lib*.so.V` is new to us and reported.
OTHERS: Final = frozenset(
    {
        # video
        *("libvdpau_nvidia", "libnvidia-encode", "libnvidia-opticalflow", "libnvcuvid"),
        # graphics, display
        *("libnvidia-eglcore", "libnvidia-glcore", "libnvidia-tls", "libnvidia-glsi", "libnvidia-fbc", "libnvidia-ifr"),
        *(
            "libnvidia-rtcore",
            "libnvoptix",
            "libGLX_nvidia",
            "libEGL_nvidia",
            "libGLESv2_nvidia",
            "libGLESv1_CM_nvidia",
        ),
        *("libnvidia-glvkspirv", "libnvidia-cbl", "libnvidia-present", "libnvidia-wayland-client", "libEGL"),
        *("libnvidia-vulkan-producer", "libnvidia-vksc-core", "libglxserver_nvidia"),
        # ngx
        "libnvidia-ngx",
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
}
BINARY_FOLDERS: Final = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "opt/bin")


def library_folders(machine: Machine) -> tuple[str, ...]:
    """Folders below a driver root that may hold libraries, in the order in which they win.

    The first is the root itself; `lib64` is where a flat root such as `/usr/local/nvidia` has them.
    Source: NVIDIA/nvidia-container-toolkit pkg/lookup/library.go.
    """
    triple = machine.triple
    usr, plain = f"usr/lib/{triple}", f"lib/{triple}"
    return ("", "usr/lib64", usr, f"{usr}/nvidia/current", "lib64", plain, f"{plain}/nvidia/current")
