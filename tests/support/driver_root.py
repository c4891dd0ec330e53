"""Make a folder that looks like the place where a host keeps NVIDIA's user space: for tests, and for the demo.

Compiled, its libraries have functions to call and need a C compiler; otherwise they are empty libraries written by
hand, and a machine with nothing but Python makes them.
"""

import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.support.elf_file import EM_AARCH64, EM_X86_64, shared_library
from tests.support.errors import HarnessError

Layout = Literal["flat", "ubuntu", "debian", "rhel"]
STUBS: Final = Path(__file__).parent / "driver_stubs"
ELF_MACHINES: Final = {"x86_64": EM_X86_64, "aarch64": EM_AARCH64}

# Library -> its SONAME; {V} is the driver's version. As the 580 driver has them, and written down a second time on
# purpose: a mistake in the table of nri_gpu/driver is then one that a test can see.
LIBRARIES: Final = {
    "libcuda": "libcuda.so.1",
    "libcudadebugger": "libcudadebugger.so.1",
    "libnvidia-opencl": "libnvidia-opencl.so.1",
    "libnvidia-gpucomp": "libnvidia-gpucomp.so.{V}",
    "libnvidia-ptxjitcompiler": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm": "libnvidia-nvvm.so.4",
    "libnvidia-pkcs11": "libnvidia-pkcs11.so.{V}",
    "libnvidia-pkcs11-openssl3": "libnvidia-pkcs11-openssl3.so.{V}",
    "libnvidia-allocator": "libnvidia-allocator.so.1",
    "libnvidia-ml": "libnvidia-ml.so.1",
    "libnvidia-cfg": "libnvidia-cfg.so.1",
}
PROGRAMS: Final = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
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


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a layout keeps things. *_links: folder with links that lead there by way of /etc/alternatives, if any."""

    libraries: str
    programs: str
    library_links: str = ""
    program_links: str = ""
    links: Mapping[str, str] | None = None


def make_driver_root(
    path: Path, version: str = "580.95.05", layout: Layout = "flat", *, compiled: bool = False, machine: str = ""
) -> Path:
    """A driver root at `path` (made when missing) and `path` itself.

    layout: `flat` as /usr/local/nvidia, the others as a whole root of that distribution. machine: as `uname -m`.
    Raises: HarnessError: `compiled` without a C compiler.
    """
    machine = machine or platform.machine()
    places = _places(layout, machine)
    libraries, programs = path / places.libraries, path / places.programs
    for folder in (libraries, programs):
        folder.mkdir(parents=True, exist_ok=True)
    for link, target in (places.links or {}).items():
        (path / link).symlink_to(target)
    if compiled:
        _compile(libraries, programs, version)
    else:
        _write(libraries, programs, version, machine)
    _link_names(libraries, version)
    _alternatives(path, libraries, places.library_links, "glx")
    _alternatives(path, programs, places.program_links, "nvidia")
    return path


def write_library(path: Path, soname: str, machine: str = "") -> Path:
    """An empty but valid 64-bit library."""
    path.write_bytes(shared_library(soname, machine=ELF_MACHINES[machine or platform.machine()]))
    path.chmod(0o755)
    return path


def compile_stub(source: Path, target: Path, version: str, *options: str) -> Path:
    """`source` compiled to `target`, with the driver's version as STUB_VERSION. Raises: HarnessError."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise HarnessError("compiled driver libraries need a C compiler: install gcc")
    command: list[str | Path] = [compiler, f'-DSTUB_VERSION="{version}"', "-o", target, source, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HarnessError(f"{source.name} does not compile: {done.stderr.strip()}")
    target.chmod(0o755)
    return target


def _places(layout: Layout, machine: str) -> _Places:
    triple = f"usr/lib/{machine}-linux-gnu"
    return {
        "flat": _Places("lib64", "bin"),
        "ubuntu": _Places(triple, "usr/bin", links={"lib": "usr/lib", "bin": "usr/bin"}),
        "rhel": _Places("usr/lib64", "usr/bin", links={"lib64": "usr/lib64", "bin": "usr/bin"}),
        "debian": _Places(f"{triple}/nvidia/current", "usr/lib/nvidia/current", triple, "usr/bin"),
    }[layout]


def _write(libraries: Path, programs: Path, version: str, machine: str) -> None:
    for name, soname in LIBRARIES.items():
        write_library(libraries / f"{name}.so.{version}", soname.format(V=version), machine)
    for name in PROGRAMS:
        _write_program(programs / name, version)


def _write_program(path: Path, version: str) -> None:
    script = SMI_SCRIPT if path.name == "nvidia-smi" else OTHER_SCRIPT
    path.write_text(script.format(name=path.name, version=version))
    path.chmod(0o755)


def _compile(libraries: Path, programs: Path, version: str) -> None:
    for name in sorted(LIBRARIES, key=lambda name: name in LINKED_TO):  # those that others link to come first
        own = STUBS / f"{name}.c"
        target = libraries / f"{name}.so.{version}"
        other = LINKED_TO.get(name)
        needs = [str(libraries / f"{other}.so.{version}")] if other else []
        source = own if own.exists() else STUBS / "library.c"
        soname = LIBRARIES[name].format(V=version)
        options = ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{soname}", f'-DSTUB_NAME="{name}"']
        compile_stub(source, target, version, *options, *needs)
    for name in PROGRAMS:
        _write_program(programs / name, version)
    (programs / "nvidia-smi").unlink()
    compile_stub(STUBS / "nvidia-smi.c", programs / "nvidia-smi", version)


def _link_names(libraries: Path, version: str) -> None:
    """The links an installer makes: every SONAME, and `.so` for what one links programs against."""
    for name, soname in LIBRARIES.items():
        link = libraries / soname.format(V=version)
        if not link.exists():
            link.symlink_to(f"{name}.so.{version}")
    for name in ("libcuda", "libnvidia-ml"):
        (libraries / f"{name}.so").symlink_to(LIBRARIES[name])


def _alternatives(root: Path, folder: Path, links: str, group: str) -> None:
    """Links to what is in `folder`, absolute and by way of /etc/alternatives, as seen from inside the root."""
    if not links:
        return
    alternatives = root / "etc/alternatives"
    for each in (root / links, alternatives):
        each.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.is_symlink() or entry.suffix == "":
            (alternatives / f"{group}--{entry.name}").symlink_to(f"/{entry.relative_to(root)}")
            (root / links / entry.name).symlink_to(f"/etc/alternatives/{group}--{entry.name}")
