"""NVIDIA's own driver, as Debian packages it: files of three versions, with the alternatives that its scripts set.

The packages lie in the cache folder and never in the repository. Left out are those of which a test has no use and that
are large: OptiX, its compiler and, but for 470, NVVM.
"""

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from tests.support import apt, packages
from tests.support.cache import cache_folder, kept

COMPONENTS: Final = "main contrib non-free"
# Of packages that a root with these drivers has besides: update-alternatives makes links in folders that are there.
FOLDERS: Final = (
    *("usr/bin", "usr/sbin", "usr/lib64", "usr/lib/xorg/modules/drivers", "usr/lib/xorg/modules/extensions"),
    *("usr/lib/x86_64-linux-gnu/vdpau", "usr/lib/x86_64-linux-gnu/gbm", "usr/lib/i386-linux-gnu/vdpau"),
    *("usr/share/nvidia", "usr/share/X11/xorg.conf.d", "etc/modprobe.d", "etc/ld.so.conf.d", "var/lib/dpkg"),
)
MERGED: Final = ("bin", "sbin", "lib", "lib64")  # links into usr
# Of libc-bin, and of libc6 in each of its architectures.
LOADER: Final = {
    "ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
    "ld.so.conf.d/libc.conf": "# libc default configuration\n/usr/local/lib\n",
    "ld.so.conf.d/i386-linux-gnu.conf": "/usr/local/lib/i386-linux-gnu\n/lib/i386-linux-gnu\n/usr/lib/i386-linux-gnu\n",
    "ld.so.conf.d/x86_64-linux-gnu.conf": (
        "/usr/local/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n"
    ),
}
COMMON: Final = ("glx-alternative-nvidia", "nvidia-egl-common", "nvidia-opencl-common", "nvidia-vulkan-common")
_LIBRARIES: Final = (
    *("allocator1", "cfg1", "eglcore", "encode1", "fbc1", "glcore", "glvkspirv", "ml1", "ngx1", "opticalflow1"),
    "ptxjitcompiler1",
)
_TESLA: Final = ("alternative", "driver-bin", "egl-icd", "opencl-icd", "smi", "vdpau-driver", "vulkan-icd")


class Packages(Struct, frozen=True):
    """A driver's packages in one suite. folder: Debian's name for its version."""

    suite: str
    folder: str
    native: tuple[str, ...]
    i386: tuple[str, ...] = ()


def _tesla(suite: str, version: str, *more: str) -> Packages:
    libraries = (*_LIBRARIES, "cuda1", "nvcuvid1", *more)
    return Packages(
        suite,
        f"tesla-{version}",
        (
            *(f"libnvidia-tesla-{version}-{name}" for name in libraries),
            *(f"nvidia-tesla-{version}-{name}" for name in _TESLA),
            *(f"lib{name.format(version)}" for name in ("egl-nvidia-tesla-{}-0", "glx-nvidia-tesla-{}-0")),
            *(f"libgles-nvidia-tesla-{version}-{number}" for number in (1, 2)),
            f"xserver-xorg-video-nvidia-tesla-{version}",
            *COMMON,
        ),
    )


DRIVERS: Final = {
    "470": _tesla("bookworm", "470", "nvvm4", "cbl", "ifr1", "compiler"),
    "535": _tesla("trixie", "535", "api1", "cudadebugger1", "pkcs11-openssl3"),
    "550": Packages(
        "trixie",
        "current",
        (
            *(f"libnvidia-{name}" for name in (*_LIBRARIES, "api1", "gpucomp", "pkcs11-openssl3")),
            *("libcuda1", "libcudadebugger1", "libnvcuvid1", "libegl-nvidia0", "libglx-nvidia0"),
            *("libgles-nvidia1", "libgles-nvidia2", "libnvidia-egl-gbm1", "libnvidia-egl-wayland1"),
            *(f"nvidia-{name}" for name in _TESLA),
            *("nvidia-cuda-mps", "nvidia-persistenced", "xserver-xorg-video-nvidia"),
            *COMMON,
        ),
        ("libcuda1", "libnvidia-ptxjitcompiler1", "libnvcuvid1", "nvidia-vdpau-driver"),
    ),
}


def debian_driver(*names: str, alternative: str = "") -> Path:
    """A root with drivers of these names, `550` or `535`, side by side. All tests share it, so none writes there.

    alternative: the name of the driver that an administrator chose; the newest, when empty. The test is skipped where
    the packages cannot be had.
    """
    if os.geteuid():
        pytest.skip("the alternatives of Debian's driver are set by its own scripts in a chroot, which needs root")
    base = cache_folder() / "drivers"
    trees = [kept(base / name, partial(_unpack, DRIVERS[name])) for name in names]
    chosen = DRIVERS[alternative].folder if alternative else ""
    root = base / "-".join(("root", *names, alternative)).rstrip("-")
    return kept(root, lambda unfinished: _make(unfinished, trees, chosen))


def version_of(root: Path, name: str) -> str:
    """The full version of one of the drivers in a root."""
    [library] = root.glob(f"usr/lib/x86_64-linux-gnu/nvidia/{DRIVERS[name].folder}/libcuda.so.*.*")
    return library.name.removeprefix("libcuda.so.")


def _unpack(wanted: Packages, folder: Path) -> None:
    """A driver's files go to `tree`, and each package's scripts to `control`."""
    for architecture, names in (("", wanted.native), ("i386", wanted.i386)):
        if names:
            apt.download(names, wanted.suite, folder / "debs", COMPONENTS, architecture)
    (folder / "control").mkdir()
    for deb in sorted((folder / "debs").iterdir()):
        apt.run_command("dpkg", "-x", deb, folder / "tree")
        apt.run_command("dpkg", "-e", deb, folder / "control" / deb.name.partition("_")[0])
    shutil.rmtree(folder / "debs")


def _make(root: Path, drivers: Sequence[Path], alternative: str) -> None:
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for link in MERGED:
        (root / link).symlink_to(f"usr/{link}")
    for name, text in LOADER.items():
        (root / "etc" / name).write_text(text)
    for driver in drivers:
        apt.run_command("cp", "--archive", "--link", "--no-clobber", f"{driver}/tree/.", root)
    for driver in drivers:
        [script] = (driver / "control").glob("nvidia-*alternative/postinst")
        _run_script(root, script, "register-nvidia-alternative")
    if alternative:
        _update_alternatives(root, "--set", "nvidia", f"/usr/lib/nvidia/{alternative}")
    script = drivers[0] / "control/glx-alternative-nvidia/postinst"
    _run_script(root, script, "register-glx-alternative-nvidia--pong")


def _run_script(root: Path, script: Path, trigger: str) -> None:
    """Run a package's script as dpkg does for a trigger, in a chroot with a shell and nothing else of the system.

    It calls update-alternatives, which stands in here and writes down with what; the real one then sets the links.
    """
    tools, calls = root / ".tools", root / ".tools/calls"
    tools.mkdir()
    shutil.copy(packages.busybox(), tools / "busybox")
    for applet in ("sh", "dirname", "grep", "echo"):
        (tools / applet).symlink_to("busybox")
    (tools / "update-alternatives").write_text("#!/.tools/sh\necho $@ >> /.tools/calls\n")
    for stub in ("dpkg-trigger", "dpkg-maintscript-helper"):
        (tools / stub).write_text("#!/.tools/sh\n")
    (tools / "dpkg-query").write_text("#!/.tools/sh\nexit 1\n")
    shutil.copy(script, tools / "postinst")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    # Its first line names /bin/sh, which is not there.
    shell = ("/.tools/busybox", "env", "-i", "PATH=/.tools", "/.tools/sh")
    apt.run_command("chroot", root, *shell, "/.tools/postinst", "triggered", trigger)
    for line in calls.read_text().splitlines() if calls.exists() else ():
        _update_alternatives(root, *line.split())
    shutil.rmtree(tools)


def _update_alternatives(root: Path, *arguments: str) -> None:
    apt.run_command("update-alternatives", "--root", root, "--log", "/dev/null", "--quiet", *arguments)
