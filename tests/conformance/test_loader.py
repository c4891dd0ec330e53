"""The machine's own loader finds the staged driver in a container's file system, by each of the ways we mount it.

A root of its own (chroot in a private mount namespace) holds a test program, the loader and libc, and nothing else:
no cache, no configuration. The staged tree is bound into it read-only, exactly as containers get it.
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.driver.scan import scan
from nri_gpu.driver.stage import FROM_HOST, copy, stage
from tests.support.driver_root import STUBS, compile_stub, make_driver_root
from tests.support.glibc import glibc_files
from tests.support.image import File

V = "580.95.05"
TRIPLE = f"{platform.machine()}-linux-gnu"
HWCAPS = f"/usr/lib/{TRIPLE}/glibc-hwcaps/x86-64-v2"
FLAT = "/usr/local/nvidia"
BY_ENVIRONMENT = {"LD_LIBRARY_PATH": f"{FLAT}/lib64"}
NAMES = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-opencl.so.1", "libnvidia-nvvm.so.4")
TIMEOUT_S = 30

only_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="glibc has hwcaps levels on x86-64 only")


class Machine(Struct, frozen=True):
    """A file system to run programs in. tree: the staged driver on the host."""

    root: Path
    tree: Path

    def run(self, *command: str, mounts: dict[str, str], env: dict[str, str] | None = None) -> list[str]:
        """Output lines of `command`. mounts: destination inside -> path below the tree."""
        script = "set -e\n"
        for destination, source in mounts.items():
            target = self.root / destination.lstrip("/")
            if (self.tree / source).is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            script += f"mount --bind '{self.tree / source}' '{target}'\n"
            script += f"mount -o remount,bind,ro,nosuid,nodev '{target}'\n"
        words = " ".join(command)
        script += f"exec chroot '{self.root}' {words}\n"
        mine = [] if os.geteuid() == 0 else ["--map-root-user"]
        unshare = ["/usr/bin/unshare", *mine, "--mount", "--propagation", "private", "/bin/sh", "-c", script]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"} | (env or {})
        done = subprocess.run(unshare, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout.splitlines()

    def add_library(self, path: str, soname: str, version: str) -> None:
        """A library in the image, as images have them from toolkits and compatibility packages."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        compile_stub(STUBS / "libnvidia-ml.c", target, version, "-shared", "-fPIC", f"-Wl,-soname,{soname}")


@pytest.fixture(scope="module", params=["by link", "by copy"])
def staged(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    found = scan(make_driver_root(folder / "root", V, "debian", compiled=True))
    files = stage(found, folder / "drivers", FROM_HOST if request.param == "by link" else (copy,))
    return Path(files.trees[DEFAULT_CAPABILITIES].path)


@pytest.fixture
def machine(staged: Path, tmp_path: Path) -> Iterator[Machine]:
    probe = compile_stub(STUBS / "probe.c", tmp_path / "probe", V)
    root = tmp_path / "image"
    for path, entry in glibc_files({"/bin/probe": probe}).items():
        assert isinstance(entry, File)
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(entry.content)
        target.chmod(entry.mode)
    yield Machine(root, staged)
    # The mounts lived in the programs' own namespace: none can be left here.
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def found_in(folder: str) -> list[str]:
    return [f"{name} -> {folder}/{'libcuda.so.1' if name == 'libcuda.so' else name}" for name in NAMES]


def test_without_a_mount_nothing_is_found(machine: Machine) -> None:
    lines = machine.run("/bin/probe", *NAMES, mounts={}, env=BY_ENVIRONMENT)
    assert all("cannot open shared object file" in line for line in lines)
    assert len(lines) == len(NAMES)


def test_a_mount_alone_at_a_private_path_is_not_found(machine: Machine) -> None:
    lines = machine.run("/bin/probe", "libcuda.so.1", mounts={FLAT: "."})
    assert "cannot open shared object file" in lines[0]


@only_x86_64
def test_found_through_hwcaps_with_neither_cache_nor_environment(machine: Machine) -> None:
    lines = machine.run("/bin/probe", *NAMES, mounts={HWCAPS: "lib64"})
    assert lines == found_in(HWCAPS)


def test_found_through_the_environment(machine: Machine) -> None:
    lines = machine.run("/bin/probe", *NAMES, mounts={FLAT: "."}, env=BY_ENVIRONMENT)
    assert lines == found_in(f"{FLAT}/lib64")


@only_x86_64
def test_one_library_asked_for_in_both_places_is_loaded_once(machine: Machine) -> None:
    mounts = {FLAT: ".", HWCAPS: "lib64"}
    full = f"{FLAT}/lib64/libcuda.so.{V}"
    lines = machine.run("/bin/probe", "libcuda.so.1", full, mounts=mounts)
    assert lines == [f"libcuda.so.1 -> {HWCAPS}/libcuda.so.1", f"{full} -> {HWCAPS}/libcuda.so.1"]


@only_x86_64
def test_hwcaps_wins_over_a_library_of_the_image_in_the_default_folder(machine: Machine) -> None:
    machine.add_library(f"/usr/lib/{TRIPLE}/libcuda.so.1", "libcuda.so.1", "the image's")
    lines = machine.run("/bin/probe", "libcuda.so.1", mounts={HWCAPS: "lib64"})
    assert lines == [f"libcuda.so.1 -> {HWCAPS}/libcuda.so.1"]


@only_x86_64
def test_the_images_cache_wins_over_hwcaps_but_not_over_the_environment(machine: Machine) -> None:
    machine.add_library("/opt/compat/libcuda.so.1", "libcuda.so.1", "the image's")
    (machine.root / "etc").mkdir()
    (machine.root / "etc/ld.so.conf").write_text("/opt/compat\n")
    subprocess.run(["/sbin/ldconfig", "-r", machine.root], check=True, timeout=TIMEOUT_S)
    mounts = {FLAT: ".", HWCAPS: "lib64"}
    probe = ("/bin/probe", "libcuda.so.1")
    assert machine.run(*probe, mounts=mounts) == ["libcuda.so.1 -> /opt/compat/libcuda.so.1"]
    assert machine.run(*probe, mounts=mounts, env=BY_ENVIRONMENT) == [f"libcuda.so.1 -> {FLAT}/lib64/libcuda.so.1"]


@pytest.mark.parametrize(
    ("mounts", "env"),
    [
        pytest.param({HWCAPS: "lib64"}, {}, id="hwcaps", marks=only_x86_64),
        pytest.param({FLAT: "."}, BY_ENVIRONMENT, id="environment"),
    ],
)
def test_nvidia_smi_runs_from_the_usual_place(machine: Machine, mounts: dict[str, str], env: dict[str, str]) -> None:
    lines = machine.run("/usr/bin/nvidia-smi", mounts=mounts | {"/usr/bin/nvidia-smi": "bin/nvidia-smi"}, env=env)
    assert lines[0] == f"nvidia-smi: SIMULATION of driver {V}, no GPU behind it"
