"""Which cgroup is a container's own, and whether a process is left in it: on this kernel, in both generations."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex

import pytest

from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess
from nri_gpu.system.cgroups import (
    DEVICES,
    EVENTS,
    FOLDERS_MAX,
    UNIFIED,
    ContainerCgroups,
    Mounted,
    cgroups_of,
    hierarchies,
    mounts_of,
)
from nri_gpu.system.process import process_of
from tests.support import threads
from tests.support.cgroup import OccupiedCgroup
from tests.support.little import few_descriptors
from tests.support.waiting import wait_for

# All cgroups of the machine are looked through. Other workers and other runs make some, too, and pids may be the same.
ID, OTHER = ContainerId(f"c0ffee{token_hex(8)}"), ContainerId(f"decaf{token_hex(8)}")
WANTED = frozenset({ID})
SCOPE = f"cri-containerd-{ID}.scope"
MOUNTS = mounts_of("self")


@pytest.fixture(params=[DEVICES, UNIFIED], ids=["v1", "v2"])
def controller(request: pytest.FixtureRequest) -> str:
    if request.param not in hierarchies(MOUNTS) or os.geteuid():
        pytest.skip("this machine does not let us make cgroups of that generation")
    return str(request.param)


@pytest.fixture
def tree(controller: str) -> Iterator[OccupiedCgroup]:
    made = OccupiedCgroup(controller, SCOPE)
    yield made
    made.remove()


def test_a_container_lives_as_long_as_a_process_is_in_its_cgroup_or_below(tree: OccupiedCgroup) -> None:
    cgroups = ContainerCgroups(MOUNTS, same_pids=True)
    first = cgroups.first_process(tree.process.pid, ID)
    assert first
    assert first.cgroup
    assert first.cgroup.path == f"/{tree.top.name}/{SCOPE}"
    assert cgroups.named(WANTED | {OTHER}, frozenset()) == {ID: FirstProcess(0, 0, first.cgroup)}
    assert cgroups.lives(first)
    assert cgroups.pids(first, 8) == (tree.process.pid,)
    tree.end()
    assert not cgroups.lives(first)
    tree.remove()
    assert not cgroups.lives(first)  # gone is empty


def test_it_lives_and_is_in_its_cgroup_though_its_first_thread_has_ended(controller: str) -> None:
    tree = OccupiedCgroup(controller, SCOPE, threads.started())
    try:
        before = cgroups_of(tree.process.pid)
        threads.end_first(tree.process.pid)
        assert cgroups_of(tree.process.pid) == before
        # Other tests mount other things meanwhile.
        assert hierarchies(mounts_of(tree.process.pid)) == hierarchies(MOUNTS)
        cgroups = ContainerCgroups(MOUNTS, same_pids=True)
        first = cgroups.first_process(tree.process.pid, ID)
        assert first
        assert first.cgroup == Cgroup(controller, f"/{tree.top.name}/{SCOPE}")
        assert cgroups.lives(first)
        assert cgroups.pids(first, 8) == (tree.process.pid,)
        tree.end()
        assert not cgroups.lives(first)
    finally:
        tree.remove()


def test_a_name_below_a_container_of_this_runtime_is_not_believed(tree: OccupiedCgroup) -> None:
    cgroups = ContainerCgroups(MOUNTS, same_pids=True)
    (tree.own / "inner" / OTHER).mkdir()
    tree.move(tree.own / "inner" / OTHER)
    assert cgroups.named(frozenset({OTHER}), WANTED) == {}
    (found,) = cgroups.named(frozenset({OTHER}), frozenset()).values()  # as of a node that is a container
    assert found.cgroup
    assert found.cgroup.path == f"/{tree.top.name}/{SCOPE}/inner/{OTHER}"


@pytest.mark.parametrize("ends_first", [0, 1])
def test_of_several_cgroups_with_its_name_each_that_has_a_process_holds(tree: OccupiedCgroup, ends_first: int) -> None:
    cgroups = ContainerCgroups(MOUNTS, same_pids=True)
    for name in ("a", "empty"):
        (tree.top / name / ID).mkdir(parents=True)
    second = subprocess.Popen(["sleep", "600"], text=True)
    try:
        (tree.top / "a" / ID / "cgroup.procs").write_text(str(second.pid))
        found = cgroups.named(WANTED, frozenset())[ID]
        paths = {each.path for each in (found.cgroup, *found.others) if each}
        assert paths == {f"/{tree.top.name}/{SCOPE}", f"/{tree.top.name}/a/{ID}"}
        assert sorted(cgroups.pids(found, 8)) == sorted([tree.process.pid, second.pid])
        processes = [tree.process, second]
        for each in (processes[ends_first], processes[1 - ends_first]):
            assert cgroups.lives(found)
            each.kill()
            each.wait()
        assert not cgroups.lives(found)
    finally:
        second.kill()
        second.wait()


def test_it_lives_until_all_of_many_cgroups_below_its_own_were_looked_into(
    controller: str, tree: OccupiedCgroup
) -> None:
    """On v2 the kernel counts them; on v1 one look reads so many, and a thread the rest."""
    cgroups = ContainerCgroups(MOUNTS, same_pids=True)
    first = cgroups.first_process(tree.process.pid, ID)
    assert first
    for number in range(FOLDERS_MAX + 1):
        (tree.own / "inner" / str(number)).mkdir()
    *_, last = walked(tree.own)
    tree.move(last)
    for _ in range(5):
        assert cgroups.lives(first)
        time.sleep(0.05)
    tree.end()
    assert ContainerCgroups(MOUNTS, same_pids=True).lives(first) is (controller == DEVICES)
    wait_for("its end", lambda: not cgroups.lives(first), 5)


def test_cgroups_below_each_other_are_looked_into_however_deep(tree: OccupiedCgroup) -> None:
    cgroups = ContainerCgroups(MOUNTS, same_pids=True)
    first = cgroups.first_process(tree.process.pid, ID)
    assert first
    deepest = tree.own / "inner"
    for _ in range(sys.getrecursionlimit()):
        deepest /= "a"
        deepest.mkdir()
    tree.move(deepest)
    assert cgroups.named(WANTED, frozenset()) == {ID: FirstProcess(0, 0, first.cgroup)}
    assert cgroups.named(frozenset({OTHER}), frozenset()) == {}
    for _ in range(5):
        assert cgroups.lives(first)
        time.sleep(0.05)
    tree.end()
    wait_for("its end", lambda: not cgroups.lives(first), 5)


def test_one_whose_cgroups_have_too_long_a_path_lives(tree: OccupiedCgroup) -> None:
    """Nobody can look into them by their path, and a process may be there."""
    cgroups = ContainerCgroups(MOUNTS, same_pids=True)
    first = cgroups.first_process(tree.process.pid, ID)
    assert first
    names = ["a" * 250] * (os.pathconf("/", "PC_PATH_MAX") // 250 + 1)
    with made_below(tree.own / "inner", names) as deepest:
        tree.move(Path(f"/proc/self/fd/{deepest}"))
        assert cgroups.lives(first)
        assert cgroups.named(WANTED, frozenset()).keys() == WANTED
        assert cgroups.named(frozenset({OTHER}), frozenset()) == {}
        tree.end()


def walked(cgroup: Path) -> Iterator[Path]:
    """A cgroup and those below it, in the order of a walk."""
    yield cgroup
    for each in os.scandir(cgroup):
        if each.is_dir():
            yield from walked(Path(each))


@contextmanager
def made_below(top: Path, names: Sequence[str]) -> Iterator[int]:
    """Make cgroups below each other, whose path may be too long; a descriptor of the last one."""
    with ExitStack() as stack:
        folder = os.open(top, os.O_RDONLY)
        for name in names:
            os.mkdir(name, dir_fd=folder)
            stack.callback(os.close, folder)
            stack.callback(os.rmdir, name, dir_fd=folder)
            folder = os.open(name, os.O_RDONLY, dir_fd=folder)
        stack.callback(os.close, folder)
        yield folder


def test_where_its_cgroup_is_not_seen_its_first_process_counts() -> None:
    process = subprocess.Popen(["sleep", "600"])
    cgroups = ContainerCgroups((), same_pids=True)
    first = cgroups.first_process(process.pid, ID)
    assert first == FirstProcess(process.pid, getattr(process_of(process.pid), "started", 0))
    assert cgroups.lives(first)
    assert not cgroups.lives(FirstProcess(first.pid, first.started + 1))  # another with its PID
    with few_descriptors(0):
        assert cgroups.lives(FirstProcess(first.pid, first.started + 1))  # which is not seen
    process.kill()
    wait_for("its end", lambda: not cgroups.lives(first), 5)
    process.wait()


@pytest.mark.parametrize("process", [FirstProcess(1, 1), FirstProcess(0, 0, Cgroup(DEVICES, f"/{ID}"))])
def test_a_process_that_cannot_be_seen_is_not_taken_for_gone(process: FirstProcess) -> None:
    """By a daemon in a pod without the host's PIDs, after one that saw more."""
    assert ContainerCgroups().lives(process)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (f"0::/kubepods/besteffort/pod1/{ID}", f"/kubepods/besteffort/pod1/{ID}"),
        (f"0::/kubepods.slice/crio-{ID}.scope/container", f"/kubepods.slice/crio-{ID}.scope"),
        (f"0::/of\rothers/{ID}", f"/of\rothers/{ID}"),
        (f"0::/../../kubepods/{ID}", None),  # above what is mounted here
        (f"0::/kubepods/{ID}0", None),
        (f"0::/kubepods/x{ID}", None),
        (f"0::/kubepods.slice/crio-conmon-{ID}.scope", None),  # of its monitor
        (f"5:devices:/{ID}", None),  # whose list of PIDs would be empty for us
    ],
    ids=["cgroupfs", "systemd", "a carriage return", "above", "longer", "no hyphen", "a monitor", "v1"],
)
def test_what_a_pod_sees_by_the_hosts_proc(tmp_path: Path, line: str, path: str | None) -> None:
    """Without the host's PIDs: by a second /proc, and only where the cgroup is the container's."""
    (tmp_path / "41").mkdir()
    (tmp_path / "41/stat").write_text("41 (a) b) S " + " ".join("0" * 18) + " 1234 0\n")
    (tmp_path / "41/cgroup").write_text(line + "\n")
    kinds = {"/sys/fs/cgroup": "cgroup2", "/devices": "cgroup", str(tmp_path): "proc"}
    mounts = [Mounted("0:1", "/", place, kind, frozenset({DEVICES})) for place, kind in kinds.items()]
    first = ContainerCgroups(mounts).first_process(41, ID)
    assert first == (FirstProcess(41, 1234, Cgroup(UNIFIED, path)) if path else None)
    assert ContainerCgroups(mounts[:2]).first_process(41, ID) is None


def occupied_folder(folder: Path) -> None:
    """A cgroup of v2 with a process, as its file says."""
    folder.mkdir(parents=True)
    (folder / EVENTS).write_text("populated 1\n")


def of_folder(folder: Path) -> ContainerCgroups:
    return ContainerCgroups([Mounted("0:1", "/", str(folder), "cgroup2", frozenset())])


@pytest.mark.parametrize("known", [0, 2000])
def test_a_walk_looks_into_each_folder_once_however_many_containers_are_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    ids = [ContainerId(f"{number:064x}") for number in range(200)]
    for id_ in ids:
        occupied_folder(tmp_path / f"kubepods-pod{id_[-8:]}.slice" / f"cri-containerd-{id_}.scope")
    looked: list[str] = []
    scandir = os.scandir

    def counted(folder: str) -> object:
        looked.append(str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", counted)
    others = frozenset(ContainerId(f"{number:064x}") for number in range(200, 200 + known))
    assert of_folder(tmp_path).named(frozenset(ids), others).keys() == set(ids)
    assert len(looked) == len(set(looked)) == 1 + len(ids)  # the top, and the pods


def test_a_walk_of_many_folders_costs_as_much_for_each_as_one_of_few(tmp_path: Path) -> None:
    """A pod may make a hundred thousand."""
    for number in range(20_000):
        (tmp_path / str(number % 20) / str(number)).mkdir(parents=True)
    began = time.thread_time()
    assert len(list(os.walk(tmp_path))) == 1 + 20 + 20_000
    walked = time.thread_time()
    assert of_folder(tmp_path).named(WANTED, frozenset()) == {}
    assert time.thread_time() - walked < 5 * (walked - began)


def test_a_cgroup_that_is_renamed_or_removed_while_it_is_walked_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied_folder(tmp_path / "pods" / SCOPE)
    (tmp_path / "removed").mkdir()
    scandir = os.scandir

    def moving(folder: str) -> object:
        if folder != str(tmp_path) and (tmp_path / "pods").exists():
            (tmp_path / "pods").rename(tmp_path / "renamed")
            (tmp_path / "removed").rmdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", moving)
    found = of_folder(tmp_path).named(WANTED, frozenset())
    assert found == {ID: FirstProcess(0, 0, Cgroup(UNIFIED, f"/renamed/{SCOPE}"))}


def test_a_walk_looks_once_more_where_many_cgroups_went_not_once_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod may make and remove as many as it likes."""
    for number in range(100):
        (tmp_path / "pods" / str(number)).mkdir(parents=True)
    looked: list[str] = []
    scandir = os.scandir

    def removing(folder: str) -> object:
        looked.append(Path(folder).name)
        if len(looked) == 3:
            for name in os.listdir(tmp_path / "pods"):  # noqa: PTH208 - iterdir calls os.scandir in Python 3.13
                (tmp_path / "pods" / name).rmdir()
            occupied_folder(tmp_path / "pods" / "new" / SCOPE)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", removing)
    assert of_folder(tmp_path).named(WANTED, frozenset()).keys() == {ID}
    assert looked.count("pods") == 2


def test_a_walk_that_cannot_look_into_a_cgroup_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    occupied_folder(tmp_path / "pods" / SCOPE)
    scandir = os.scandir

    def failing(folder: str) -> object:
        if folder.endswith("pods"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(OSError, match="Too many open files"):
        of_folder(tmp_path).named(WANTED, frozenset())
