"""Staging: what a generation's folder holds, repeated, interrupted and in parallel; what is staged is left alone."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.node import DriverFiles
from nri_gpu.driver.driver_scan import FoundDriver, scan
from nri_gpu.driver.host_files import HostFile
from nri_gpu.driver.stage import FROM_HOST, CopyMethod, copy, hard_link, place, prune, reflink, stage, stage_plan
from nri_gpu.system.selinux import READ_ONLY, label_if_enabled, label_of, set_label
from tests.support.driver_root import make_driver_root, write_library
from tests.support.little import small_files

V = "580.95.05"
COMPUTE, UTILITY = frozenset({Capability.COMPUTE}), frozenset({Capability.UTILITY})
BOTH = COMPUTE | UTILITY
PROJECT = Path(__file__).parents[3]
TIMEOUT_S = 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_driver_root(tmp_path / "root", V)


@pytest.fixture
def found(root: Path) -> FoundDriver:
    return scan(root)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "var/drivers"


def listing(files: DriverFiles, capabilities: frozenset[Capability]) -> set[str]:
    tree = Path(files.trees[capabilities].path)
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir()}


def names(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir())


def test_a_tree_holds_what_its_capabilities_ask_for(found: FoundDriver, base: Path) -> None:
    files = stage(found, base)
    assert (files.version, files.generation) == (V, found.generation)
    assert files.trees[UTILITY].binaries == ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced")
    assert files.trees[COMPUTE].binaries == ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
    assert listing(files, UTILITY) == {
        *(f"lib64/libnvidia-{name}" for name in (f"ml.so.{V}", "ml.so.1", "ml.so", f"cfg.so.{V}", "cfg.so.1")),
        *(f"lib64/bin/nvidia-{name}" for name in ("smi", "debugdump", "persistenced")),
    }
    assert "lib64/libcuda.so.1" in listing(files, COMPUTE)
    assert listing(files, COMPUTE).isdisjoint(listing(files, UTILITY))
    assert listing(files, BOTH) == listing(files, COMPUTE) | listing(files, UTILITY)


def test_the_libraries_folder_alone_has_the_programs_too(found: FoundDriver, base: Path) -> None:
    """It is what is mounted by default; the whole tree has them where NVIDIA's images have a PATH to."""
    tree = Path(stage(found, base).trees[BOTH].path)
    assert os.fspath((tree / "lib64/libcuda.so").readlink()) == "libcuda.so.1"
    assert os.fspath((tree / "lib64/libcuda.so.1").readlink()) == f"libcuda.so.{V}"
    assert not (tree / f"lib64/libcuda.so.{V}").is_symlink()
    assert (tree / "bin/nvidia-smi").samefile(tree / "lib64/bin/nvidia-smi")
    assert os.fspath((tree / "bin").readlink()) == "lib64/bin"


def test_every_name_of_a_library_is_known_with_its_file(found: FoundDriver, base: Path) -> None:
    files = stage(found, base)
    tree = files.trees[BOTH]
    names = {name: path for path, names in tree.libraries for name in names}
    assert names["libcuda.so"] == names["libcuda.so.1"] == f"lib64/libcuda.so.{V}"
    for name, path in names.items():
        assert not Path(tree.path, path).is_symlink()
        assert Path(tree.path, "lib64", name).samefile(Path(tree.path, path))
    paths = (path for path in Path(tree.path, "lib64").rglob("*.so*") if not path.is_dir())
    assert names.keys() == {str(path.relative_to(Path(tree.path, "lib64"))) for path in paths}
    assert {id(row) for row in files.trees[COMPUTE].libraries} <= {id(row) for row in tree.libraries}, "shared"


def test_folders_are_open_to_every_container_user_whatever_the_umask(found: FoundDriver, base: Path) -> None:
    before = os.umask(0o077)
    try:
        tree = Path(stage(found, base, (copy,)).trees[BOTH].path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tree.parent, tree, tree / "lib64", tree / "bin")} == {0o755}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tree / "lib64").iterdir() if path.is_file()} == {0o555}


@pytest.mark.parametrize("methods", [FROM_HOST, (hard_link,), (copy,)], ids=["default", "hard link", "copy"])
def test_a_generation_holds_each_file_once(found: FoundDriver, base: Path, methods: Sequence[CopyMethod]) -> None:
    files = stage(found, base, methods)
    assert stage(found, base) == files
    inodes = {Path(files.trees[caps].path, f"lib64/libcuda.so.{V}").stat().st_ino for caps in (BOTH, COMPUTE)}
    assert len(inodes) == 1


def test_the_daemon_writes_nothing_below_the_driver_root(found: FoundDriver, root: Path, base: Path) -> None:
    def state() -> dict[str, tuple[int, int, int]]:
        stats = {str(path): path.lstat() for path in root.rglob("*")}
        return {path: (each.st_mode, each.st_size, each.st_mtime_ns) for path, each in stats.items()}

    before = state()
    stage(found, base)
    assert state() == before


def test_a_full_disk_leaves_nothing(found: FoundDriver, base: Path) -> None:
    def full(original: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with pytest.raises(DriverError, match="no space left; a copy takes 0 MiB"):
        stage(found, base, (full,))
    assert names(base) == [".lock"]


def test_content_that_is_cut_short_is_not_staged(original: Path, base: Path) -> None:
    """As the last pages of a disk take a part of what is written."""
    ours = replace(HostFile.of(original, "file", original.lstat()), content=bytes(8192))
    with small_files(4096), pytest.raises(OSError, match="File too large"):
        stage_plan({"file": ours}, "1-00000000", base)
    assert names(base) == [".lock"]


def renamed_over(original: Path, target: Path) -> None:
    copy(original, target)
    write_library(original.with_name("new"), "libcuda.so.1").rename(original)


def gone(original: Path, target: Path) -> None:
    copy(original, target)
    original.unlink()


@pytest.mark.parametrize("method", [renamed_over, gone])
def test_a_host_file_that_changes_meanwhile(found: FoundDriver, base: Path, method: CopyMethod) -> None:
    with pytest.raises(DriverError, match="changed while it was staged"):
        stage(found, base, (method,))
    assert names(base) == [".lock"]


def instead(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


# What happens in a folder of staged libraries.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a file gone": lambda folder: (folder / f"libcuda.so.{V}").unlink(),
    "a file cut short": lambda folder: os.truncate(folder / f"libcuda.so.{V}", 5),
    "a file replaced": lambda folder: os.utime(folder / f"libcuda.so.{V}", ns=(0, 0)),
    "a link instead of a file": lambda folder: instead(folder / f"libcuda.so.{V}", "/etc/passwd"),
    "a link gone": lambda folder: (folder / "libcuda.so").unlink(),
    "a link astray": lambda folder: instead(folder / "libcuda.so", "libnvidia-nvvm.so.4"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_stage_is_left_alone_and_made_anew_beside(
    found: FoundDriver, base: Path, damage: Callable[[Path], object]
) -> None:
    first = stage(found, base, (copy,))
    damage(Path(first.trees[COMPUTE].path) / "lib64")
    before = {path: path.lstat().st_ino for path in (base / first.generation).rglob("*")}
    second = stage(found, base, (copy,))
    assert second.generation == f"{first.generation}.1"
    assert stage(found, base, (copy,)) == second
    assert {path: path.lstat().st_ino for path in (base / first.generation).rglob("*")} == before
    assert listing(second, BOTH) == listing(second, COMPUTE) | listing(second, UTILITY)


def test_damage_again_and_again_is_an_error(found: FoundDriver, base: Path) -> None:
    for _ in range(5):
        files = stage(found, base)
        Path(files.trees[COMPUTE].path, "lib64/libcuda.so").unlink()
    with pytest.raises(DriverError, match="something writes there"):
        stage(found, base)


def test_a_new_driver_is_a_new_folder_and_the_old_one_keeps_its_files(root: Path, base: Path) -> None:
    old = stage(scan(root), base)
    path = root / f"lib64/libcuda.so.{V}"
    content = path.read_bytes()
    write_library(path.with_name("new"), "libcuda.so.2").rename(path)  # as package managers do
    new = stage(scan(root), base)
    assert new.generation != old.generation
    assert Path(old.trees[BOTH].path, f"lib64/libcuda.so.{V}").read_bytes() == content
    assert Path(new.trees[BOTH].path, f"lib64/libcuda.so.{V}").read_bytes() == path.read_bytes()


def test_prune_removes_what_nobody_names(root: Path, base: Path) -> None:
    assert prune(base, lambda _: True) == ()
    assert not base.exists()
    generations = []
    for mtime in (1, 2, 3):
        os.utime(root / f"lib64/libcuda.so.{V}", ns=(0, mtime * 10**9))
        generations.append(stage(scan(root), base, (copy,)).generation)
    (base / "notes.txt").write_text("an operator's")
    (base / ".9-00000000.tmp").mkdir()
    assert prune(base, lambda folder: folder.name == generations[1]) == (generations[1],)
    assert {path.name for path in base.iterdir()} == {".lock", "notes.txt", generations[0], generations[2]}


def a_file(base: Path) -> None:
    base.rmdir()
    base.write_text("")


# What is wrong with the folder, and what is said.
UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "others can write to it": (lambda base: base.chmod(0o777), "users other than root can change it"),
    "its lock is a link": (lambda base: (base / ".lock").symlink_to("elsewhere"), "Too many levels of symbolic links"),
    "it is a file": (a_file, "cannot be staged in"),
}


@pytest.mark.parametrize(("spoil", "words"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_folder(found: FoundDriver, base: Path, spoil: Callable[[Path], object], words: str) -> None:
    base.mkdir(parents=True)
    spoil(base)
    with pytest.raises(DriverError, match=words):
        stage(found, base)
    assert not (base / "elsewhere").exists()


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "original"
    path.write_bytes(os.urandom(100_000))
    path.chmod(0o644)
    os.utime(path, ns=(5, 1_700_000_000_123_456_789))
    return path


def other_mount(original: Path, target: Path) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), original, None, target)


def test_a_hard_link_leaves_the_original_as_it_is(original: Path, tmp_path: Path) -> None:
    hard_link(original, tmp_path / "target")
    assert (tmp_path / "target").stat().st_ino == original.stat().st_ino
    assert stat.S_IMODE(original.stat().st_mode) == 0o644


def test_a_file_not_everybody_may_read_is_not_linked(original: Path, tmp_path: Path) -> None:
    original.chmod(0o700)
    with pytest.raises(PermissionError):
        hard_link(original, tmp_path / "target")
    place(original, tmp_path / "target", (hard_link, copy))
    assert (tmp_path / "target").read_bytes() == original.read_bytes()
    assert (tmp_path / "target").stat().st_mtime_ns == original.stat().st_mtime_ns
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o555


def test_a_reflink_is_whole_or_nothing(original: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    try:
        reflink(original, target)
    except OSError as error:  # a file system without them, which is most
        assert error.errno in {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL}
        assert not target.exists()
    else:
        assert target.read_bytes() == original.read_bytes()


def test_the_last_method_says_what_is_wrong(original: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Invalid cross-device link"):
        place(original, tmp_path / "target", (reflink, other_mount))
    with pytest.raises(FileNotFoundError):
        place(tmp_path / "gone", tmp_path / "target", (reflink, hard_link, copy))
    assert not (tmp_path / "target").exists()


def test_nothing_is_left_open(original: Path, tmp_path: Path) -> None:
    before = len(names(Path("/proc/self/fd")))
    for number, method in enumerate((reflink, hard_link, copy)):
        place(original, tmp_path / str(number), (method, copy))
    assert len(names(Path("/proc/self/fd"))) == before


# -- labels of SELinux, which can be set and read on any kernel


def labels(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): label_of(path) for path in (folder, *folder.rglob("*"))}


def test_what_confined_containers_read_is_labelled_and_the_hosts_files_are_not(
    root: Path, found: FoundDriver, base: Path
) -> None:
    """A hard link is the host's own file, so there is none; nor is one labelled that was made before."""
    for path in root.rglob("*"):
        set_label(path, "system_u:object_r:lib_t:s0")
    host, before = labels(root), stage(found, base, label="")
    linked = labels(base / before.generation)
    files = stage(found, base, label=READ_ONLY)
    assert set(labels(base / files.generation).values()) == {READ_ONLY}
    assert (labels(root), labels(base / before.generation)) == (host, linked)
    of_host = {path.stat().st_ino for path in root.rglob("*")}
    assert {path.stat().st_ino for path in (base / files.generation).rglob("*")}.isdisjoint(of_host)
    assert stage(found, base, label=READ_ONLY) == files
    assert len(names(base)) == 3  # both, and the lock


def test_only_a_kernel_with_selinux_has_labels(tmp_path: Path) -> None:
    file = tmp_path / "filesystems"
    file.write_text("nodev\ttmpfs\n")
    assert label_if_enabled(READ_ONLY, file) == ""
    file.write_text("nodev\ttmpfs\nnodev\tselinuxfs\n")
    assert label_if_enabled(READ_ONLY, file) == READ_ONLY
