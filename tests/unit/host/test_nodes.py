"""Real nodes and links in a folder of the test's: made, mended, and never the wrong thing touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nri_gpu.host.facts import CharDevice, DevPath, HostError, Symlink
from nri_gpu.host.plan import FixNode, MakeLink, MakeNode
from nri_gpu.host.prepare import fix_node, make_link, make_node
from tests.unit.host.host_tree import CAPS, NVIDIA, OLD_UVM, UVM, HostTree

GPU = DevPath("nvidia0")
WANTED = CharDevice(NVIDIA, 0, 0o660, 12, 44)
LINK = DevPath(f"char/{NVIDIA}:0")


@pytest.fixture(autouse=True)
def strict_umask() -> object:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_a_node_is_made_whatever_the_umask(host: HostTree) -> None:
    make_node(host.dev, MakeNode(GPU, WANTED))
    assert host.entries()["nvidia0"] == WANTED


def test_its_folder_is_made_for_all_to_enter(host: HostTree) -> None:
    node = CharDevice(CAPS, 3, 0o444, 0, 0)
    make_node(host.dev, MakeNode(DevPath("nvidia-caps/nvidia-cap3"), node))
    assert host.entries()["nvidia-caps/nvidia-cap3"] == node
    assert (host.dev / "nvidia-caps").stat().st_mode & 0o7777 == 0o755


def test_a_folder_that_is_there_keeps_its_mode(host: HostTree) -> None:
    (host.dev / "nvidia-caps").mkdir()
    (host.dev / "nvidia-caps").chmod(0o750)
    make_node(host.dev, MakeNode(DevPath("nvidia-caps/nvidia-cap3"), CharDevice(CAPS, 3, 0o444, 0, 0)))
    assert (host.dev / "nvidia-caps").stat().st_mode & 0o7777 == 0o750


def test_it_is_open_to_nobody_before_it_has_its_owner(host: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    chown = os.chown

    def watched(path: str, uid: int, gid: int) -> None:
        seen.append((host.dev / "nvidia0").lstat().st_mode & 0o777)
        chown(path, uid, gid)

    monkeypatch.setattr(os, "chown", watched)
    os.umask(0)
    make_node(host.dev, MakeNode(GPU, WANTED))
    assert seen == [0o600]


def test_somebody_quicker_is_no_error(host: HostTree) -> None:
    host.node("nvidia0", NVIDIA, 0, 0o600)
    make_node(host.dev, MakeNode(GPU, WANTED))
    assert host.entries()["nvidia0"] == CharDevice(NVIDIA, 0, 0o600, 0, 0)


def test_a_node_with_another_number_is_replaced(host: HostTree) -> None:
    host.node("nvidia-uvm", OLD_UVM, 0)
    old, new = CharDevice(OLD_UVM, 0, 0o666, 0, 0), CharDevice(UVM, 0, 0o666, 0, 0)
    make_node(host.dev, MakeNode(DevPath("nvidia-uvm"), new, old))
    assert host.entries()["nvidia-uvm"] == new


def test_mode_and_owner_are_mended(host: HostTree) -> None:
    host.node("nvidia0", NVIDIA, 0, 0o600)
    inode = (host.dev / "nvidia0").stat().st_ino
    fix_node(host.dev, FixNode(GPU, WANTED, CharDevice(NVIDIA, 0, 0o600, 0, 0)))
    assert host.entries()["nvidia0"] == WANTED
    assert (host.dev / "nvidia0").stat().st_ino == inode


@pytest.mark.parametrize("kind", ["file", "link", "other number"])
def test_what_changed_since_the_look_is_not_touched(host: HostTree, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    target = host.dev / "nvidia0"
    if kind == "file":
        target.write_text("precious")
    elif kind == "link":
        target.symlink_to(victim)
    else:
        host.node("nvidia0", NVIDIA, 9)
    before = target.lstat()
    was = CharDevice(OLD_UVM, 0, 0o666, 0, 0)
    with pytest.raises(HostError, match="no longer the device"):
        fix_node(host.dev, FixNode(GPU, WANTED, was))
    with pytest.raises(HostError, match="no longer the device"):
        make_node(host.dev, MakeNode(GPU, WANTED, was))
    make_node(host.dev, MakeNode(GPU, WANTED))  # the name is taken: somebody was quicker
    after = target.lstat()
    assert (after.st_ino, after.st_mode, after.st_uid) == (before.st_ino, before.st_mode, before.st_uid)
    assert victim.read_text() == "precious"
    assert victim.stat().st_mode & 0o777 == 0o600


def test_not_even_a_link_to_the_very_device_is_followed(host: HostTree) -> None:
    """The folder that it leads to may be somebody else's."""
    was = CharDevice(NVIDIA, 0, 0o600, 0, 0)
    host.node("elsewhere", NVIDIA, 0, 0o600)
    (host.dev / "nvidia0").symlink_to("elsewhere")
    with pytest.raises(HostError, match="no longer the device"):
        fix_node(host.dev, FixNode(GPU, WANTED, was))
    with pytest.raises(HostError, match="no longer the device"):
        make_node(host.dev, MakeNode(GPU, WANTED, was))
    assert (host.dev / "elsewhere").stat().st_mode & 0o777 == 0o600
    assert (host.dev / "nvidia0").is_symlink()


def test_a_block_device_of_the_same_number_is_not_touched(host: HostTree) -> None:
    os.mknod(host.dev / "nvidia0", stat.S_IFBLK | 0o600, os.makedev(NVIDIA, 0))
    was = CharDevice(NVIDIA, 0, 0o600, 0, 0)
    with pytest.raises(HostError, match="no longer the device"):
        fix_node(host.dev, FixNode(GPU, WANTED, was))
    with pytest.raises(HostError, match="no longer the device"):
        make_node(host.dev, MakeNode(GPU, WANTED, was))
    assert (host.dev / "nvidia0").stat().st_mode == stat.S_IFBLK | 0o600


def test_a_folder_that_is_a_link_is_not_followed(host: HostTree, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (host.dev / "nvidia-caps").symlink_to(tmp_path / "elsewhere")
    (host.dev / "char").rmdir()
    (host.dev / "char").symlink_to(tmp_path / "elsewhere")
    host.node("nvidia0", NVIDIA, 0)
    with pytest.raises(NotADirectoryError):
        make_node(host.dev, MakeNode(DevPath("nvidia-caps/nvidia-cap3"), CharDevice(CAPS, 3, 0o444, 0, 0)))
    with pytest.raises(NotADirectoryError):
        make_link(host.dev, MakeLink(LINK, "../nvidia0"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_link_is_made_and_its_folder_too(host: HostTree) -> None:
    (host.dev / "char").rmdir()
    host.node("nvidia0", NVIDIA, 0)
    make_link(host.dev, MakeLink(LINK, "../nvidia0"))
    assert (host.dev / LINK).stat().st_rdev == os.makedev(NVIDIA, 0)
    assert (host.dev / "char").stat().st_mode & 0o7777 == 0o755
    make_link(host.dev, MakeLink(LINK, "../nvidia0"))  # somebody was quicker


def test_a_link_is_replaced_only_while_it_leads_where_it_did(host: HostTree) -> None:
    host.node("nvidia0", NVIDIA, 0)
    (host.dev / LINK).symlink_to("../nvidia9")
    with pytest.raises(HostError, match="no longer leads to"):
        make_link(host.dev, MakeLink(LINK, "../nvidia0", "../nvidia8"))
    make_link(host.dev, MakeLink(LINK, "../nvidia0", "../nvidia9"))
    assert host.entries()[LINK] == Symlink("../nvidia0")
    (host.dev / LINK).unlink()
    (host.dev / LINK).write_text("precious")
    with pytest.raises(OSError, match="Invalid argument"):
        make_link(host.dev, MakeLink(LINK, "../nvidia0", "../nvidia9"))
    assert (host.dev / LINK).read_text() == "precious"


@pytest.mark.parametrize(
    ("node", "words"), [(None, "is not there"), ((NVIDIA, 1), "is not the device"), ("file", "is not the device")]
)
def test_no_link_to_what_is_not_its_node(host: HostTree, node: tuple[int, int] | str | None, words: str) -> None:
    if isinstance(node, tuple):
        host.node("nvidia0", *node)
    elif node:
        host.write("dev/nvidia0", "")
    with pytest.raises(HostError, match=words):
        make_link(host.dev, MakeLink(LINK, "../nvidia0"))
    assert LINK not in host.entries()
