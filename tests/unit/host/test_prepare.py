"""The whole of it on a host below a temporary folder: from nothing to ready, and what stands in the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.host.facts import CharDevice, Directory, HostPaths, KernelModule, Symlink
from nri_gpu.host.plan import Action, LoadModule, MakeLink, MakeNode, make_plan
from nri_gpu.host.prepare import PrepareReport, actor, prepare
from tests.unit.host.host_tree import CAPS, NVIDIA, OLD_UVM, UVM, HostTree, information, params


def prepared(host: HostTree, *, graphics: bool = False) -> PrepareReport:
    return prepare(host.look, actor(host.places, Path("/")), graphics=graphics)


def node(major: int, minor: int, mode: int = 0o666) -> CharDevice:
    return CharDevice(major, minor, mode, 0, 0)


def test_the_defaults_are_the_hosts_own() -> None:
    assert HostPaths() == HostPaths(Path("/dev"), Path("/proc"), Path("/sys"))


def test_from_a_fresh_boot_to_ready(host: HostTree) -> None:
    host.mig("gpu0/gi1", 12)
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
    # Modules, then each node before its link.
    assert [type(action) for action in report.done[:2]] == [LoadModule, LoadModule]
    assert [type(action) for action in report.done[2:]] == [MakeNode, MakeLink] * 6


def test_a_second_time_does_nothing(host: HostTree) -> None:
    prepared(host)
    again = prepared(host)
    assert (again.done, again.findings) == ((), ())
    assert len(host.calls()) == 2


def test_graphics_brings_modeset(host: HostTree) -> None:
    assert not prepared(host, graphics=True).findings
    assert host.calls()[-1] == "nvidia-modeset []"
    assert host.entries()["nvidia-modeset"] == node(NVIDIA, 254)
    assert not prepared(host, graphics=True).done


def test_a_reloaded_driver_has_another_major(host: HostTree) -> None:
    host.loaded()
    host.node("nvidia-uvm", OLD_UVM, 0)
    (host.dev / "char" / f"{OLD_UVM}:0").symlink_to("../nvidia-uvm")
    assert not prepared(host).findings
    assert host.entries()["nvidia-uvm"] == node(UVM, 0)


def test_parameters_are_honoured(host: HostTree) -> None:
    host.loaded().write("proc/driver/nvidia/params", params(uid=3, gid=44, mode=0o660))
    host.node("nvidia0", NVIDIA, 0)
    assert not prepared(host).findings
    entries = host.entries()
    assert entries["nvidia0"] == CharDevice(NVIDIA, 0, 0o660, 3, 44)
    assert entries["nvidia1"] == CharDevice(NVIDIA, 1, 0o660, 3, 44)
    assert entries["nvidia-uvm"] == node(UVM, 0)


def test_the_administrators_nodes_stay_as_they_are(host: HostTree) -> None:
    host.loaded().write("proc/driver/nvidia/params", params(modify=0))
    host.node("nvidia0", NVIDIA, 0, 0o640, 0, 44)
    report = prepared(host)
    assert {entry for path, entry in host.entries().items() if path.startswith("nvidia")} == {
        CharDevice(NVIDIA, 0, 0o640, 0, 44)
    }
    assert [str(action) for action in report.done] == [f"link /dev/char/{NVIDIA}:0 to ../nvidia0"]
    assert [finding.path for finding in report.findings] == [
        "/dev/nvidiactl",
        "/dev/nvidia1",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ]


@pytest.mark.parametrize("loads_nothing", ["sys.exit(1)", ""], ids=["fails", "does nothing"])
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
    script = (host.base / "bin/modprobe").read_text().partition("file=calls)\n")[2]
    host.modprobe(f"if sys.argv[-1] == 'nvidia-uvm': sys.exit('no such module')\n{script}")
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
    assert all(flags & os.O_PATH for path, flags in opened if "nvidia" in str(path) and "proc" not in str(path))


def test_the_plan_of_a_dry_run_is_what_is_then_done(host: HostTree) -> None:
    host.loaded().mig("gpu1/gi2/ci0", 170)
    host.node("nvidia0", NVIDIA, 0, 0o600)
    planned = make_plan(host.look())
    assert prepared(host).done == planned.actions


def test_a_bug_is_not_swallowed(host: HostTree) -> None:
    def broken(_: Action) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prepare(host.look, broken)


def test_an_unclear_gpu_does_not_keep_the_others_back(host: HostTree) -> None:
    host.loaded().write("proc/driver/nvidia/gpus/0000:18:00.0/information", "Model: x\n")
    report = prepared(host)
    assert [finding.path for finding in report.findings] == ["/proc/driver/nvidia/gpus/0000:18:00.0/information"]
    assert "nvidia1" in host.entries()
    assert "nvidia0" not in host.entries()
    host.write("proc/driver/nvidia/gpus/0000:18:00.0/information", information(0))
    assert not prepared(host).findings


def test_actions_say_what_they_do(host: HostTree) -> None:
    host.loaded()
    host.node("nvidia0", NVIDIA, 0, 0o600)
    host.node("nvidia1", NVIDIA, 9)
    (host.dev / "char" / f"{UVM}:0").symlink_to("../gone")
    done = [str(action) for action in prepared(host).done]
    assert f"fix /dev/nvidia0: char {NVIDIA}:0, mode 0666, owner 0:0 (was mode 0600, owner 0:0)" in done
    assert f"make /dev/nvidia1: char {NVIDIA}:1, mode 0666, owner 0:0, instead of {NVIDIA}:9" in done
    assert f"link /dev/char/{UVM}:0 to ../nvidia-uvm, instead of ../gone" in done
    assert str(LoadModule(KernelModule.UVM)) == "load module nvidia-uvm"
