"""A host below a temporary folder is prepared: modules, nodes and links, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.host.actions import Action, FixNode, LoadModule, MakeLink, MakeNode, make_plan
from nri_gpu.host.facts import CharDevice, DevPath, Directory, HostError, KernelModule, Symlink, is_loaded
from nri_gpu.host.make_nodes import (
    PrepareReport,
    actor,
    fix_node,
    load_module,
    make_link,
    make_node,
    prepare,
)
from tests.support.cgroup import Freezer
from tests.support.user_namespace import OF_THE_HOST, run
from tests.unit.host.host_tree import CAPS, LOADS, NVIDIA, OLD_UVM, UVM, HostTree


def prepared(host: HostTree, *, graphics: bool = False) -> PrepareReport:
    return prepare(host.look, actor(host.places, Path("/")), graphics=graphics)


def node(major: int, minor: int, mode: int = 0o666) -> CharDevice:
    return CharDevice(major, minor, mode, 0, 0)


@pytest.fixture(autouse=True)
def strict_umask() -> object:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_from_a_fresh_boot_to_ready(host: HostTree) -> None:
    host.mig("gpu0/gi1", 12)
    with (host.base / "proc/driver/nvidia-caps/mig-minors").open("a") as table:
        table.write("gpu0/gi2/access 21\n")  # of an instance that is gone
    (host.dev / "char").rmdir()
    report = prepared(host)
    assert not report.findings
    assert host.calls() == ["nvidia []", "nvidia-uvm []"]
    assert host.entries() == {
        "char": Directory(),
        "nvidiactl": node(NVIDIA, 255),
        "nvidia0": node(NVIDIA, 0),
        "nvidia1": node(NVIDIA, 1),
        "nvidia-uvm": node(UVM, 0),
        "nvidia-uvm-tools": node(UVM, 1),
        "nvidia-caps": Directory(),
        "nvidia-caps/nvidia-cap12": node(CAPS, 12, 0o444),
        f"char/{NVIDIA}:255": Symlink("../nvidiactl"),
        f"char/{NVIDIA}:0": Symlink("../nvidia0"),
        f"char/{NVIDIA}:1": Symlink("../nvidia1"),
        f"char/{UVM}:0": Symlink("../nvidia-uvm"),
        f"char/{UVM}:1": Symlink("../nvidia-uvm-tools"),
        f"char/{CAPS}:12": Symlink("../nvidia-caps/nvidia-cap12"),
    }
    for path in (host.dev / "char").iterdir():
        status = path.stat()
        assert path.name == f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    assert {(host.dev / folder).stat().st_mode & 0o7777 for folder in ("char", "nvidia-caps")} == {0o755}
    # Modules, then each node before its link.
    assert [type(action) for action in report.done[:2]] == [LoadModule, LoadModule]
    assert [type(action) for action in report.done[2:]] == [MakeNode, MakeLink] * 6


@pytest.mark.parametrize("loads_nothing", ["exit 1", ""], ids=["fails", "does nothing"])
def test_a_driver_that_does_not_load(host: HostTree, loads_nothing: str) -> None:
    host.modprobe(loads_nothing)
    report = prepared(host)
    assert not report.done
    assert host.calls() == ["nvidia []"]  # once, and nothing that builds on it
    assert [finding.path for finding in report.findings] == ["module nvidia", "module nvidia-uvm"]
    assert report.findings[0].reason.startswith("not loaded: /")
    assert report.findings[1].reason == "not loaded: not tried, as it depends on nvidia"
    assert list(host.entries()) == ["char"]


def test_uvm_alone_not_loading_leaves_the_rest(host: HostTree) -> None:
    host.modprobe(f"[ $module != nvidia-uvm ] || {{ echo no such module; exit 1; }}\n{LOADS}")
    report = prepared(host)
    assert [finding.path for finding in report.findings] == ["module nvidia-uvm"]
    assert host.entries()["nvidia1"] == node(NVIDIA, 1)


def test_what_may_not_be_made_is_said_once_and_its_link_not_made(
    host: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.loaded()
    tried = []

    def forbidden(name: str, *_: object, **__: object) -> None:
        tried.append(name)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "mknod", forbidden)
    report = prepared(host)
    assert not report.done
    assert tried == ["nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm", "nvidia-uvm-tools"]  # each once
    assert str(report.findings[0]) == "/dev/nvidiactl: not made: Operation not permitted"
    assert str(report.findings[1]) == f"/dev/char/{NVIDIA}:255: not made: ../nvidiactl is not there"
    assert list(host.entries()) == ["char"]


def test_somebody_who_keeps_undoing_it_does_not_keep_us(host: HostTree) -> None:
    host.loaded()
    act = actor(host.places, Path("/"))
    times = 0

    def undone(action: Action) -> None:
        nonlocal times
        times += 1
        act(action)
        if action == MakeNode("nvidia0", node(NVIDIA, 0)):  # type: ignore[arg-type]  # a path as tests write it
            (host.dev / "nvidia0").unlink()

    report = prepare(host.look, undone)
    assert times < 30
    assert "/dev/nvidia0: not made: something else on this host keeps undoing it" in map(str, report.findings)


@pytest.mark.parametrize("meddle", ["makes it", "makes it wrong", "removes the old one"])
def test_somebody_who_makes_nodes_beside_us(host: HostTree, meddle: str) -> None:
    """nvidia-modprobe runs whenever somebody starts nvidia-smi."""
    host.loaded()
    if meddle == "removes the old one":
        host.node("nvidia0", NVIDIA, 7)
    act, meddlings = actor(host.places, Path("/")), [meddle]

    def raced(action: Action) -> None:
        if isinstance(action, MakeNode) and action.path == "nvidia0" and meddlings:
            if meddlings.pop() == "removes the old one":
                (host.dev / "nvidia0").unlink()
            else:
                host.node("nvidia0", NVIDIA, 0 if meddle == "makes it" else 9, 0o600)
        act(action)

    report = prepare(host.look, raced)
    assert not [finding for finding in report.findings if "char" not in finding.path]
    assert host.entries()["nvidia0"] == node(NVIDIA, 0)


def test_a_mig_instance_that_goes_while_we_work(host: HostTree) -> None:
    host.loaded().mig("gpu0/gi1", 12)
    act = actor(host.places, Path("/"))

    def destroyed(action: Action) -> None:
        (host.base / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access").unlink(missing_ok=True)
        act(action)

    assert not prepare(host.look, destroyed).findings


def test_no_device_is_opened(host: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening one wakes the driver. O_PATH does not."""
    opened: list[tuple[object, int]] = []
    really: Callable[..., int] = os.open

    def watched(path: object, flags: int, *rest: int, **more: int) -> int:
        opened.append((path, flags))
        return really(path, flags, *rest, **more)

    host.loaded().mig("gpu0/gi1", 12)
    host.node("nvidia0", NVIDIA, 0, 0o600)
    host.node("nvidia-uvm", OLD_UVM, 0)
    monkeypatch.setattr(os, "open", watched)
    prepared(host)
    assert any(str(path).startswith("nvidia") for path, _ in opened)
    below_dev = [
        flags for path, flags in opened if "nvidia" in str(path) and not {"proc", "sys"} & {*str(path).split("/")}
    ]
    assert all(flags & os.O_PATH for flags in below_dev)


def test_a_dry_run_says_what_is_then_done(host: HostTree) -> None:
    host.loaded().mig("gpu1/gi2/ci0", 170)
    inode = host.node("nvidia0", NVIDIA, 0, 0o600).stat().st_ino
    host.node("nvidia1", NVIDIA, 9)
    (host.dev / "char" / f"{UVM}:0").symlink_to("../gone")
    planned = make_plan(host.look())
    done = [str(action) for action in planned.actions]
    assert f"fix /dev/nvidia0: char {NVIDIA}:0, mode 0666, owner 0:0 (was mode 0600, owner 0:0)" in done
    assert f"make /dev/nvidia1: char {NVIDIA}:1, mode 0666, owner 0:0, instead of {NVIDIA}:9" in done
    assert f"link /dev/char/{UVM}:0 to ../nvidia-uvm, instead of ../gone" in done
    assert prepared(host).done == planned.actions
    assert host.entries()["nvidia0"] == node(NVIDIA, 0)
    assert (host.dev / "nvidia0").stat().st_ino == inode  # mended, not replaced


HOST_ROOT = Path("/")


def test_the_kernels_program_is_called_with_the_name_alone(host: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("MODPROBE_OPTIONS", "--all")
    load_module(KernelModule.UVM, host.places, HOST_ROOT)
    assert is_loaded(host.places.sys, KernelModule.UVM)
    assert host.calls() == ["nvidia-uvm []"]


def test_another_driver_root_gives_modules_but_no_program(host: HostTree) -> None:
    load_module(KernelModule.NVIDIA, host.places, Path("/run/nvidia/driver"))
    assert host.calls() == ["-d /run/nvidia/driver nvidia []"]


SETTING = "proc/sys/kernel/modprobe"
NO_PROGRAM = "which is not an executable program"
# What becomes of the kernel's program, and what is said.
FAILURES: dict[str, tuple[Callable[[HostTree], object], str]] = {
    "says why": (
        lambda host: host.modprobe("echo FATAL: Module nvidia; echo ' not found'; exit 1"),
        "ended with 1: FATAL: Module nvidia not found",
    ),
    "says why on stderr": (lambda host: host.modprobe("echo no >&2; exit 1"), "ended with 1: no"),
    "says nothing": (lambda host: host.modprobe("exit 3"), "ended with 3: without output"),
    "does nothing": (lambda host: host.modprobe(""), "reported success, but the module is not loaded"),
    "says too much": (
        lambda host: host.modprobe("head -c 100000 /dev/zero | tr '\\0' x; exit 1"),
        r"ended with 1: x{300}$",
    ),
    "is killed": (lambda host: host.modprobe("kill -9 $$"), "ended with -9"),
    "does not start": (lambda host: host.write("bin/modprobe", "#!/no/shell\n"), "cannot be run: no such file"),
    "no setting": (lambda host: (host.base / SETTING).unlink(), "cannot be read: no such file"),
    "setting emptied": (lambda host: host.write(SETTING, "\n"), "is switched off on this host"),
    "relative": (lambda host: host.write(SETTING, "modprobe\n"), f"names modprobe, {NO_PROGRAM}"),
    "missing": (lambda host: host.write(SETTING, "/nowhere/modprobe\n"), NO_PROGRAM),
    "a folder": (lambda host: host.write(SETTING, "/tmp\n"), NO_PROGRAM),
    "no program": (lambda host: host.write(SETTING, "/etc/passwd\n"), NO_PROGRAM),
}


@pytest.mark.parametrize(("spoil", "words"), FAILURES.values(), ids=FAILURES)
def test_a_module_that_is_not_loaded_and_why(host: HostTree, spoil: Callable[[HostTree], object], words: str) -> None:
    spoil(host)
    with pytest.raises(HostError, match=words):
        load_module(KernelModule.NVIDIA, host.places, HOST_ROOT)


def test_a_complaint_is_no_failure_once_the_module_is_there(host: HostTree) -> None:
    host.write("sys/module/nvidia/initstate", "live\n")
    host.modprobe("echo modprobe.d is odd; exit 1")
    load_module(KernelModule.NVIDIA, host.places, HOST_ROOT)


def test_a_hanging_program_and_its_children_are_stopped(host: HostTree) -> None:
    host.modprobe("sleep 60 &\necho $! > $base/child\nsleep 60")
    before = time.monotonic()
    with pytest.raises(HostError, match=r"took longer than 0\.5 s and was stopped"):
        load_module(KernelModule.NVIDIA, host.places, HOST_ROOT, timeout_s=0.5)
    assert time.monotonic() - before < 10
    status = Path("/proc") / (host.base / "child").read_text().strip() / "stat"
    deadline = time.monotonic() + 5
    while status.exists() and " Z " not in status.read_text():  # an orphan, waiting for init to bury it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_that_cannot_be_killed_is_left_and_no_second_one_started(host: HostTree, freezer: Freezer) -> None:
    host.modprobe(f"{freezer.joining}echo FROZEN > {freezer.folder}/freezer.state")
    with pytest.raises(HostError, match=r"took longer than 0\.5 s and was stopped"):
        load_module(KernelModule.NVIDIA, host.places, HOST_ROOT, timeout_s=0.5)
    for _ in range(3):
        with pytest.raises(HostError, match=rf"modprobe {freezer.pids[0]} still hangs in the kernel"):
            load_module(KernelModule.UVM, host.places, HOST_ROOT, timeout_s=0.5)
    assert len(freezer.pids) == 1


def test_what_it_leaves_running_holds_nobody_up(host: HostTree) -> None:
    host.modprobe("sleep 3 &\nexit 1")
    before = time.monotonic()
    with pytest.raises(HostError, match="ended with 1"):
        load_module(KernelModule.NVIDIA, host.places, HOST_ROOT)
    assert time.monotonic() - before < 2.5


GPU = DevPath("nvidia0")
WANTED = CharDevice(NVIDIA, 0, 0o660, 12, 44)
LINK = DevPath(f"char/{NVIDIA}:0")


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


def a_file(host: HostTree, target: Path) -> None:
    target.write_text("precious")


def a_link(host: HostTree, target: Path) -> None:
    """To a node of the very number, in a folder that may be somebody else's."""
    host.node("elsewhere", OLD_UVM, 0, 0o600)
    target.symlink_to("elsewhere")


def another_number(host: HostTree, target: Path) -> None:
    host.node("nvidia0", NVIDIA, 9)


def a_block_device(host: HostTree, target: Path) -> None:
    os.mknod(target, stat.S_IFBLK | 0o600, os.makedev(OLD_UVM, 0))


@pytest.mark.parametrize("put", [a_file, a_link, another_number, a_block_device])
def test_what_changed_since_the_look_is_not_touched(host: HostTree, put: Callable[[HostTree, Path], None]) -> None:
    target = host.dev / "nvidia0"
    put(host, target)
    before = [(path, path.lstat()) for path in sorted(host.dev.iterdir())]
    was = CharDevice(OLD_UVM, 0, 0o666, 0, 0)
    with pytest.raises(HostError, match="no longer the device"):
        fix_node(host.dev, FixNode(GPU, WANTED, was))
    with pytest.raises(HostError, match="no longer the device"):
        make_node(host.dev, MakeNode(GPU, WANTED, was))
    make_node(host.dev, MakeNode(GPU, WANTED))  # the name is taken: somebody was quicker
    assert [(path, path.lstat()) for path in sorted(host.dev.iterdir())] == before


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


def test_a_link_is_replaced_only_while_it_leads_where_it_did(host: HostTree) -> None:
    host.node("nvidia0", NVIDIA, 0)
    (host.dev / LINK).symlink_to("../nvidia9")
    with pytest.raises(HostError, match="no longer leads to"):
        make_link(host.dev, MakeLink(LINK, "../nvidia0", "../nvidia8"))
    make_link(host.dev, MakeLink(LINK, "../nvidia0", "../nvidia9"))
    make_link(host.dev, MakeLink(LINK, "../nvidia0"))  # somebody was quicker
    assert host.entries()[LINK] == Symlink("../nvidia0")
    (host.dev / LINK).unlink()
    (host.dev / LINK).write_text("precious")
    with pytest.raises(OSError, match="Invalid argument"):
        make_link(host.dev, MakeLink(LINK, "../nvidia0", "../nvidia9"))
    assert (host.dev / LINK).read_text() == "precious"


def test_no_link_to_what_is_not_its_node(host: HostTree) -> None:
    host.node("nvidia0", NVIDIA, 1)
    with pytest.raises(HostError, match="is not the device"):
        make_link(host.dev, MakeLink(LINK, "../nvidia0"))
    (host.dev / "nvidia0").unlink()
    host.write("dev/nvidia0", "")
    with pytest.raises(HostError, match="is not the device"):
        make_link(host.dev, MakeLink(LINK, "../nvidia0"))
    assert LINK not in host.entries()


# What `prepare` finds and does below a folder, a line each.
PREPARE = """
import sys
from pathlib import Path
from nri_gpu.host.facts import look
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.host.make_nodes import actor, prepare
base = Path(sys.argv[1])
places = HostFolders(dev=base / "dev", proc=base / "proc", sys=base / "sys", host=base)
report = prepare(lambda: look(places), actor(places, Path("/")))
print(*(f"finding: {each}" for each in report.findings), *report.done, sep="\\n")
"""


def test_an_unprivileged_container_is_left_with_the_nodes_that_serve(host: HostTree) -> None:
    """Its host made them: they belong to users that it does not have, and it can neither make nor change any."""
    host.loaded()
    host.mig("gpu0/gi1", 7)
    host.node("nvidia-caps/nvidia-cap7", CAPS, 7, 0o444, uid=OF_THE_HOST)
    for name, number in {"nvidiactl": (NVIDIA, 255), "nvidia0": (NVIDIA, 0), "nvidia-uvm": (UVM, 0)}.items():
        host.node(name, *number, uid=OF_THE_HOST, gid=OF_THE_HOST)
    host.node("nvidia1", NVIDIA, 1, 0o660, uid=OF_THE_HOST)
    before = {name: entry for name, entry in host.entries().items() if isinstance(entry, CharDevice)}
    done = run(sys.executable, "-c", PREPARE, str(host.base))
    findings = [line for line in done.stdout.splitlines() if line.startswith("finding: ")]
    missing, closed = sorted(findings, key=lambda line: "nvidia1" in line)
    assert "/dev/nvidia-uvm-tools: is missing" in missing
    assert "an unprivileged container can make no device nodes: have its host give it this one" in missing
    assert closed == "finding: /dev/nvidia1: not changed: Operation not permitted"
    found = host.entries()
    assert {name: found[name] for name in before} == before
    assert f"link /dev/char/{NVIDIA}:0 to ../nvidia0" in done.stdout.splitlines()
    assert found[f"char/{CAPS}:7"] == Symlink("../nvidia-caps/nvidia-cap7")
