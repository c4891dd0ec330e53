"""The programs the harness drives: containerd in two generations, runc, busybox, a compiler, Prometheus, C libraries.

What the machine has is used; the rest is unpacked once into the cache folder, and nothing is installed.
"""

import functools
import json
import os
import platform
import re
import shutil
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests import ground
from tests.support import apt
from tests.support.cache import cache_folder, kept
from tests.support.errors import HarnessError

PROGRAM_FOLDERS: Final = ("usr/bin", "usr/sbin", "bin", "sbin")
SEARCHED: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/bin")  # behind $PATH
# $1: a folder. Its usr and etc lie over the machine's, for the command that follows and what that starts.
LAID_OVER: Final = """
for each in usr etc; do
    if [ -d "$1/$each" ]; then mount -t overlay -o "lowerdir=$1/$each:/$each" none "/$each"; fi
done
shift
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" exec "$@"
"""
OLDEST: Final = (1, 7)  # the first containerd with an NRI this project can speak


class Version(StrEnum):
    """The generations of containerd that tests run on, the oldest first."""

    V1_7 = "1.7"  # NRI 0.6: no timeouts in Configure, Synchronize in one part, configuration version 2
    V2_1 = "2.1"  # NRI 0.8
    V2_3 = "2.3"  # long-term
    V2_4 = "2.4"

    @property
    def accepts(self) -> re.Pattern[str]:
        """Releases that may stand for it. Debian's sid moves on; any 2.x speaks at least NRI 0.8."""
        return re.compile(r"2\.[1-9]" if self is Version.V2_1 else rf"{re.escape(self)}\.")


# Where each comes from: a suite of Debian's, or a set of tests/ground.
SUITES: Final = {Version.V1_7: "trixie", Version.V2_1: "sid"}
SETS: Final = {Version.V2_3: "containerd-lts", Version.V2_4: "containerd"}


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
    def validates(self) -> bool:
        """Whether it has plugins validate adjustments (NRI 0.10), and fails a create when one of these is gone."""
        return self.number >= (2, 2)

    @property
    def synchronizes_between(self) -> bool:
        """Whether it synchronizes a plugin only while it makes, starts and stops nothing (containerd#11326, #11329)."""
        release = tuple(map(int, re.findall(r"\d+", self.release)[:3]))
        return release >= (2, 0, 3) or (1, 7, 26) <= release < (2,)

    @property
    def containerd(self) -> Path:
        return self.folder / "containerd"

    @property
    def ctr(self) -> Path:
        return self.folder / "ctr"


def fetch(version: Version) -> Runtime:
    """The containerd of that generation. Raises: HarnessError: it is not to be had, or has moved to another one."""
    suite = SUITES.get(version)
    folder = _cached("containerd", suite) / "usr/bin" if suite else ground.need(SETS[version])
    runtime = inspect(folder)
    if runtime is None or not version.accepts.match(runtime.release):
        has = runtime.release if runtime else "no usable containerd"
        raise HarnessError(f"containerd {version} is wanted, and there is {has} in {folder}")
    return runtime


def available() -> tuple[Version, ...]:
    """The generations that tests can run on here, the oldest first: Debian's, and what `make ground` has built."""
    return tuple(each for each in Version if each in SUITES or ground.built(SETS[each]))


def find_system() -> Runtime | None:
    """The machine's own containerd with shim and ctr beside it, when it is 1.7 or newer."""
    found = shutil.which("containerd")
    runtime = inspect(Path(found).resolve().parent) if found else None
    return runtime if runtime and runtime.number >= OLDEST else None


def find_any() -> Runtime:
    """For the demo: the machine's own containerd, else the newest of Debian's."""
    return find_system() or fetch(Version.V2_1)


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
    suite, libraries = SUITES[Version.V2_1], f"usr/lib/{platform.machine()}-linux-gnu"
    libc, seccomp = (_cached(package, suite) / libraries for package in ("libc6", "libseccomp2"))
    return _rebound(_cached("runc", suite) / "usr/bin/runc", folder, libc, seccomp)


def _rebound(program: Path, folder: Path, libc: Path, *others: Path) -> Path:
    """A copy of a program in a folder, that loads its libraries from these, and so do they."""
    [loader] = libc.glob("ld-linux-*.so.*")
    made = Path(shutil.copy(program, folder / program.name))
    patchelf, path = _program("patchelf", "patchelf"), ":".join(map(str, (libc, *others)))
    options = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", path)
    subprocess.run([patchelf, *options, made], check=True, timeout=60)
    return made


def criu(folder: Path) -> Path:
    """CRIU, which Debian has in sid alone, made in this folder; it finds its C library and all else in the cache."""
    suite, libraries = SUITES[Version.V2_1], f"usr/lib/{platform.machine()}-linux-gnu"
    tree = kept(cache_folder() / suite / "criu-whole", lambda into: apt.unpack_whole(["criu"], suite, into))
    return _rebound(tree / "usr/sbin/criu", folder, tree / libraries)


def _maps_ids(program: Path) -> bool:
    # `runc features` came before that; older ones fail here.
    said = subprocess.run([program, "features"], capture_output=True, text=True, check=False)
    features = json.loads(said.stdout) if not said.returncode else {}
    return bool(features.get("linux", {}).get("mountExtensions", {}).get("idmap", {}).get("enabled"))


def command(program: str, *packages: str) -> list[str]:
    """The command of a program of Debian's: the machine's own, else as if it were installed. Arguments as below."""
    own = _system(program)
    return [str(own)] if own else [*as_if_installed(*(packages or (program,))), program]


@functools.cache
def as_if_installed(*packages: str, suite: str = "") -> tuple[str, ...]:
    """The words in front of a command that runs as if these packages were installed. Raises: UnavailableError.

    They and what they depend on, as far as the machine lacks it, lie over its /usr and /etc for that process alone.
    suite: of a later Debian, whose C library they bring.
    """
    name = "+".join(packages)
    if suite:
        folder = cache_folder() / suite / f"{name}-whole"
        tree = kept(folder, lambda into: apt.unpack_whole(packages, suite, into))
    else:
        tree = kept(cache_folder() / "as-if-installed" / name, lambda into: apt.unpack_missing(packages, into))
    user = ["--map-root-user"] if os.geteuid() else []
    return ("unshare", *user, "--mount", "sh", "-ec", LAID_OVER, "sh", str(tree))


def gcc() -> list[str]:
    """The command of a C compiler that has the C library's headers."""
    has_headers = Path("/usr/include/stdio.h").exists()
    return command("gcc", "gcc", "libc6-dev") if has_headers else [*as_if_installed("gcc", "libc6-dev"), "gcc"]


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
    tree = _cached("libc6-amd64", architecture="i386")
    return next(folder for each in ("lib64", "usr/lib64") if (folder := tree / each).is_dir())


def musl() -> Path:
    """The loader of musl, which is its C library too."""
    tree, name = _cached("musl"), "ld-musl-x86_64.so.1"
    return next(path for each in ("lib", "usr/lib") if (path := tree / each / name).exists())


def _cached(package: str, suite: str | None = None, architecture: str = "") -> Path:
    name = f"{package}-{architecture}" if architecture else package
    return kept(
        cache_folder() / (suite or "own-release") / name, lambda into: apt.unpack(package, suite, into, architecture)
    )


def _program(package: str, name: str) -> Path:
    # Debian 13 moved the last programs from /bin to /usr/bin.
    tree = _cached(package)
    return next(path for folder in PROGRAM_FOLDERS if (path := tree / folder / name).exists())


def inspect(folder: Path) -> Runtime | None:
    """The containerd in a folder, or None where that has none with its shim and `ctr`."""
    if not all((folder / name).exists() for name in ("containerd", "containerd-shim-runc-v2", "ctr")):
        return None
    said = subprocess.run([folder / "containerd", "--version"], capture_output=True, text=True, check=False).stdout
    # "containerd <import path> <release> <revision>"; upstream's releases open with a v, and go install adds +unknown.
    match = re.search(r"\sv?(\d+\.\d+[^\s+]*)", said)
    return Runtime(folder, match[1]) if match else None


def _system(program: str) -> Path | None:
    found = shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), *SEARCHED)))
    return Path(found) if found else None


def _is_static(program: Path) -> bool:
    return subprocess.run(["ldd", program], capture_output=True, check=False).returncode != 0
