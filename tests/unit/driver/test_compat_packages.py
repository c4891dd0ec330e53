"""CUDA's compatibility packages: which are of use, what is left out and why, what is staged and how long."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.compat_packages import FoundPackages, folder_signature, read_note, scan_compat
from nri_gpu.driver.elf import MalformedError
from nri_gpu.driver.host_files import HostFile
from nri_gpu.system.state import Changed
from tests.support import compat
from tests.support.driver_root import ELF_MACHINES, write_library
from tests.unit.driver.host import DriverHost

CUDA, V = "13.0", "580.65.06"
LIBCUDA = f"libcuda.so.{V}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "packages"
    compat.make_package(folder, CUDA, V, compat.note(CUDA, (535, 550, 570)))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "packages", symlinks=True))


def left_out(found: FoundPackages) -> list[str]:
    return list(map(str, found.left_out))


@pytest.mark.parametrize("linked", [False, True], ids=["in its folder", "a link to where it was installed"])
def test_a_package_is_what_its_files_say(folder: Path, tmp_path: Path, linked: bool) -> None:
    if linked:
        (folder / CUDA).rename(tmp_path / "compat")
        (folder / CUDA).symlink_to(tmp_path / "compat")
    found = scan_compat(folder)
    (package,) = found.packages
    assert (package.cuda, package.version, package.drivers) == ((13, 0), V, frozenset({535, 550, 570}))
    files = {name for name, each in package.files.items() if isinstance(each, HostFile)}
    assert files == {f"{name}.so.{V}" for name in compat.LIBRARIES}
    links = {name: each for name, each in package.files.items() if isinstance(each, str)}
    assert links == {soname: f"{name}.so.{V}" for name, soname in compat.LIBRARIES.items()} | {
        "libcuda.so": "libcuda.so.1"
    }
    assert not found.left_out
    assert package.generation.startswith(f"compat{CUDA}-{V}-")


def test_packages_come_the_lowest_first_by_number(folder: Path) -> None:
    for cuda in ("9.2", "12.10", "12.9"):
        shutil.copytree(folder / CUDA, folder / cuda, symlinks=True)
        write_library(folder / cuda / LIBCUDA, "libcuda.so.1")  # without a note, which names one version
    found = scan_compat(folder)
    assert [each.cuda for each in found.packages] == [(9, 2), (12, 9), (12, 10), (13, 0)]
    assert [each.drivers for each in found.packages] == [None, None, None, frozenset({535, 550, 570})]


def rename(path: Path, name: str) -> None:
    path.rename(path.with_name(name))


def no_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def no_target(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("gone")


def bad_note(path: Path) -> None:
    shutil.rmtree(path)
    compat.make_package(path.parent, CUDA, V, '{"Driver": "all of them"}')


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no version's name": (lambda p: rename(p, "cuda13"), "cuda13 (not named for a CUDA version such as 13.0)"),
    "for another CUDA": (lambda p: rename(p, "13.1"), "13.1 (its libcuda is for CUDA 13.0, which the folder is not"),
    "no libcuda": (lambda p: (p / LIBCUDA).unlink(), "13.0 (holds no usable libcuda.so.V)"),
    "two of them": (lambda p: write_library(p / "libcuda.so.570.26", "libcuda.so.1"), "13.0 (holds several: "),
    "another library's SONAME": (lambda p: write_library(p / LIBCUDA, "libcudart.so.1"), "is not libcuda.so.1)"),
    "others can write there": (
        lambda p: p.chmod(0o777),
        "13.0 (owner 0, mode 0777: users other than root can change it)",
    ),
    "no folder": (no_folder, "13.0 (Not a directory)"),
    "a note of another format": (bad_note, "is malformed"),
    "a link to nothing": (no_target, "13.0 (no such file)"),
}


@pytest.mark.parametrize(("spoil", "said"), BAD.values(), ids=BAD)
def test_a_package_that_is_none_is_left_out(folder: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(folder / CUDA)
    found = scan_compat(folder)
    assert not found.packages
    assert said in "\n".join(left_out(found))


DEBUGGER, SONAME = f"libcudadebugger.so.{V}", "libcudadebugger.so.1"
MACHINE = platform.machine()
OTHER = next(each for each in ELF_MACHINES if each != MACHINE)
ML, NVVM = f"libnvidia-ml.so.{V}", "libnvidia-nvvm.so.570.26"
# What is said of a file, and how it came there.
STRAY: dict[str, Callable[[Path], object]] = {
    f"{ML} (must be the driver's own)": lambda p: write_library(p / ML, "libnvidia-ml.so.1"),
    f"{NVVM} (not of version {V}, as its libcuda is)": lambda p: write_library(p / NVVM, "libnvidia-nvvm.so.4"),
    f"{DEBUGGER} (not a 64-bit": lambda p: (p / DEBUGGER).write_bytes(b"no ELF"),
    f"{DEBUGGER} (not a 64-bit {MACHINE} library)": lambda p: write_library(p / DEBUGGER, SONAME, OTHER),
    f"{DEBUGGER} (owner 0, mode 0666: users other than root can change it)": lambda p: (p / DEBUGGER).chmod(0o666),
    "libevil.so.1 (leads out of": lambda p: (p / "libevil.so.1").symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize(("said", "spoil"), STRAY.items(), ids=STRAY)
def test_a_stray_file_is_left_out_alone(folder: Path, said: str, spoil: Callable[[Path], object]) -> None:
    spoil(folder / CUDA)
    found = scan_compat(folder)
    assert [each.version for each in found.packages] == [V]
    assert any(each.startswith(f"13.0/{said}") for each in left_out(found)), left_out(found)
    names = {each.path.rpartition("/")[2] for each in found.left_out}
    assert names.isdisjoint(found.packages[0].files)


def test_a_folder_that_cannot_be_trusted_or_read(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o775)
    with pytest.raises(DriverError, match=r"users other than root can change it\): chown root and chmod go-w it"):
        scan_compat(folder)
    with pytest.raises(DriverError, match="no such file"):
        scan_compat(tmp_path / "gone")


def test_signs_change_with_whatever_a_scan_would_see(folder: Path) -> None:
    seen = {folder_signature(folder)}
    changes: tuple[Callable[[], object], ...] = (
        lambda: (folder / CUDA / f"libnvidia-nvvm.so.{V}").chmod(0o777),
        lambda: (folder / CUDA / f"libnvidia-nvvm.so.{V}").unlink(),
        lambda: (folder / "12.9").mkdir(),
        lambda: shutil.rmtree(folder),
    )
    for number, change in enumerate(changes, 2):
        change()
        seen.add(folder_signature(folder))
        assert len(seen) == number
    assert folder_signature(folder) == ()


NO_NOTES = (
    *("", "{", "[]", "13.0", "[" * 100_000, '{"CUDA Version": 13}', '{"CUDA Version": "thirteen"}'),
    *('{"CUDA Version": "13.0/.."}', '{"Driver": "580"}', '{"Driver": [580.5]}', '{"Driver": [true]}'),
    *('{"Driver": {"580": 1}}', '{"Driver": [' + ",".join(["1"] * 257) + "]}"),
)


@pytest.mark.parametrize("said", NO_NOTES, ids=lambda said: said[:20])
def test_a_note_of_another_format_is_refused(said: str) -> None:
    with pytest.raises(MalformedError):
        read_note(said.encode())


def test_a_note_may_lack_version_and_drivers() -> None:
    assert read_note(b"{}") == ("", frozenset())
    assert read_note(b'{"Driver": null, "New": 1}') == ("", frozenset())


@pytest.fixture
def node(folder: Path, tmp_path: Path) -> DriverHost:
    return DriverHost(tmp_path, simulated=True, packages=str(folder))


def cudas(node: DriverHost) -> list[str]:
    return [package.cuda_version for package in node.look().compat]


def test_a_package_is_staged_once_and_whole(node: DriverHost, folder: Path) -> None:
    first = node.look()
    (package,) = first.compat
    assert (package.cuda, package.drivers) == ((13, 0), frozenset({535, 550, 570}))
    assert Path(package.path).parent == node.stage_dir
    staged = Path(package.path)
    assert {each.name for each in staged.iterdir()} == {*compat.LIBRARIES.values(), "libcuda.so"} | {
        f"{name}.so.{V}" for name in compat.LIBRARIES
    }
    for name in compat.LIBRARIES.values():
        assert (staged / name).resolve().read_bytes() == (folder / CUDA / name).read_bytes()
    assert node.look() is first


def test_no_container_is_granted_the_driver_before_its_packages_are_known(node: DriverHost) -> None:
    known: list[bool] = []
    node.node_state.first(lambda: known.append(bool(node.node_state.node.compat)), Changed.NODE)
    node.look()
    assert known
    assert all(known)


def test_a_look_follows_the_folder(node: DriverHost, folder: Path) -> None:
    assert cudas(node) == [CUDA]
    shutil.copytree(folder / CUDA, folder / "12.9", symlinks=True)
    assert cudas(node) == [CUDA]  # its note is of another version
    write_library(folder / "12.9" / LIBCUDA, "libcuda.so.1")
    assert cudas(node) == ["12.9", CUDA]
    shutil.rmtree(folder / CUDA)
    assert cudas(node) == ["12.9"]
    folder.chmod(0o777)
    assert cudas(node) == []
    folder.chmod(0o755)
    assert cudas(node) == ["12.9"]
    shutil.rmtree(folder)
    assert cudas(node) == []


def test_a_package_that_could_not_be_staged_is_tried_again(node: DriverHost) -> None:
    node.stage_dir.mkdir()
    node.stage_dir.chmod(0o777)
    assert cudas(node) == []
    node.stage_dir.chmod(0o755)
    assert cudas(node) == [CUDA]
