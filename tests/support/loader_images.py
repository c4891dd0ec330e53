"""Images in which loaders differ: by what they search themselves, and by what their image tells them."""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.support import packages
from tests.support.driver_root import STUBS, compile_stub
from tests.support.glibc import glibc_files
from tests.support.image import Entry, File, ImageSpec, Link

V: Final = "580.95.05"
LOADER, LOADER_32, LOADER_MUSL = "/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux.so.2", "/lib/ld-musl-x86_64.so.1"
OTHERS: Final = "/opt/compat"  # a libcuda of the image's own
OWN: Final = "/opt/app/lib"
# Of NVIDIA's CUDA images.
NVIDIA: Final = {
    "PATH": "/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib:/usr/local/nvidia/lib64",
}
Files = dict[str, Entry]


class Programs(Struct, frozen=True):
    """One probe for each C library, made in a folder of its own."""

    folder: Path

    def native(self) -> Path:
        """For this machine's glibc, and any as new."""
        return compile_stub(STUBS / "probe.c", self.folder / "probe", V)

    def old(self) -> Path:
        """Linked to the old libraries themselves, so that it asks for nothing newer."""
        libc = packages.glibc_231()
        linked = [str(libc / name) for name in ("libc.so.6", "libdl.so.2", "ld-2.31.so")]
        return compile_stub(STUBS / "probe.c", self.folder / "probe-old", V, "-nodefaultlibs", *linked)

    def compatible(self) -> Path:
        """A 32-bit one."""
        libc = packages.libc_32()
        linked = (str(libc / "libc.so.6"), f"-Wl,-rpath-link,{libc}", f"-Wl,-dynamic-linker,{LOADER_32}")
        options = ("-m32", "-nostdlib", "-fno-pic", "-no-pie", *linked)
        return compile_stub(STUBS / "probe32.c", self.folder / "probe32", V, *options)

    def musl(self) -> Path:
        """Linked to musl's loader, which is its C library."""
        libc = packages.musl().resolve()
        # By its name, because it has no SONAME: its path here would be asked for in the container.
        linked = (f"-L{libc.parent}", f"-l:{libc.name}", f"-Wl,-dynamic-linker,{LOADER_MUSL}")
        options = ("-nostdlib", "-fno-pic", "-no-pie", *linked)
        return compile_stub(STUBS / "musl.c", self.folder / "probe-musl", V, *options)

    def library(self, soname: str) -> Path:
        """One that needs no C library."""
        options = ("-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", '-DSTUB_NAME="own"')
        return compile_stub(STUBS / "library.c", self.folder / soname, V, *options)


def specs(folder: Path) -> dict[str, ImageSpec]:
    """Short name -> image. Programs and libraries are compiled in `folder`."""
    programs = Programs(folder)
    debian, old = _debian(programs), _old(programs)
    with_others: Files = {**debian, f"{OTHERS}/libcuda.so.1": _file(programs.library("libcuda.so.1"))}
    return {
        "debian": _spec("debian", debian),
        # The line of docs/loader.md for programs that ask ldconfig.
        "line": _spec("line", debian, env={"LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"}),
        "own path": _spec("own-path", debian, env={"LD_LIBRARY_PATH": OWN}),
        "cache": _spec("cache", with_others | _cache(with_others, OTHERS)),
        "distroless": ImageSpec(
            f"{NAME}-distroless:1", extra=glibc_files({"/bin/probe": programs.native()}), userland=False
        ),
        "rhel": _spec("rhel", _rhel(programs)),
        "old": _spec("old", old),
        "nvidia, old": _spec("nvidia-old", old, env=NVIDIA),
        "nvidia": _spec("nvidia", debian, env=NVIDIA),
        "musl": _spec("musl", _musl(programs)),
        "static": ImageSpec(),
    }


NAME: Final = "localhost/nri-gpu/loader"


def _spec(name: str, files: Files, env: Mapping[str, str] | None = None) -> ImageSpec:
    return ImageSpec(f"{NAME}-{name}:1", env=env or {}, extra=files)


def _debian(programs: Programs) -> Files:
    """With a 32-bit C library beside it, and a probe that runs as its owner."""
    probe = programs.native()
    return {
        **glibc_files({"/bin/probe": probe}),
        "/bin/probe-setuid": _file(probe, 0o4755),
        "/sbin/ldconfig": _file(Path("/sbin/ldconfig")),
        **files_32(programs),
    }


def files_32(programs: Programs) -> Files:
    """A 32-bit probe with its C library."""
    libc = packages.libc_32()
    return {
        "/bin/probe32": _file(programs.compatible()),
        LOADER_32: _file(libc / "ld-linux.so.2"),
        "/lib32/libc.so.6": _file(libc / "libc.so.6"),
    }


def _rhel(programs: Programs) -> Files:
    libc = packages.glibc_lib64()
    return {
        "/lib64": Link("usr/lib64"),
        f"/usr{LOADER}": _file(libc / Path(LOADER).name),
        "/usr/lib64/libc.so.6": _file(libc / "libc.so.6"),
        "/bin/probe": _file(programs.native()),
    }


def _old(programs: Programs) -> Files:
    libc = packages.glibc_231()
    libraries = {f"/lib/x86_64-linux-gnu/{name}": _file(libc / name) for name in ("libc.so.6", "libdl.so.2")}
    return {**libraries, LOADER: _file(libc / "ld-2.31.so"), "/bin/probe": _file(programs.old())}


def _musl(programs: Programs) -> Files:
    return {
        LOADER_MUSL: _file(packages.musl()),
        "/lib/libown.so.1": _file(programs.library("libown.so.1")),
        "/bin/probe": _file(programs.musl()),
    }


def _cache(files: Files, folder: str) -> Files:
    """As `ldconfig` writes it in an image that lists a folder in its configuration."""
    configuration: Files = {"/etc/ld.so.conf": File(f"{folder}\n".encode())}
    with tempfile.TemporaryDirectory() as root:
        for path, entry in (files | configuration).items():
            if isinstance(entry, File):
                target = Path(root, path.lstrip("/"))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(entry.content)
        subprocess.run(["/sbin/ldconfig", "-r", root], check=True, timeout=30)
        return {**configuration, "/etc/ld.so.cache": File(Path(root, "etc/ld.so.cache").read_bytes())}


def _file(path: Path, mode: int = 0o755) -> File:
    return File(path.read_bytes(), mode)
