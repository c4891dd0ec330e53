"""A daemon is found again by its note, each start has its own folders, and what clients left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.mps.mps_folders import (
    DaemonFolder,
    clients,
    leftovers,
    mount_fault,
    noted_folders,
    remove,
)
from nri_gpu.system.process import process_of
from nri_gpu.system.selinux import SHARED, label_of
from tests.support import mps
from tests.support.unit_file import OURS, Unit

UNIT = Unit.read(OURS.with_name("nri-gpu.service.d") / "mps.conf")
UUID = GpuUuid("GPU-0")
CLIENT = 1000


def daemon_folder(tmp_path: Path, generation: str = "a") -> DaemonFolder:
    made = DaemonFolder(tmp_path, UUID, generation)
    clients(tmp_path).mkdir(parents=True, exist_ok=True)
    made.make()
    return made


def test_confined_clients_may_write_there(tmp_path: Path) -> None:
    made = daemon_folder(tmp_path)
    made.make(label=SHARED)
    assert {label_of(each) for each in (made.folder, made.pipe, made.log, made.shm)} == {SHARED}


def test_what_was_noted_is_found_while_it_lives(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            process = process_of(child.pid)
            assert process is not None
            daemon_folder(tmp_path).note(process)
            assert noted_folders(tmp_path) == (DaemonFolder(tmp_path, UUID, "a"),)
            assert noted_folders(tmp_path)[0].noted() == process
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert noted_folders(tmp_path)[0].noted() is None  # dead, and its number not free yet


@pytest.mark.parametrize(
    ("note", "lives"),
    [
        pytest.param("{pid} {earlier} a\n", False, id="another process of that number"),
        pytest.param("12", False, id="no note"),
        pytest.param("{pid} {started} a\n", True, id="its own"),
    ],
)
def test_a_note_is_its_process_and_no_other(tmp_path: Path, note: str, lives: bool) -> None:
    process = process_of(os.getpid())
    assert process is not None
    text = note.format(pid=process.pid, started=process.started, earlier=process.started - 1)
    daemon_folder(tmp_path).file.write_text(text)
    (noted,) = noted_folders(tmp_path)
    assert noted.noted() == (process if lives else None)
    assert noted.uuid == UUID  # its GPU's mode is still to be given back


def test_servers_of_other_users_reach_in_and_the_note_stays_closed(tmp_path: Path) -> None:
    made = daemon_folder(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (made.file.parent, made.pipe, made.log, made.shm)}
    assert modes == {UUID: 0o700, "pipe": 0o755, "log": 0o755, "shm": 0o1777}


def test_what_no_daemon_and_no_container_has_is_left_over(tmp_path: Path) -> None:
    old, now = daemon_folder(tmp_path), daemon_folder(tmp_path, "b")
    now.file.touch()
    kept = frozenset({str(now.folder)})
    assert leftovers(tmp_path, kept) == (old.folder,)
    assert leftovers(tmp_path, kept | {str(old.folder)}) == ()
    assert leftovers(tmp_path / "nothing", kept) == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="plants what belongs to another user")
def test_nothing_that_clients_plant_stays_or_leads_elsewhere(tmp_path: Path) -> None:
    """With the rights of the unit and its drop-in, and no more."""
    victim = tmp_path / "victim"
    (victim / "folder").mkdir(parents=True)
    (victim / "file").write_text("ours")
    old = daemon_folder(tmp_path)
    plant(old.shm, victim)
    rights = ",".join(f"+{word.removeprefix('CAP_').lower()}" for word in UNIT.words("CapabilityBoundingSet"))
    code = f"from pathlib import Path\nfrom nri_gpu.mps.mps_folders import remove\nremove(Path({str(old.folder)!r}))"
    subprocess.run(["setpriv", f"--bounding-set=-all,{rights}", sys.executable, "-c", code], check=True, timeout=60)
    assert list(clients(tmp_path).iterdir()) == []
    assert (victim / "file").read_text() == "ours"
    assert (victim / "folder").is_dir()


def plant(folder: Path, victim: Path) -> None:
    """As a container's user does, whose folders root without its capabilities could not even list."""
    for name, target in (("file", "file"), ("folder", "folder"), ("up", ".."), ("loop", "loop")):
        (folder / name).symlink_to(victim / target if name != "loop" else Path("loop"))
    closed = folder / "closed"
    closed.mkdir()
    (closed / "secret").write_text("of a client")
    (closed / "folder").symlink_to(victim / "folder")
    os.mkfifo(closed / "pipe")
    for each in (closed / "secret", closed, *folder.iterdir()):
        os.chown(each, CLIENT, CLIENT, follow_symlinks=False)
    closed.chmod(0o1700)  # sticky: whose it is may remove, and who has CAP_FOWNER
    at = os.open(folder, os.O_RDONLY)  # deeper than a process has descriptors, or Python has frames
    for _ in range(3000):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_what_cannot_be_removed_now_is_left_over_and_goes_later(tmp_path: Path) -> None:
    old = daemon_folder(tmp_path)
    (old.shm / "more").mkdir()
    taken = clients(tmp_path)
    busy = old.shm / "more"
    subprocess.run(["mount", "--bind", busy, busy], check=True)
    try:
        with pytest.raises(OSError, match="busy"):
            remove(old.folder)
        assert not old.folder.exists()
        left = leftovers(tmp_path, frozenset())
    finally:
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in [each for each in mounts if each.startswith(str(taken))]:
            subprocess.run(["umount", mount], check=True)
    assert left
    for path in leftovers(tmp_path, frozenset()):
        remove(path)
    assert leftovers(tmp_path, frozenset()) == ()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    with mps.client_files(tmp_path) as base:
        yield base


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_only_a_mount_of_limited_size_will_do(mounted: Path) -> None:
    assert mount_fault(mounted) == ""
    subprocess.run(["mount", "-o", "remount,size=0", mounted], check=True)
    assert f"no file system of limited size is mounted at {mounted}" in mount_fault(mounted)


def test_where_nothing_is_mounted_it_says_what_to_do(tmp_path: Path) -> None:
    for base in (tmp_path, tmp_path / "missing"):
        assert f"no file system of its own is mounted at {base}" in mount_fault(base)
    assert r"start the systemd unit run-nri\x2dgpu-mps-clients.mount" in mount_fault(tmp_path)
