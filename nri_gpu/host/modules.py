"""Loads kernel modules, with the program that the kernel itself would call."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from nri_gpu.host.facts import HostError, HostPaths, KernelModule

# Eight GPUs with NVSwitches and their firmware, on a cold disk, take some 20 s.
LOAD_TIMEOUT_S: Final = 60.0
_KILL_TIMEOUT_S: Final = 2.0
_SHOWN_MAX: Final = 300  # characters of the program's output in a sentence


def is_loaded(sys: Path, module: KernelModule) -> bool:
    """Whether the module is loaded and initialized. The kernel has `_` where file names have `-`."""
    state = sys / "module" / module.replace("-", "_") / "initstate"
    try:
        return state.read_text() == "live\n"
    except OSError:
        return False


def load_module(module: KernelModule, places: HostPaths, driver_root: Path, timeout_s: float = LOAD_TIMEOUT_S) -> None:
    """Load a module.

    driver_root: modules are looked for in its lib/modules. The program is the host's all the same, so that nothing from
    a driver container runs on the host as root.

    Raises: HostError: not loaded; with the program's output.
    """
    program = modprobe_program(places.proc)
    elsewhere = [] if driver_root == Path("/") else ["-d", str(driver_root)]
    fault = _run([program, *elsewhere, module.value], timeout_s)
    if not is_loaded(places.sys, module):
        raise HostError(fault or f"{program} reported success, but the module is not loaded")


def modprobe_program(proc: Path) -> str:
    """The program that the kernel calls to load modules. Raises: HostError: there is none that can be run."""
    setting = proc / "sys" / "kernel" / "modprobe"
    try:
        program = setting.read_text().strip()
    except OSError as error:
        raise HostError(f"/proc/sys/kernel/modprobe cannot be read: {error.strerror}") from error
    if not program:
        # Somebody emptied it so that the kernel loads nothing by itself, and neither do we.
        raise HostError("/proc/sys/kernel/modprobe is empty: loading modules on demand is switched off on this host")
    path = Path(program)
    if not path.is_absolute() or not path.is_file() or not os.access(path, os.X_OK):
        raise HostError(f"/proc/sys/kernel/modprobe names {program}, which is not an executable program")
    return program


def _run(command: list[str], timeout_s: float) -> str:
    """What went wrong, with the end of the program's output; empty on success. Raises: HostError."""
    # A file in memory, not a pipe, which a process that the program leaves behind could keep open for ever.
    with os.fdopen(os.memfd_create("modprobe"), "w+b") as output:
        try:
            process = subprocess.Popen(  # in its own process group, for commands that modprobe.d makes it run
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={},
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"{command[0]} cannot be run: {error.strerror}") from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise HostError(f"{' '.join(command)} took longer than {timeout_s:g} s and was stopped") from None
        output.seek(0)
        shown = " ".join(output.read(1 << 16).decode("utf-8", errors="replace").split())[-_SHOWN_MAX:]
        return f"{' '.join(command)} ended with {code}: {shown or 'without output'}" if code else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program. If the module hangs in the kernel, SIGKILL has to wait for it; we do not."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # or its finalizer would complain that it still runs
