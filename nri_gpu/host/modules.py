"""Has the kernel load a module, by the program that the kernel itself would call."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from nri_gpu.host.facts import HostError, HostPaths, KernelModule

# Eight GPUs with their firmware, NVSwitches beside them, on a cold disk, take some 20 s.
LOAD_TIMEOUT_S: Final = 60.0
_KILL_TIMEOUT_S: Final = 2.0
_WORDS_MAX: Final = 300  # characters of the program's own words that a sentence of ours quotes


def is_loaded(sys: Path, module: KernelModule) -> bool:
    """Whether the module is in the kernel and has finished starting; file names have `-`, the kernel has `_`."""
    state = sys / "module" / module.replace("-", "_") / "initstate"
    try:
        return state.read_text() == "live\n"
    except OSError:
        return False


def load_module(module: KernelModule, places: HostPaths, driver_root: Path, timeout_s: float = LOAD_TIMEOUT_S) -> None:
    """Load a module. Raises: HostError: not loaded; with the program's own words.

    driver_root: modules are looked for in its lib/modules; the program is the host's own all the same, so that nothing
    out of a driver container ever runs on the host as root.
    """
    program = modprobe_program(places.proc)
    elsewhere = [] if driver_root == Path("/") else ["-d", str(driver_root)]
    words = _run([program, *elsewhere, module.value], timeout_s)
    if not is_loaded(places.sys, module):
        raise HostError(words or f"{program} ended as if all were well, yet the module is not loaded")


def modprobe_program(proc: Path) -> str:
    """The program that the kernel calls for modules. Raises: HostError: there is none, or none that can be run."""
    setting = proc / "sys" / "kernel" / "modprobe"
    try:
        program = setting.read_text().strip()
    except OSError as error:
        raise HostError(f"/proc/sys/kernel/modprobe cannot be read: {error.strerror}") from error
    if not program:
        # Somebody emptied it, to have the kernel load nothing on its own; so neither do we.
        raise HostError("/proc/sys/kernel/modprobe is empty: loading modules on demand is switched off on this host")
    path = Path(program)
    if not path.is_absolute() or not path.is_file() or not os.access(path, os.X_OK):
        raise HostError(f"/proc/sys/kernel/modprobe names {program}, which is no program that can be run")
    return program


def _run(command: list[str], timeout_s: float) -> str:
    """What went wrong, in the program's own last words if it had any; empty if nothing did. Raises: HostError."""
    # A file in memory and not a pipe: what the program leaves running could keep a pipe open for ever.
    with os.fdopen(os.memfd_create("modprobe"), "w+b") as words:
        try:
            process = subprocess.Popen(  # its own group, for the commands that modprobe.d may have it run
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
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
        words.seek(0)
        said = " ".join(words.read(1 << 16).decode("utf-8", errors="replace").split())[-_WORDS_MAX:]
        return f"{' '.join(command)} ended with {code}: {said or 'no word why'}" if code else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """A module that hangs while it starts holds its loader in the kernel, where SIGKILL has to wait too: we do not."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL  # or its finalizer would complain that it still runs
