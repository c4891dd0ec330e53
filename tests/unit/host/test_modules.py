"""Loading modules: the kernel's own program, no shell, no environment, and no waiting for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nri_gpu.host.facts import HostError, KernelModule, is_loaded
from nri_gpu.host.prepare import load_module, modprobe_program
from tests.unit.host.host_tree import HostTree

ROOT = Path("/")


def test_the_kernels_program_is_called_with_the_name_alone(host: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("MODPROBE_OPTIONS", "--all")
    load_module(KernelModule.UVM, host.places, ROOT)
    assert is_loaded(host.places.sys, KernelModule.UVM)
    assert host.calls() == ["nvidia-uvm []"]


def test_another_driver_root_gives_modules_but_no_program(host: HostTree) -> None:
    load_module(KernelModule.NVIDIA, host.places, Path("/run/nvidia/driver"))
    assert host.calls() == ["-d /run/nvidia/driver nvidia []"]


FAILURES = {
    "says why": (
        "print('FATAL: Module nvidia\\n not found'); sys.exit(1)",
        "ended with 1: FATAL: Module nvidia not found",
    ),
    "says why on stderr": ("print('no such device', file=sys.stderr); sys.exit(1)", "ended with 1: no such device"),
    "says nothing": ("sys.exit(3)", "ended with 3: without output"),
    "does nothing": ("", "reported success, but the module is not loaded"),
    "says too much": ("print('x' * 100_000); sys.exit(1)", r"ended with 1: x{300}$"),
    "is killed": ("os.kill(os.getpid(), 9)", "ended with -9"),
}


@pytest.mark.parametrize(("script", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failure_has_the_programs_words(host: HostTree, script: str, words: str) -> None:
    host.modprobe(script)
    with pytest.raises(HostError, match=words):
        load_module(KernelModule.NVIDIA, host.places, ROOT)


def test_a_complaint_is_no_failure_once_the_module_is_there(host: HostTree) -> None:
    host.write("sys/module/nvidia/initstate", "live\n")
    host.modprobe("print('modprobe.d is odd'); sys.exit(1)")
    load_module(KernelModule.NVIDIA, host.places, ROOT)


def test_a_hanging_program_and_its_children_are_stopped(host: HostTree) -> None:
    host.modprobe(
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "(base / 'child').write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    before = time.monotonic()
    with pytest.raises(HostError, match=r"took longer than 1\.5 s and was stopped"):
        load_module(KernelModule.NVIDIA, host.places, ROOT, timeout_s=1.5)
    assert time.monotonic() - before < 10
    status = Path("/proc") / (host.base / "child").read_text() / "stat"
    deadline = time.monotonic() + 5
    while status.exists() and " Z " not in status.read_text():  # an orphan, waiting for init to bury it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_it_leaves_running_holds_nobody_up(host: HostTree) -> None:
    host.modprobe(
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)'])\nsys.exit(1)"
    )
    before = time.monotonic()
    with pytest.raises(HostError, match="ended with 1"):
        load_module(KernelModule.NVIDIA, host.places, ROOT)
    assert time.monotonic() - before < 2.5


SETTINGS = {
    "none": (None, "cannot be read: No such file"),
    "emptied": ("\n", "is switched off on this host"),
    "relative": ("modprobe\n", "names modprobe, which is not an executable program"),
    "missing": ("/nowhere/modprobe\n", "which is not an executable program"),
    "a folder": ("/tmp\n", "which is not an executable program"),
    "no program": ("/etc/passwd\n", "which is not an executable program"),
}


@pytest.mark.parametrize(("setting", "words"), SETTINGS.values(), ids=SETTINGS)
def test_a_kernel_that_names_no_program(host: HostTree, setting: str | None, words: str) -> None:
    path = host.base / "proc/sys/kernel/modprobe"
    path.unlink()
    if setting is not None:
        path.write_text(setting)
    with pytest.raises(HostError, match=words):
        modprobe_program(host.places.proc)


def test_a_program_that_does_not_start(host: HostTree) -> None:
    program = host.write("bin/modprobe", "#!/nowhere/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(HostError, match="cannot be run: No such file"):
        load_module(KernelModule.NVIDIA, host.places, ROOT)
