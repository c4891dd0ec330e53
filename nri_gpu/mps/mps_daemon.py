"""The MPS daemon of a GPU: its start, adoption and end, with the staged driver's programs and libraries."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import NriGpuError, cause_of, fault_of
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, GpuUuid
from nri_gpu.domain.mps import LOG_VARIABLE, PIPE_VARIABLE, WHOLE_PERCENT
from nri_gpu.domain.node import DriverFiles
from nri_gpu.driver.trees import BINARIES, HOST_BINARIES, LIBRARIES
from nri_gpu.mps.mps_folders import DaemonFolder, clients, mount_fault
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.system.child import Unkilled, check_unkilled, keep, run
from nri_gpu.system.process import Process, lives, process_of
from nri_gpu.system.process_watch import ProcessWatch
from nri_gpu.system.storage import text_of
from nri_gpu.system.tasks import first_done

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"  # which the control daemon finds by PATH
SMI: Final = "nvidia-smi"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_S: Final = 10.0  # a daemon that does not answer within it counts as broken
SMI_S: Final = 60.0  # it wakes a sleeping GPU
_SHOWN_MAX: Final = 200  # characters of a program's output


class MpsError(NriGpuError):
    """A failure to start, ask or end a daemon. Its text is a clause."""


class MpsTools(Struct, frozen=True):
    """Programs and libraries of one staged driver."""

    bin: Path
    libraries: Path

    @classmethod
    def of(cls, driver: DriverFiles | None) -> MpsTools:
        """Return the tools of the tree with compute and utility. Raises: MpsError: this driver has none."""
        tree = driver.trees.get(DEFAULT_CAPABILITIES) if driver else None
        if driver is None or tree is None:
            raise MpsError("the driver's files are not staged yet")
        missing = [name for name in (CONTROL, SERVER, SMI) if name not in (driver.host_binaries or tree.binaries)]
        if missing:
            raise MpsError(f"the driver on this node has no {' and no '.join(missing)}: install that part of it")
        programs = Path(tree.path).parent / HOST_BINARIES if driver.host_binaries else Path(tree.path, BINARIES)
        return cls(programs, Path(tree.path, LIBRARIES))

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the programs' environment, which has nothing of ours."""
        return {"PATH": f"{self.bin}:{SYSTEM_PATH}", "LD_LIBRARY_PATH": str(self.libraries), "LC_ALL": "C"}

    async def control(self, uuid: GpuUuid, pipe: Path, command: str) -> str:
        """Send a command to the GPU's daemon, of that pipe directory. Return its answer. Raises: MpsError."""
        environment = {**self.environment, PIPE_VARIABLE: str(pipe)}
        return await _output([str(self.bin / CONTROL)], environment, f"{command}\n", COMMAND_S, uuid)

    async def set_compute_mode(self, uuid: GpuUuid, mode: str) -> None:
        """Set the GPU's compute mode. Raises: MpsError.

        `EXCLUSIVE_PROCESS` admits one process, the MPS server, to the GPU; `DEFAULT` any.
        """
        await _output([str(self.bin / SMI), "-i", uuid, "-c", mode], self.environment, "", SMI_S, uuid)


async def _output(command: list[str], environment: Mapping[str, str], text: str, limit_s: float, uuid: GpuUuid) -> str:
    name = Path(command[0]).name
    try:
        ended = await run(command, limit_s, text=text, environment=environment, gpu_uuid=uuid)
    except TimeoutError as error:
        raise MpsError(str(error) or f"{name} did not end within {limit_s:.0f} s") from None
    except OSError as error:
        raise MpsError(f"{name} cannot be run: {cause_of(error)}") from error
    answer = " ".join((ended.output + ended.errors).decode(errors="replace").split())
    if ended.status:
        raise MpsError(
            f"{name} {' '.join(command[1:]) or text.strip()} ended with {ended.status}: {answer[:_SHOWN_MAX]}"
        )
    return answer


UP_S: Final = 10.0  # for a daemon to answer after its start
END_S: Final = 5.0  # for one to end, before the next stronger signal
PROBE_PAUSE_S: Final = 0.05
PROBE: Final = "get_default_active_thread_percentage"
# $1 shm, $2 its folder, $3 our state folder, $4 the libraries, which mount(8) must not use. Clients can put links into
# the shared folders; where the kernel (5.10) and mount(8) support it, none is followed. The line says that the process
# is noted: if we die before, it ends, and no daemon runs that the next nri-gpu does not know.
_SCRIPT: Final = """
read -r noted && exec < /dev/null || exit 1
cd / && mount --bind "$1" /dev/shm && mount --bind "$2" "$3" || exit 1
mount -o remount,bind,nosuid,nodev,noexec,nosymfollow /dev/shm 2> /dev/null
LD_LIBRARY_PATH="$4"; export LD_LIBRARY_PATH
shift 4
exec "$@"
"""


class MpsDaemon:
    """The daemon of one GPU, running or not. Its methods are called by one task.

    folder: of the daemon that runs, or else of the next daemon, which `renewed` returns as soon as the last has ended.
    """

    def __init__(self, folder: DaemonFolder, renewed: Callable[[], DaemonFolder]) -> None:
        self.folder = folder
        self._renewed = renewed
        self._watch: ProcessWatch | None = None

    @property
    def alive(self) -> bool:
        """Return whether the daemon serves, and its process lives."""
        return self._watch is not None and self._watch.alive

    async def ended(self) -> None:
        """Return when the daemon has ended; never if there is none."""
        await (self._watch.ended if self._watch else asyncio.Event()).wait()

    def prepare(self) -> None:
        """Make what is missing of the next daemon's folders. Raises: MpsError."""
        if fault := mount_fault(clients(self.folder.state)):
            raise MpsError(fault)
        try:
            self.folder.make()
        except OSError as error:
            raise MpsError(f"the folders of {CONTROL} cannot be made: {fault_of(error)}") from error

    async def start(self, tools: MpsTools, settings: MpsSettings) -> None:
        """Start the prepared daemon and wait until it serves. Raises: MpsError: it does not, and was ended."""
        try:
            await check_unkilled(CONTROL, self.folder.uuid)
            # Noted before anything is changed: the next nri-gpu restores the compute mode if this one ends here.
            self.folder.note(Process(0, 0))
            await tools.set_compute_mode(self.folder.uuid, "EXCLUSIVE_PROCESS")
            its, ours = os.pipe()
            with FileIO(its), FileIO(ours, "wb") as gate:
                self._watch = await self._started(tools, settings, self._spawn(tools, its), gate)
        except OSError as error:
            raise MpsError(f"{CONTROL} cannot be started: {fault_of(error)}") from error

    async def adopt(self, tools: MpsTools, settings: MpsSettings) -> bool:
        """Take over the noted daemon if it lives and serves; end it if it only lives. Return whether it serves.

        Raises: MpsError: it may serve, and cannot be watched or asked: no other may be started.
        """
        if not self.folder.file.exists():
            return False
        try:
            process = self.folder.noted()
            watch = ProcessWatch(process) if process else None
        except ProcessLookupError:
            watch = None
        except OSError as error:
            why = f"the {CONTROL} noted in {self.folder.file} may still serve, and cannot be watched"
            raise MpsError(f"{why}: {fault_of(error)}; no other is started before it can be") from error
        if watch is None:
            self.folder = self._renewed()
            return False
        try:
            await tools.control(self.folder.uuid, self.folder.pipe, PROBE)
            await self._limit(tools, settings)
        except MpsError as error:
            if isinstance(error.__cause__, OSError):  # it was not asked, and may serve
                watch.close()
                raise
            await self._end(watch, signal.SIGTERM, signal.SIGKILL)
            return False
        self._watch = watch
        return True

    def lost(self) -> None:
        """Note that the daemon has ended by itself."""
        if self._watch:
            self._release(self._watch)
            self._watch = None

    async def quit(self, tools: MpsTools) -> None:
        """End it, by force if necessary."""
        watch, self._watch = self._watch, None
        if watch:
            with suppress(MpsError):
                await tools.control(self.folder.uuid, self.folder.pipe, "quit")
            await self._end(watch, None, signal.SIGTERM, signal.SIGKILL)

    async def end(self, tools: MpsTools) -> None:
        """End it and restore the GPU's compute mode. Raises: MpsError: not restored."""
        await self.quit(tools)
        await tools.set_compute_mode(self.folder.uuid, "DEFAULT")
        self.folder.forget()

    def _spawn(self, tools: MpsTools, stdin: int) -> int:
        """Start the daemon and return its PID: each program on the way replaces itself by the next.

        stdin: a pipe, in which it waits for a line. Raises: OSError.
        """
        folder, state = self.folder, self.folder.state
        within = [f"{folder.shm}", f"{folder.folder}", f"{state}", f"{tools.libraries}", f"{tools.bin / CONTROL}", "-f"]
        environment = {
            "PATH": f"{tools.bin}:{SYSTEM_PATH}",
            "CUDA_VISIBLE_DEVICES": folder.uuid,
            PIPE_VARIABLE: f"{state}/pipe",
            LOG_VARIABLE: f"{state}/log",
        }
        output = (str(folder.log / "output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        # Not subprocess, whose objects wait for their child: this child outlives us.
        return os.posix_spawnp(
            "unshare",
            ["unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", _SCRIPT, "sh", *within],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, stdin, 0),
                (os.POSIX_SPAWN_OPEN, 1, *output),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # a signal to our process group does not reach it
            setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
        )

    async def _started(self, tools: MpsTools, settings: MpsSettings, pid: int, gate: FileIO) -> ProcessWatch:
        """Note the process, let it become the daemon, and wait until that serves. Raises: MpsError: it was ended."""
        process = process_of(pid) or Process(pid, 0)
        try:
            watch = ProcessWatch(process)
        except OSError as error:
            output = self._last_output()
            os.killpg(pid, signal.SIGKILL)  # it is not reaped yet, so the PID is its own
            self._ended(process)
            ended = isinstance(error, ProcessLookupError)
            raise MpsError(f"{CONTROL} {'ended at once' if ended else 'cannot be watched'}: {output}") from error
        try:
            self.folder.note(process)
            gate.write(b"\n")
            await self._serves(tools, watch)
            await self._limit(tools, settings)
        except (MpsError, OSError) as error:
            await self._end(watch, signal.SIGTERM, signal.SIGKILL)
            raise MpsError(f"{fault_of(error)}") from error
        return watch

    async def _serves(self, tools: MpsTools, watch: ProcessWatch) -> None:
        try:
            async with asyncio.timeout(UP_S):
                while watch.alive:
                    with suppress(MpsError):
                        await tools.control(self.folder.uuid, self.folder.pipe, PROBE)
                        return
                    await asyncio.sleep(PROBE_PAUSE_S)
        except TimeoutError:
            raise MpsError(f"{CONTROL} did not answer within {UP_S:.0f} s: {self._last_output()}") from None
        raise MpsError(f"{CONTROL} ended: {self._last_output()}")

    async def _limit(self, tools: MpsTools, settings: MpsSettings) -> None:
        """Set the limits that no client can lift. They apply to servers that start from now on."""
        if settings.most_threads_percent < WHOLE_PERCENT:
            threads = settings.most_threads_percent
            await tools.control(self.folder.uuid, self.folder.pipe, f"set_default_active_thread_percentage {threads}")
        if settings.most_memory_mib:
            memory = settings.most_memory_mib
            await tools.control(self.folder.uuid, self.folder.pipe, f"set_default_device_pinned_mem_limit 0 {memory}M")

    async def _end(self, watch: ProcessWatch, *signals: signal.Signals | None) -> None:
        """Wait for the daemon's end, and send one signal after the other when that takes too long.

        None: it was told to quit.
        """
        for number in signals:
            if number:
                watch.send(number)
            await first_done(watch.ended.wait(), timeout_s=END_S)
            if watch.ended.is_set():
                break
        self._release(watch)

    def _release(self, watch: ProcessWatch) -> None:
        watch.close()
        self._ended(watch.process)

    def _ended(self, process: Process) -> None:
        """Reap it, now or once it ends: one that hangs in the kernel is followed by none."""
        keep(Unkilled(CONTROL, self.folder.uuid, process.pid, time.time()), partial(_lives, process))
        self.folder = self._renewed()

    def _last_output(self) -> str:
        words = (text_of(self.folder.log / "output", encoding="utf-8") or "").split()
        return " ".join(words)[-_SHOWN_MAX:] or "no output"


def _lives(process: Process) -> bool:
    if lives(process):
        return True
    with suppress(ChildProcessError):  # an adopted daemon is not our child
        os.waitpid(process.pid, os.WNOHANG)
    return False
