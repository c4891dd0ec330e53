"""The programs the harness drives: containerd in two generations, runc, busybox, bpftool, Prometheus, C libraries.

What the machine has is used; the rest is unpacked once into a cache folder: $NRI_GPU_CACHE, else nri-gpu below
$XDG_CACHE_HOME or ~/.cache. Copy that folder to a machine without a network and it serves there. Delete it to refresh.
"""

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.support import apt
from tests.support.errors import HarnessError

PROGRAM_FOLDERS: Final = ("usr/bin", "usr/sbin", "bin", "sbin")
OLDEST: Final = (1, 7)  # the first containerd with an NRI this project can speak


class Version(StrEnum):
    """The containerd generations every conformance test runs on."""

    V1_7 = "1.7"  # NRI 0.6: no timeouts in Configure, Synchronize in one part, configuration version 2
    V2_1 = "2.1"  # NRI 0.8

    @property
    def suite(self) -> str:
        """The Debian suite that carries it."""
        return {Version.V1_7: "trixie", Version.V2_1: "sid"}[self]

    @property
    def accepts(self) -> re.Pattern[str]:
        """Releases that may stand for it. The second suite moves on; any 2.x speaks at least NRI 0.8."""
        return {Version.V1_7: re.compile(r"1\.7\."), Version.V2_1: re.compile(r"2\.[1-9]")}[self]


VERSIONS: Final = tuple(Version)


class Runtime(Struct, frozen=True):
    """A containerd with its shim and `ctr` in one folder.

    release: what `containerd --version` calls itself, such as `1.7.24~ds1`.
    """

    folder: Path
    release: str

    @property
    def number(self) -> tuple[int, int]:
        """Major and minor number."""
        major, minor = self.release.split(".")[:2]
        return int(major), int(re.match(r"\d+", minor)[0])  # type: ignore[index] # `release` was matched when made

    @property
    def containerd(self) -> Path:
        return self.folder / "containerd"

    @property
    def ctr(self) -> Path:
        return self.folder / "ctr"


def fetch(version: Version) -> Runtime:
    """The containerd of that generation, from the cache or from Debian.

    Raises: HarnessError without a network, or when the suite has moved to another generation.
    """
    runtime = _inspect(_cached("containerd", version.suite) / "usr/bin")
    if runtime is None or not version.accepts.match(runtime.release):
        has = runtime.release if runtime else "no usable containerd"
        raise HarnessError(
            f"containerd {version} is wanted, and Debian {version.suite} has {has} (kept in {cache_folder()})"
        )
    return runtime


def find_system() -> Runtime | None:
    """The machine's own containerd with shim and ctr beside it, when it is 1.7 or newer."""
    found = shutil.which("containerd")
    runtime = _inspect(Path(found).resolve().parent) if found else None
    return runtime if runtime and runtime.number >= OLDEST else None


def find_any() -> Runtime:
    """For the demo: the machine's own containerd, else the newest one of ours."""
    return find_system() or fetch(VERSIONS[-1])


def runc() -> Path:
    """A runc made for this machine's C library."""
    return _system("runc") or _program("runc", "runc")


def busybox() -> Path:
    """A statically linked busybox: the whole userland of the test image."""
    own = _system("busybox")
    return own if own and _is_static(own) else _program("busybox-static", "busybox")


def runc_of_bookworm() -> Path:
    """1.1.5, of the versions that look devices up in /dev/char."""
    return _cached("runc", "bookworm") / "usr/sbin/runc"


def runc_for_user_namespaces(folder: Path) -> Path:
    """A runc that can map the ids of mounts, which came with 1.2: the usual one, or else `later_runc`."""
    usual = runc()
    return usual if _maps_ids(usual) else later_runc(folder)


def later_runc(folder: Path) -> Path:
    """The runc of a later Debian, made in this folder, which finds its C library in the cache."""
    suite, libraries = Version.V2_1.suite, f"usr/lib/{platform.machine()}-linux-gnu"
    libc, seccomp = (_cached(package, suite) / libraries for package in ("libc6", "libseccomp2"))
    [loader] = libc.glob("ld-linux-*.so.*")
    made = Path(shutil.copy(_cached("runc", suite) / "usr/bin/runc", folder / "runc"))
    patchelf = _program("patchelf", "patchelf")
    subprocess.run(
        [patchelf, "--set-interpreter", loader, "--set-rpath", f"{libc}:{seccomp}", made], check=True, timeout=60
    )
    return made


def _maps_ids(program: Path) -> bool:
    # `runc features` came before that; older ones fail here.
    said = subprocess.run([program, "features"], capture_output=True, text=True, check=False)
    features = json.loads(said.stdout) if not said.returncode else {}
    return bool(features.get("linux", {}).get("mountExtensions", {}).get("idmap", {}).get("enabled"))


def bpftool() -> Path:
    """Shows which programs filter a cgroup's devices on cgroup v2."""
    return _system("bpftool") or _program("bpftool", "bpftool")


def tmux() -> list[str]:
    """The command of a tmux: the system's, or Debian's with the libraries that it brings along."""
    if own := _system("tmux"):
        return [str(own)]
    libraries = [_cached("libutempter0"), _libevent()]
    found = ":".join(str(each / f"usr/lib/{platform.machine()}-linux-gnu") for each in libraries)
    return ["env", f"LD_LIBRARY_PATH={found}", str(_program("tmux", "tmux"))]


def groff() -> list[str]:
    """The command of a formatter of man pages, the system's or Debian's."""
    if own := _system("groff"):
        return [str(own)]
    tree = _cached("groff-base") / "usr"
    version = next(each for each in (tree / "share/groff").iterdir() if (each / "tmac").is_dir())
    paths = {"PATH": tree / "bin", "GROFF_FONT_PATH": version / "font", "GROFF_TMAC_PATH": version / "tmac"}
    return ["env", *(f"{name}={path}" for name, path in paths.items()), str(tree / "bin/groff")]


def zsh() -> tuple[Path, list[Path], Path]:
    """Debian's zsh, the folders of its functions, and that of its modules."""
    program, functions = _program("zsh", "zsh"), _cached("zsh-common") / "usr/share/zsh/functions"
    (modules,) = (_cached("zsh") / f"usr/lib/{platform.machine()}-linux-gnu/zsh").iterdir()
    return program, [functions, *(each for each in functions.rglob("*") if each.is_dir())], modules


def fish(folder: Path) -> list[str]:
    """The command of Debian's fish, which looks for its own files beside its program: in this folder."""
    own = _cached("fish-common")
    for name, lies in (("bin/fish", _program("fish", "fish")), ("share", own / "usr/share"), ("etc", own / "etc")):
        made = folder / name
        made.parent.mkdir(parents=True, exist_ok=True)
        if made.parent == folder:
            made.symlink_to(lies)
        else:
            shutil.copy(lies, made)  # a link would lead it back
    libraries = _cached("libpcre2-32-0") / f"usr/lib/{platform.machine()}-linux-gnu"
    return ["env", f"LD_LIBRARY_PATH={libraries}", f"HOME={folder}", str(folder / "bin/fish"), "--no-config"]


def _libevent() -> Path:
    try:
        return _cached("libevent-core-2.1-7t64")  # since Debian 13
    except HarnessError:
        return _cached("libevent-core-2.1-7")


def libfaketime() -> Path:
    """A library that, loaded first, shows a program another time than the machine's."""
    return _cached("libfaketime") / f"usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketime.so.1"


def prometheus() -> Path:
    """The server; `promtool` lies beside it."""
    return _program("prometheus", "prometheus")


def libc_32() -> Path:
    """The folder of a C library for 32-bit programs on x86-64: `ld-linux.so.2`, `libc.so.6`."""
    tree = _cached("libc6-i386")
    return next(folder for each in ("lib32", "usr/lib32") if (folder := tree / each).is_dir())


def glibc_231() -> Path:
    """The folder of a C library from before glibc-hwcaps: of Debian 11, as Debian lays it out."""
    return _cached("libc6", "bullseye") / "lib/x86_64-linux-gnu"


def python_39() -> tuple[Path, ...]:
    """Two folders which together are Debian 11's Python without most of its library, to lay over a root."""
    return tuple(_cached(package, "bullseye") for package in ("python3.9-minimal", "libpython3.9-minimal"))


def glibc_lib64() -> Path:
    """The folder of a C library whose loader searches /lib64 and /usr/lib64, and no folder of Debian's.

    That is what Debian's 32-bit port ships for 64-bit programs, and what a RHEL has.
    """
    return _cached("libc6-amd64", architecture="i386") / "lib64"


def musl() -> Path:
    """The loader of musl, which is its C library too."""
    return _cached("musl") / "lib/ld-musl-x86_64.so.1"


def cache_folder() -> Path:
    if chosen := os.environ.get("NRI_GPU_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "nri-gpu"


def _cached(package: str, suite: str | None = None, architecture: str = "") -> Path:
    folder = cache_folder() / (suite or "own-release") / (f"{package}-{architecture}" if architecture else package)
    with one_at_a_time(folder.with_suffix(".lock")):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            apt.unpack(package, suite, unfinished, architecture)
            unfinished.rename(folder)
    return folder


def _program(package: str, name: str) -> Path:
    # Debian 13 moved the last programs from /bin to /usr/bin.
    tree = _cached(package)
    return next(path for folder in PROGRAM_FOLDERS if (path := tree / folder / name).exists())


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    # Parallel test workers want the same package in the same second.
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _inspect(folder: Path) -> Runtime | None:
    if not all((folder / name).exists() for name in ("containerd", "containerd-shim-runc-v2", "ctr")):
        return None
    said = subprocess.run([folder / "containerd", "--version"], capture_output=True, text=True, check=False).stdout
    # "containerd <import path> <release> <revision>"; upstream's releases open with a v.
    match = re.search(r"\sv?(\d+\.\d+\S*)", said)
    return Runtime(folder, match[1]) if match else None


def _system(program: str) -> Path | None:
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin:/bin")
    return Path(found).resolve() if found else None


def _is_static(program: Path) -> bool:
    return subprocess.run(["ldd", program], capture_output=True, check=False).returncode != 0
