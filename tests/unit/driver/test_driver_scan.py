"""A scan of a driver root: what is found, under which names, what is left out and why; and that a change shows."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import Capability, closed_sets
from nri_gpu.driver.driver_scan import FoundDriver, changed, folder_signatures, scan
from nri_gpu.driver.search import DriverSearch, machine_of
from nri_gpu.driver.stage import stage
from nri_gpu.driver.table import STANDS_FOR
from nri_gpu.driver.trees import HOST_BINARIES, planned
from tests.support.driver_root import LIBRARIES, PROGRAMS, make_driver_root, write_library
from tests.support.elf_file import EM_386, EM_AARCH64, program, shared_library
from tests.support.user_namespace import LXC, OF_THE_HOST, SMALL, run

V = "580.95.05"
MACHINE = platform.machine()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_driver_root(tmp_path / "root", V)


def names(found: FoundDriver) -> dict[str, tuple[tuple[str, str], ...]]:
    return {file.name: file.links for file in found.libraries}


def test_the_whole_driver_is_found_by_the_names_that_programs_load(root: Path) -> None:
    found = scan(root)
    links = names(found)
    assert found.version == V
    assert set(links) == {f"{name}.so.{V}" for name in LIBRARIES}
    assert [file.name for file in found.binaries] == list(PROGRAMS)
    assert (found.unknown, found.left_out) == ((), ())
    assert found.missing[Capability.COMPUTE] == found.missing[Capability.UTILITY] == ()
    assert "libnvcuvid.so" in found.missing[Capability.VIDEO]
    assert found.missing[Capability.COMPAT32] == (("every 32-bit library",) if MACHINE == "x86_64" else ())
    assert links[f"libnvidia-ml.so.{V}"] == (
        ("libnvidia-ml.so.1", f"libnvidia-ml.so.{V}"),
        ("libnvidia-ml.so", "libnvidia-ml.so.1"),
    )
    assert links[f"libnvidia-nvvm.so.{V}"] == (("libnvidia-nvvm.so.4", f"libnvidia-nvvm.so.{V}"),)
    assert links[f"libnvidia-gpucomp.so.{V}"] == ()


def test_libcuda_gets_its_link_even_where_the_host_has_none(root: Path) -> None:
    (root / "lib64/libcuda.so").unlink()
    (root / "lib64/libcuda.so.1").unlink()
    (root / "lib64/libnvidia-ml.so").unlink()
    links = names(scan(root))
    assert links[f"libcuda.so.{V}"] == (("libcuda.so.1", f"libcuda.so.{V}"), ("libcuda.so", "libcuda.so.1"))
    assert links[f"libnvidia-ml.so.{V}"] == (("libnvidia-ml.so.1", f"libnvidia-ml.so.{V}"),)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_root_with_all_libraries_in_usr_lib(tmp_path: Path, machine: str) -> None:
    """As Talos' /usr/local/glibc: NVML and the driver's files are found alike, in what elsewhere has 32 bits."""
    flat = make_driver_root(tmp_path / "flat", V, machine=machine, everything=True)
    root = tmp_path / "glibc"
    (root / "usr").mkdir(parents=True)
    (flat / "lib64").rename(root / "usr/lib")
    (flat / "bin").rename(root / "usr/bin")
    found = scan(root, machine)
    assert (found.version, found.left_out, dict(found.lacks)) == (V, (), {})
    assert {file.name for file in found.libraries} >= {f"{name}.so.{V}" for name in LIBRARIES}
    assert found.missing[Capability.COMPUTE] == found.missing[Capability.UTILITY] == ()
    assert {file.source.path.parent for file in found.libraries} == {root / "usr/lib", root / "usr/lib/vdpau"}
    nvml = DriverSearch.below(root, machine_of(machine)).nvml(V)
    assert nvml == root / f"usr/lib/libnvidia-ml.so.{V}"


def test_another_machine(tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", V, "ubuntu", machine="aarch64")
    found = scan(root, "aarch64")
    assert (root / "usr/lib/aarch64-linux-gnu").is_dir()
    assert len(found.libraries) == len(LIBRARIES)
    with pytest.raises(DriverError, match="no NVIDIA driver for riscv64, only for x86_64, aarch64"):
        scan(root, "riscv64")


# -- versions


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["missing", "empty"])
def test_one_of_the_two_is_enough_and_compute_is_not_there(root: Path, harm: Callable[[Path], object]) -> None:
    harm(root / f"lib64/libcuda.so.{V}")
    found = scan(root)
    assert found.version == V
    assert found.missing[Capability.COMPUTE] == ("libcuda.so",)
    assert found.lacks[Capability.COMPUTE] == "libcuda.so"


@pytest.mark.parametrize(("capability", "libraries"), STANDS_FOR.items())
def test_a_capability_needs_one_of_the_libraries_that_it_stands_for(
    tmp_path: Path, capability: Capability, libraries: tuple[str, ...]
) -> None:
    root = make_driver_root(tmp_path / "root", V, everything=True)
    assert dict(scan(root).lacks) == {}
    for library in libraries:
        assert dict(scan(root).lacks) == {}
        (root / f"lib64/{library}.so.{V}").unlink()
    found = scan(root)
    assert dict(found.lacks) == {capability: " or ".join(f"{library}.so" for library in libraries)}
    without = {some for some in closed_sets() if capability in some}
    staged = planned(found, tmp_path / found.generation).trees.keys() & without
    assert bool(staged) is (capability is Capability.COMPUTE), "a compatibility package may bring a libcuda"


def test_leftovers_of_an_old_driver_are_passed_over(root: Path) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        write_library(root / f"lib64/{name}.so.550.1", f"{name}.so.1")
    found = scan(root)
    assert found.version == V
    assert all(V in name for name in names(found))


def test_the_first_folder_wins_but_a_32_bit_copy_hides_none(root: Path) -> None:
    name = f"libcuda.so.{V}"
    earlier, later = root / "usr/lib64", root / f"lib/{MACHINE}-linux-gnu"
    for folder in (earlier, later):
        folder.mkdir(parents=True)
        shutil.copy2(root / "lib64" / name, folder)
    (earlier / name).write_bytes(shared_library("libcuda.so.1", bits=32, machine=EM_386))
    assert next(iter(scan(root).libraries)).source.relative == f"lib64/{name}"


# -- what is not given to containers


def test_what_cannot_be_used_is_left_out(root: Path) -> None:
    library = root / f"lib64/libnvidia-cfg.so.{V}"
    library.write_bytes(shared_library("libnvidia-cfg.so.1", bits=32, machine=EM_386))
    (root / "bin/nvidia-smi").chmod(0o644)
    found = scan(root)
    reasons = {f"lib64/{library.name}": f"not a 64-bit {MACHINE} library", "bin/nvidia-smi": "not executable"}
    assert [str(each) for each in found.left_out] == [f"{path} ({reason})" for path, reason in reasons.items()]
    assert {library.name, "nvidia-smi"}.isdisjoint({*names(found), *(file.name for file in found.binaries)})
    assert found.missing[Capability.UTILITY] == ("libnvidia-cfg.so",)


USUAL = "/lib64/ld-linux-x86-64.so.2"
NIX = "/nix/store/0123-glibc-2.40/lib/ld-linux-x86-64.so.2"
STRANGE = "not a whole program for x86_64"
# A program, and why containers do not get it.
PROGRAMS_OF: dict[str, tuple[bytes, str]] = {
    "the usual loader": (program(USUAL), ""),
    "static": (program(""), ""),
    "a script": (f"#!{NIX}\n".encode(), ""),
    "32 bits": (program("/lib/ld-linux.so.2", bits=32, machine=EM_386), ""),
    "NixOS": (program(NIX), f"its interpreter is {NIX}, which containers do not have"),
    "musl": (program("/lib/ld-musl-x86_64.so.1"), "its interpreter is /lib/ld-musl-x86_64.so.1, which"),
    "64 bits and the loader of 32": (program("/lib/ld-linux.so.2"), "its interpreter is /lib/ld-linux.so.2, which"),
    "ARM": (program("/lib/ld-linux-aarch64.so.1", machine=EM_AARCH64), STRANGE),
    "cut off": (program(USUAL)[:60], STRANGE),
    "another byte order": (b"\x7fELF\2\2\1" + bytes(60), STRANGE),
}


@pytest.mark.parametrize(("content", "reason"), PROGRAMS_OF.values(), ids=PROGRAMS_OF)
def test_a_program_that_cannot_run_in_containers_is_not_given_to_them(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    root = make_driver_root(tmp_path / "root", V, machine="x86_64")
    (root / "bin/nvidia-smi").write_bytes(content)
    found = scan(root, "x86_64")
    assert [file.name for file in found.binaries] == list(PROGRAMS if not reason else PROGRAMS[1:])
    assert [(each.path, each.reason[: len(reason)]) for each in found.left_out] == [("bin/nvidia-smi", reason)] * bool(
        reason
    )
    host = PROGRAMS if reason.startswith("its interpreter") else ()
    assert tuple(file.name for file in found.host_binaries) == host
    files = stage(found, tmp_path / "drivers")
    assert {name for tree in files.trees.values() for name in tree.binaries} == {file.name for file in found.binaries}
    staged = tmp_path / "drivers" / files.generation / HOST_BINARIES
    assert {path.name for path in staged.glob("*")} == {*host}


def test_one_of_another_folder_is_given_instead(tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", V, machine="x86_64")
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/nvidia-smi").write_bytes(program(NIX))
    (root / "usr/bin/nvidia-smi").chmod(0o755)
    found = scan(root, "x86_64")
    assert found.host_binaries == ()
    assert [file.source.relative for file in found.binaries][:1] == ["bin/nvidia-smi"]


def test_a_folder_that_is_another_by_a_link_is_looked_at_once(tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", V, "rhel")
    (root / "usr/bin/nvidia-smi").chmod(0o775)
    (root / f"usr/lib64/libnvidia-cfg.so.{V}").chmod(0o775)
    assert [each.path for each in scan(root).left_out] == [f"usr/lib64/libnvidia-cfg.so.{V}", "usr/bin/nvidia-smi"]


def test_unknown_libraries_are_told_and_known_others_are_not(root: Path) -> None:
    for name in (f"libnvidia-newthing.so.{V}", f"libnvidia-gtk3.so.{V}", "libother.so.1.2.3"):
        write_library(root / "lib64" / name, name)
    found = scan(root)
    assert found.unknown == (f"libnvidia-newthing.so.{V}",)
    assert len(found.libraries) == len(LIBRARIES)


def test_older_and_unversioned_file_names(root: Path) -> None:
    (root / f"lib64/libnvidia-nvvm.so.{V}").rename(root / "lib64/libnvidia-nvvm.so.4.0.0")
    (root / "lib64/libnvidia-nvvm.so.4").unlink()
    write_library(root / "lib64/libnvidia-nvvm70.so.4", "libnvidia-nvvm70.so.4")
    links = names(scan(root))
    assert links["libnvidia-nvvm.so.4.0.0"] == (("libnvidia-nvvm.so.4", "libnvidia-nvvm.so.4.0.0"),)
    assert links["libnvidia-nvvm70.so.4"] == ()


@pytest.mark.parametrize("soname", ["../../etc/passwd", "a/b", "..", "", "with blank"])
def test_a_soname_that_is_no_plain_name_makes_no_link(root: Path, soname: str) -> None:
    write_library(root / f"lib64/libnvidia-allocator.so.{V}", soname)
    (root / "lib64/libnvidia-allocator.so.1").unlink()
    assert names(scan(root))[f"libnvidia-allocator.so.{V}"] == (
        ("gbm/nvidia-drm_gbm.so", f"../libnvidia-allocator.so.{V}"),
    )


def test_two_libraries_of_one_soname_share_no_name(root: Path) -> None:
    write_library(root / f"lib64/libnvidia-allocator.so.{V}", "libcuda.so.1")
    (root / "lib64/libnvidia-allocator.so").symlink_to(f"libnvidia-allocator.so.{V}")
    links = names(scan(root))
    assert ("libcuda.so.1", f"libcuda.so.{V}") in links[f"libcuda.so.{V}"]
    assert links[f"libnvidia-allocator.so.{V}"] == (
        ("gbm/nvidia-drm_gbm.so", f"../libnvidia-allocator.so.{V}"),
        ("libnvidia-allocator.so", f"libnvidia-allocator.so.{V}"),
        ("libnvidia-allocator.so.1", f"libnvidia-allocator.so.{V}"),
    )


# -- drivers that are none


def rename(path: Path, name: str) -> None:
    path.rename(path.with_name(name))


def two_versions(root: Path) -> None:
    write_library(root / "lib64/libcuda.so.550.1", "libcuda.so.1")
    (root / "lib64/libcuda.so.1").unlink()


def no_libraries(root: Path) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        (root / f"lib64/{name}.so.{V}").write_text("not a library")


def links_that_lead_out(root: Path) -> None:
    outside = root.parent / "outside"
    (root / "lib64").rename(outside)
    (root / "lib64").mkdir()
    for path in outside.iterdir():
        (root / "lib64" / path.name).symlink_to(path)


def folder_that_leads_out(root: Path) -> None:
    (root / "lib64").rename(root.parent / "outside")
    (root / "lib64").symlink_to("../outside")


def circle(root: Path) -> None:
    shutil.rmtree(root)
    root.symlink_to(root.name)


NONE = {
    f"libcuda of {V} but libnvidia-ml of 570.10": lambda root: rename(
        root / f"lib64/libnvidia-ml.so.{V}", "libnvidia-ml.so.570.10"
    ),
    f"holds libcuda of 550.1 and {V}, and no link says which": two_versions,
    f"found but not usable: lib64/libcuda.so.{V} (not an ELF file)": no_libraries,
    f"lib64/libcuda.so.{V} (leads to nothing below the driver root)": links_that_lead_out,
    f"root/lib/{MACHINE}-linux-gnu/nvidia/current": lambda root: shutil.rmtree(root / "lib64"),  # where it looked
    "root/usr/lib64": folder_that_leads_out,
    "root is not a directory": circle,
    "is not a directory": shutil.rmtree,
}


@pytest.mark.parametrize(("words", "spoil"), NONE.items(), ids=NONE)
def test_no_driver_and_why(root: Path, words: str, spoil: Callable[[Path], object]) -> None:
    spoil(root)
    with pytest.raises(DriverError, match=re.escape(words)):
        scan(root)


# -- generation


def another_of_the_same_size_and_time(file: Path) -> None:
    """As package managers put it there, under the same name."""
    shutil.copy2(file, file.with_name("twin"))
    file.with_name("twin").rename(file)


def test_the_generation_is_safe_as_a_name_and_stays(root: Path) -> None:
    generation = scan(root).generation
    assert re.fullmatch(rf"{re.escape(V)}-[0-9a-f]{{8}}", generation)
    assert scan(root).generation == generation


def test_the_generation_changes_with_every_file_and_link(tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "root", V, everything=True)

    changes: tuple[Callable[[], object], ...] = (
        lambda: os.utime(root / f"lib64/libnvidia-cfg.so.{V}", ns=(0, 1)),
        lambda: os.utime(root / "bin/nvidia-smi", ns=(0, 1)),
        lambda: write_library(root / "lib64/new", "libnvidia-nvvm.so.4").rename(root / f"lib64/libnvidia-nvvm.so.{V}"),
        lambda: another_of_the_same_size_and_time(root / f"lib64/libnvidia-ml.so.{V}"),
        lambda: (root / "lib64/libnvidia-cfg.so").symlink_to("libnvidia-cfg.so.1"),
        lambda: (root / "bin/nvidia-debugdump").unlink(),
        lambda: os.utime(root / "etc/OpenCL/vendors/nvidia.icd", ns=(0, 1)),
    )
    seen = {scan(root).generation}
    for number, change in enumerate(changes, 2):
        change()
        seen.add(scan(root).generation)
        assert len(seen) == number


# -- roots that are not to be trusted


@pytest.mark.parametrize("folder", [".", "lib64"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_to(root: Path, folder: str, mode: int) -> None:
    """They cannot make a file that we would take, but rename ours: to an older one, or away."""
    (root / folder).chmod(mode)
    with pytest.raises(DriverError) as caught:
        scan(root)
    assert str(caught.value) == (
        f"folder {root / folder} is not safe (owner {os.geteuid()}, mode {mode:04o}: users other than root can change "
        "it): chown root and chmod go-w it"
    )


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A link to a root, as a driver container's can be."""
    make_driver_root(tmp_path / "one", V)
    make_driver_root(tmp_path / "two", V)
    (tmp_path / "root").symlink_to("one")
    return tmp_path / "root"


def swap_link(root: Path) -> None:
    fresh = root.with_name("fresh")
    fresh.symlink_to("two")
    fresh.rename(root)


def swap_folder(root: Path) -> None:
    (root.parent / "one").rename(root.parent / "old")
    (root.parent / "two").rename(root.parent / "one")


def write_over(root: Path) -> None:
    path = root / f"lib64/libcuda.so.{V}"
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path.parent, ns=(path.parent.stat().st_mtime_ns,) * 2)
    assert path.stat().st_ino == before.st_ino


CHANGES: dict[str, Callable[[Path], object]] = {
    "the root's link": swap_link,
    "the root itself": swap_folder,
    "a file written over": write_over,
    "another file": lambda root: another_of_the_same_size_and_time(root / f"lib64/libcuda.so.{V}"),
    "a file touched": lambda root: os.utime(root / f"lib64/libcuda.so.{V}", ns=(0, 1)),
    "a file gone": lambda root: (root / f"lib64/libcuda.so.{V}").unlink(),
    "a file more": lambda root: write_library(root / "lib64/libnvidia-new.so.1", "libnvidia-new.so.1"),
    "a program gone": lambda root: (root / "bin/nvidia-smi").unlink(),
    "a folder more": lambda root: (root / "usr/lib64").mkdir(parents=True),
    "everything gone": lambda root: root.unlink(),
    "a file that others may write": lambda root: (root / f"lib64/libcuda.so.{V}").chmod(0o777),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_shows(linked: Path, change: Callable[[Path], object]) -> None:
    before, found = folder_signatures(linked), scan(linked)
    assert found.root == linked.resolve()
    assert not changed(linked, (), before, found)
    change(linked)
    assert changed(linked, (), before, found)


def test_a_root_that_is_not_there_changes_by_appearing(tmp_path: Path) -> None:
    before = folder_signatures(tmp_path / "root")
    assert not changed(tmp_path / "root", (), before, None)
    make_driver_root(tmp_path / "root", V)
    assert changed(tmp_path / "root", (), before, None)


# -- a machine that is an unprivileged container

SCAN = """
import sys
from pathlib import Path
from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.driver_scan import scan
try:
    found = scan(Path(sys.argv[1]))
    print(found.version, len(found.libraries), len(found.left_out))
except DriverError as error:
    print(error)
"""


@pytest.mark.parametrize(("ids", "read_only", "believed"), [(SMALL, 0, True), (LXC, 0, False), (LXC, 1, True)])
def test_its_hosts_driver(root: Path, ids: str, read_only: int, believed: bool) -> None:
    """Bind-mounted, files and folders of its host's root, who is nobody there."""
    for path in (root, *root.rglob("*")):
        os.chown(path, OF_THE_HOST, OF_THE_HOST, follow_symlinks=False)
    place = root.parent / "given"
    place.mkdir()
    mount = 'mount --bind "$1" "$2"; [ "$3" = 0 ] || mount -o remount,bind,ro "$2"; shift 3; "$@"'
    command = ("sh", "-ec", mount, "sh", str(root), str(place), str(read_only), sys.executable, "-c", SCAN, str(place))
    said = run(*command, ids=ids).stdout.strip()
    assert (said == f"{V} {len(LIBRARIES)} 0") is believed
    assert ("(owner 65534, mode 0755: users other than root can change it)" in said) is not believed
