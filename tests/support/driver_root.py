"""Make a folder that looks like the place where a host keeps NVIDIA's user space: for tests, and for the demo.

Compiled, its libraries have functions to call and need a C compiler; otherwise they are empty libraries written by
hand, and a machine with nothing but Python makes them.
"""

import functools
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from tests.support import packages
from tests.support.elf_file import EM_386, EM_AARCH64, EM_X86_64, shared_library
from tests.support.errors import HarnessError

Layout = Literal["flat", "ubuntu", "debian", "rhel"]
STUBS: Final = Path(__file__).parent / "driver_stubs"
ELF_MACHINES: Final = {"x86_64": EM_X86_64, "aarch64": EM_AARCH64}


def _by_name(sonames: str) -> dict[str, str]:
    """Library -> its SONAME; {V} is the driver's version."""
    return {soname.partition(".so")[0]: soname for soname in sonames.split()}


# As the 580 driver has them, and written down a second time on purpose: a mistake in the table of nri_gpu/driver is
# then one that a test can see.
LIBRARIES: Final = _by_name("""
    libcuda.so.1 libcudadebugger.so.1 libnvidia-opencl.so.1 libnvidia-gpucomp.so.{V} libnvidia-ptxjitcompiler.so.1
    libnvidia-nvvm.so.4 libnvidia-pkcs11.so.{V} libnvidia-pkcs11-openssl3.so.{V} libnvidia-allocator.so.1
    libnvidia-ml.so.1 libnvidia-cfg.so.1
""")
# The same for the other capabilities, where a driver root has "everything".
VIDEO: Final = {
    **_by_name("libnvcuvid.so.1 libnvidia-encode.so.1 libnvidia-opticalflow.so.1"),
    "vdpau/libvdpau_nvidia": "libvdpau_nvidia.so.1",
}
GRAPHICS: Final = _by_name("""
    libGLX_nvidia.so.0 libEGL_nvidia.so.0 libGLESv2_nvidia.so.2 libGLESv1_CM_nvidia.so.1 libnvidia-glcore.so.{V}
    libnvidia-eglcore.so.{V} libnvidia-glsi.so.{V} libnvidia-tls.so.{V} libnvidia-glvkspirv.so.{V}
    libnvidia-rtcore.so.{V} libnvoptix.so.1 libnvidia-fbc.so.1 libnvidia-present.so.{V}
    libnvidia-wayland-client.so.{V} libnvidia-vksc-core.so.1
""")
NGX: Final = _by_name("libnvidia-ngx.so.1")
# Libraries with versions of their own: name -> (SONAME, version).
OWN_VERSIONS: Final = {
    "libnvidia-egl-gbm": ("libnvidia-egl-gbm.so.1", "1.1.2"),
    "libnvidia-egl-wayland": ("libnvidia-egl-wayland.so.1", "1.1.19"),
    "libnvidia-egl-xcb": ("libnvidia-egl-xcb.so.1", "1.0.3"),
    "libnvidia-egl-xlib": ("libnvidia-egl-xlib.so.1", "1.0.3"),
    "libnvidia-api": ("libnvidia-api.so.1", ""),
}
# In a driver's package, and nothing for containers.
NEVER: Final = {"libEGL": "libEGL.so.1", "libnvidia-gtk3": "", "libnvidia-sandboxutils": "libnvidia-sandboxutils.so.1"}
CONFIGS: Final = {
    "share/vulkan/icd.d/nvidia_icd.json": '{"ICD": {"library_path": "libGLX_nvidia.so.0"}}',
    "share/vulkan/implicit_layer.d/nvidia_layers.json": '{"layers": [{"library_path": "libGLX_nvidia.so.0"}]}',
    "share/glvnd/egl_vendor.d/10_nvidia.json": '{"ICD": {"library_path": "libEGL_nvidia.so.0"}}',
    "share/egl/egl_external_platform.d/15_nvidia_gbm.json": '{"ICD": {"library_path": "libnvidia-egl-gbm.so.1"}}',
    "share/egl/egl_external_platform.d/20_nvidia_xcb.json": '{"ICD": {"library_path": "libnvidia-egl-xcb.so.1"}}',
    "share/nvidia/nvoptix.bin": "weights",
    "share/X11/xorg.conf.d/10-nvidia.conf": 'Section "OutputClass"\nEndSection\n',
    "etc/OpenCL/vendors/nvidia.icd": "libnvidia-opencl.so.1\n",
}
PROGRAMS: Final = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
MORE_PROGRAMS: Final = ("nvidia-xconfig", "nvidia-settings")
# What the runtime libraries of a program link to themselves; the name is the other's SONAME.
LINKED_TO: Final = {"libnvidia-opencl": "libnvidia-gpucomp"}

# For any POSIX shell, busybox's too.
SMI_SCRIPT: Final = """#!/bin/sh
echo "nvidia-smi: SIMULATION of driver {version}, no GPU behind it"
found=0
for node in /dev/nvidia*; do
    [ -c "$node" ] || continue
    ls -l "$node"
    found=$((found + 1))
done
[ "$found" -gt 0 ] || {{ echo "nvidia-smi: no NVIDIA device node in /dev"; exit 9; }}
"""
OTHER_SCRIPT: Final = """#!/bin/sh
echo "{name}: SIMULATION of driver {version}"
"""


class _Places(Struct, frozen=True):
    """Where a layout keeps things."""

    libraries: str
    programs: str
    compatible: str = "lib"
    data: str = ""
    links: Mapping[str, str] | None = None


def make_driver_root(
    path: Path,
    version: str = "580.95.05",
    layout: Layout = "flat",
    *,
    compiled: bool = False,
    machine: str = "",
    everything: bool = False,
) -> Path:
    """A driver root at `path` (made when missing) and `path` itself.

    layout: `flat` as /usr/local/nvidia, the others as a whole root of that distribution. machine: as `uname -m`.
    everything: the files of every capability and 32-bit libraries, not only those of compute and utility.
    Raises: HarnessError.
    """
    machine = machine or platform.machine()
    places = _places(layout, machine)
    libraries, programs = path / places.libraries, path / places.programs
    for folder in (libraries, programs):
        folder.mkdir(parents=True, exist_ok=True)
    for link, target in (places.links or {}).items():
        (path / link).symlink_to(target)
    if compiled:
        _compile(libraries, LIBRARIES, version)
        _compile_programs(programs, version)
    else:
        _write(libraries, LIBRARIES, version, ELF_MACHINES[machine])
        for name in PROGRAMS:
            _write_program(programs / name, version)
    _link_names(libraries, version)
    if everything:
        make = _compile if compiled else partial(_write, machine=ELF_MACHINES[machine])
        make_32 = write_32 if compiled else _write_plain_32
        _more(path, places, version, machine, make, make_32)
    if layout == "debian":
        _as_debian(path, places, machine, version)
    if layout == "ubuntu" and everything:
        _as_ubuntu(path, places, version)
    return path


def put_libraries(
    root: Path,
    folder: str,
    version: str = "580.95.05",
    libraries: Sequence[str] = ("libcuda", "libnvidia-ml"),
    *,
    linked: bool = True,
) -> Path:
    """The libraries by which a driver is found, with the links that programs load. Returns `root`."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for library in libraries:
        file = write_library(root / folder / f"{library}.so.{version}", f"{library}.so.1")
        if linked:
            file.with_name(f"{library}.so.1").symlink_to(file.name)
    return root


def write_library(path: Path, soname: str, machine: str = "") -> Path:
    """An empty but valid 64-bit library."""
    return _executable(path, shared_library(soname, machine=ELF_MACHINES[machine or platform.machine()]))


def compile_stub(source: Path, target: Path, version: str, *options: str) -> Path:
    """`source` compiled to `target`, with the driver's version as STUB_VERSION. Raises: HarnessError."""
    command: list[str | Path] = [*packages.gcc(), f'-DSTUB_VERSION="{version}"', "-o", target, source, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HarnessError(f"{source.name} does not compile: {done.stderr.strip()}")
    target.chmod(0o755)
    return target


def _places(layout: Layout, machine: str) -> _Places:
    triple = f"usr/lib/{machine}-linux-gnu"
    return {
        "flat": _Places("lib64", "bin"),
        "ubuntu": _Places(
            triple,
            "usr/bin",
            compatible="usr/lib/i386-linux-gnu",
            data="usr/",
            links={"lib": "usr/lib", "bin": "usr/bin"},
        ),
        "rhel": _Places(
            "usr/lib64", "usr/bin", compatible="usr/lib", data="usr/", links={"lib64": "usr/lib64", "bin": "usr/bin"}
        ),
        "debian": _Places(
            f"{triple}/nvidia/current",
            "usr/lib/nvidia/current",
            compatible="usr/lib/i386-linux-gnu/nvidia/current",
            data="usr/",
        ),
    }[layout]


def _more(
    root: Path,
    places: _Places,
    version: str,
    machine: str,
    make: Callable[[Path, Mapping[str, str], str], None],
    make_32: Callable[[Path, str], Path],
) -> None:
    libraries, compatible = root / places.libraries, root / places.compatible
    more = VIDEO | GRAPHICS | NGX
    (libraries / "vdpau").mkdir()
    make(libraries, more | {name: soname or f"{name}.so.{version}" for name, soname in NEVER.items()}, version)
    for name, soname in more.items():
        _link(libraries, name, soname.format(V=version), version)
    for name, (soname, own) in OWN_VERSIONS.items():
        make(libraries, {name: soname}, own or "1")
        if own:
            _link(libraries, name, soname, own)
    _modules(libraries, version, machine)
    (compatible / "vdpau").mkdir(parents=True, exist_ok=True)
    for name, soname in (LIBRARIES | more).items():
        make_32(compatible / f"{name}.so.{version}", soname.format(V=version))
        _link(compatible, name, soname.format(V=version), version)
    for place, text in CONFIGS.items():
        target = root / (place if place.startswith("etc/") else places.data + place)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for name in MORE_PROGRAMS:
        _write_program(root / places.programs / name, version)


def _modules(libraries: Path, version: str, machine: str) -> None:
    """Of the X server's: the driver and its GLX."""
    folder = libraries / "xorg/modules"
    for kind in ("drivers", "extensions"):
        (folder / kind).mkdir(parents=True)
    write_library(folder / "drivers/nvidia_drv.so", "", machine)
    write_library(folder / f"extensions/libglxserver_nvidia.so.{version}", "libglxserver_nvidia.so", machine)


def write_32(path: Path, soname: str) -> Path:
    """A 32-bit library with a function."""
    return _executable(path, _library_32(soname))


def _write_plain_32(path: Path, soname: str) -> Path:
    return _executable(path, shared_library(soname, bits=32, machine=EM_386))


def _executable(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o755)
    return path


@functools.cache
def _library_32(soname: str) -> bytes:
    """Compiled once a test run: there are fifty, in each of a hundred driver roots."""
    options = ["-m32", "-shared", "-nostdlib", "-fPIC", f"-Wl,-soname,{soname}", '-DSTUB_NAME="32"']
    with tempfile.NamedTemporaryFile() as made:
        command = [*packages.gcc(), *options, "-o", made.name, str(STUBS / "library.c")]
        subprocess.run(command, capture_output=True, check=True)
        return Path(made.name).read_bytes()


def _write(libraries: Path, sonames: Mapping[str, str], version: str, machine: int) -> None:
    for name, soname in sonames.items():
        _executable(libraries / f"{name}.so.{version}", shared_library(soname.format(V=version), machine=machine))


def _write_program(path: Path, version: str) -> None:
    script = SMI_SCRIPT if path.name == "nvidia-smi" else OTHER_SCRIPT
    _executable(path, script.format(name=path.name, version=version).encode())


def _compile(libraries: Path, sonames: Mapping[str, str], version: str) -> None:
    for name in sorted(sonames, key=lambda name: name in LINKED_TO):  # those that others link to come first
        own = STUBS / f"{name}.c"
        target = libraries / f"{name}.so.{version}"
        other = LINKED_TO.get(name)
        needs = [str(libraries / f"{other}.so.{version}")] if other else []
        source = own if own.exists() else STUBS / "library.c"
        soname = sonames[name].format(V=version)
        options = ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{soname}", f'-DSTUB_NAME="{name}"']
        compile_stub(source, target, version, *options, *needs)


def _compile_programs(programs: Path, version: str) -> None:
    for name in PROGRAMS:
        _write_program(programs / name, version)
    (programs / "nvidia-smi").unlink()
    compile_stub(STUBS / "nvidia-smi.c", programs / "nvidia-smi", version)


def _link(libraries: Path, name: str, soname: str, version: str) -> None:
    """A SONAME's link beside its file."""
    file = libraries / f"{name}.so.{version}"
    link = file.with_name(soname)
    if not link.exists():
        link.symlink_to(file.name)


def _link_names(libraries: Path, version: str) -> None:
    """The links an installer makes: every SONAME, and `.so` for what one links programs against."""
    for name, soname in LIBRARIES.items():
        _link(libraries, name, soname.format(V=version), version)
    for name in ("libcuda", "libnvidia-ml"):
        (libraries / f"{name}.so").symlink_to(LIBRARIES[name])


def _as_ubuntu(root: Path, places: _Places, version: str) -> None:
    """Move what Ubuntu keeps elsewhere: VDPAU's files beside the others, X modules in a folder of their own.

    Source: canonical/nvidia-graphics-drivers debian/templates/libnvidia-decode-flavour.install.in.
    """
    for folder in (root / places.libraries, root / places.compatible):
        for link in folder.glob("vdpau/*.so.1"):
            target = link.readlink()
            (folder / "vdpau" / target).rename(folder / target)
            link.unlink()
            link.symlink_to(f"../{target}")
    modules = root / places.libraries / "nvidia/xorg"
    modules.mkdir(parents=True)
    for each in (root / places.libraries).glob("xorg/modules/*/*"):
        each.rename(modules / each.name)


def _as_debian(root: Path, places: _Places, machine: str, version: str) -> None:
    """Move what Debian keeps elsewhere, and make the links of its alternatives: tests.support.debian_driver has them.

    Libraries without a link of their own, and those of other packages, lie in the plain folder. So do all programs
    but two.
    """
    current, programs = root / places.libraries, root / places.programs
    for folder, triple in ((current, f"{machine}-linux-gnu"), (root / places.compatible, "i386-linux-gnu")):
        plain = root / "usr/lib" / triple
        entries = list(folder.glob("lib*"))
        linked = {str(each.readlink()) for each in entries if each.is_symlink()}
        for each in entries:
            if each.name.startswith("libnvidia-egl-") or (
                each.name.endswith(f".{version}") and each.name not in linked
            ):
                each.rename(plain / each.name)
        for each in folder.glob("vdpau/*"):
            each.rename(folder / each.name)
        (plain / "vdpau").mkdir(parents=True, exist_ok=True)
        for each in folder.glob("lib*"):
            if each.is_symlink():
                place = plain / "vdpau" if "vdpau" in each.name else plain
                _alternative(root, place / each.name, each, f"-{triple}")
    for each in programs.iterdir():
        if each.name in {"nvidia-smi", "nvidia-debugdump", "nvidia-settings"}:
            _alternative(root, root / "usr/bin" / each.name, each)
        else:
            folder = root / ("usr/sbin" if each.name == "nvidia-cuda-mps-server" else "usr/bin")
            folder.mkdir(parents=True, exist_ok=True)
            each.rename(folder / each.name)
    for kind in ("drivers", "extensions"):
        for each in current.glob(f"xorg/modules/{kind}/*"):
            module = each.rename(programs / each.name)
            _alternative(root, root / f"usr/lib/xorg/modules/{kind}" / each.name.removesuffix(f".{version}"), module)
    for each in root.glob("usr/share/nvidia/nvoptix.bin"):
        _alternative(root, each, each.rename(current / each.name))


def _alternative(root: Path, link: Path, target: Path, suffix: str = "") -> None:
    """A link as update-alternatives makes it: absolute, by way of /etc/alternatives, as seen from inside the root."""
    alternatives = root / "etc/alternatives"
    for folder in (alternatives, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    name = f"nvidia--{link.name}{suffix}"
    (alternatives / name).symlink_to(f"/{target.relative_to(root)}")
    link.symlink_to(f"/etc/alternatives/{name}")
