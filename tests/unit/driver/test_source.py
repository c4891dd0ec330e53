import os
from pathlib import Path

import pytest

from nri_gpu.driver.host_files import HostFile, LeftOut, examine, resolve


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "lib64").mkdir(parents=True)
    return root


@pytest.fixture
def file(root: Path) -> Path:
    path = root / "lib64/libcuda.so.580.1"
    path.write_bytes(b"x" * 10)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "target",
    ["libcuda.so.580.1", "../lib64/libcuda.so.580.1", "/lib64/libcuda.so.580.1", "{root}/lib64/libcuda.so.580.1"],
    ids=["beside it", "up and down", "absolute, as in a chroot", "absolute, as on the host"],
)
def test_a_link_below_the_root_is_followed(root: Path, file: Path, target: str) -> None:
    link = root / "lib64/libcuda.so.1"
    link.symlink_to(target.format(root=root))
    assert resolve(root, link) == file


def test_links_of_links_by_way_of_alternatives(root: Path, file: Path) -> None:
    (root / "etc/alternatives").mkdir(parents=True)
    (root / "etc/alternatives/cuda").symlink_to("/lib64/libcuda.so.580.1")
    (root / "lib64/libcuda.so").symlink_to("/etc/alternatives/cuda")
    assert resolve(root, root / "lib64/libcuda.so") == file


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "circle", "gone"])
def test_a_link_that_leaves_the_root_leads_nowhere(root: Path, target: str) -> None:
    (root.parent / "outside").write_text("secret")
    (root / "lib64/circle").symlink_to("circle")
    link = root / "lib64/libcuda.so.1"
    link.symlink_to(target)
    assert resolve(root, link) is None
    verdict = examine(root, link)
    assert verdict == LeftOut("lib64/libcuda.so.1", "leads to nothing below the driver root")


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o666])
def test_a_file_others_can_write_is_left_out(root: Path, file: Path, mode: int) -> None:
    file.chmod(mode)
    verdict = examine(root, file)
    assert isinstance(verdict, LeftOut)
    assert f"mode {mode:04o}" in verdict.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_owner_is_left_out(root: Path, file: Path) -> None:
    os.chown(file, 12345, 0)
    assert str(examine(root, file)) == (
        "lib64/libcuda.so.580.1 (owner 12345, mode 0755: others than root can change it)"
    )


def test_a_setuid_file_is_left_out(root: Path, file: Path) -> None:
    file.chmod(0o4755)
    assert examine(root, file) == LeftOut("lib64/libcuda.so.580.1", "setuid or setgid")


def test_a_folder_and_a_fifo_are_left_out(root: Path) -> None:
    os.mkfifo(root / "lib64/fifo")
    for path in (root / "lib64", root / "lib64/fifo"):
        assert examine(root, path) == LeftOut(str(path.relative_to(root)), "not a regular file")


def test_unchanged_notices_every_kind_of_change(root: Path, file: Path) -> None:
    def now() -> HostFile:
        source = examine(root, file)
        assert isinstance(source, HostFile)
        return source

    source = now()
    assert source.unchanged()
    os.utime(file, ns=(0, source.mtime_ns + 1))
    assert not source.unchanged()
    source = now()
    file.write_bytes(b"y" * 11)
    assert not source.unchanged()
    source = now()
    other = file.with_name("other")  # the way of package managers: a new file renamed over the old
    other.write_bytes(b"y" * 11)
    other.chmod(0o755)
    os.utime(other, ns=(0, source.mtime_ns))
    other.rename(file)
    assert not source.unchanged()
    file.unlink()
    assert not source.unchanged()
