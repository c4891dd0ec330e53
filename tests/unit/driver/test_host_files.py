"""A file of the host's driver: where it really is, whether containers may have it, whether it changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.driver.host_files import LeftOut, examine, resolve


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


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "circle", "gone"])
def test_a_link_that_leaves_the_root_leads_nowhere(root: Path, target: str) -> None:
    (root.parent / "outside").write_text("secret")
    (root / "lib64/circle").symlink_to("circle")
    link = root / "lib64/libcuda.so.1"
    link.symlink_to(target)
    assert resolve(root, link) is None
    verdict = examine(root, link)
    assert verdict == LeftOut("lib64/libcuda.so.1", "leads to nothing below the driver root")


@pytest.mark.parametrize("top", [False, True], ids=["a root of its own", "the whole file system"])
def test_a_path_leads_where_a_chroot_would(root: Path, file: Path, top: bool) -> None:
    """Also through folders that are links, as `lib64` is, and past a file or a name that is no path."""
    (root / "lib").symlink_to("lib64")
    (root / "far").mkdir()
    (root / "far/up").symlink_to("../../../lib")  # above the root is the root
    (root / "far/again").symlink_to("/far/./up/")
    whole = Path("/") if top else root
    assert resolve(whole, root / "lib" / file.name) == file
    assert resolve(whole, root / "lib/../far/../lib" / file.name) == file
    assert resolve(whole, root / "lib") == file.parent
    assert resolve(root, root / "far/again" / file.name) == file
    assert resolve(root, root) == root
    for nothing in ("lib/gone/more", f"lib/{file.name}/more", "a\0b", "gone/../lib"):
        assert resolve(whole, root / nothing) is None


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    "its group may write": (lambda file: file.chmod(0o775), "owner 0, mode 0775: users other than root can change it"),
    "others may write": (lambda file: file.chmod(0o757), "owner 0, mode 0757: users other than root can change it"),
    "another owner": (
        lambda file: os.chown(file, 12345, 0),
        "owner 12345, mode 0755: users other than root can change it",
    ),
    "setuid": (lambda file: file.chmod(0o4755), "setuid or setgid"),
    "setgid": (lambda file: file.chmod(0o2755), "setuid or setgid"),
    "a fifo": (fifo, "not a regular file"),
    "a folder": (folder, "not a regular file"),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("spoil", "reason"), UNFIT.values(), ids=UNFIT)
def test_an_unfit_file_is_left_out(root: Path, file: Path, spoil: Callable[[Path], object], reason: str) -> None:
    spoil(file)
    assert str(examine(root, file)) == f"lib64/libcuda.so.580.1 ({reason})"
