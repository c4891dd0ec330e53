"""NVIDIA's programs that MPS needs on the host, run from the staged driver with the staged libraries."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, GpuUuid
from nri_gpu.domain.mps import LOG_VARIABLE, PIPE_VARIABLE, WHOLE_PERCENT
from nri_gpu.domain.node import DriverFiles
from nri_gpu.mps.folders import DaemonFolder, ProcessWatch, clients, mount_fault, process_of
from nri_gpu.policy.mps import MpsSettings

CONTROL: Final = "nvidia-cuda-mps-control"
SMI: Final = "nvidia-smi"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_S: Final = 10.0  # a daemon that does not answer for so long is not one
SMI_S: Final = 60.0  # it wakes a GPU that sleeps
_SHOWN_MAX: Final = 200  # characters of what a program says


class MpsError(NriGpuError):
    """A daemon cannot be started, asked or ended. Says why in a clause."""


class MpsTools(Struct, frozen=True):
    """Programs and libraries of one staged driver."""

    bin: Path
    libraries: Path

    @classmethod
    def of(cls, driver: DriverFiles | None) -> MpsTools:
        """Those of compute and utility. Raises: MpsError: this driver has none."""
        tree = driver.trees.get(DEFAULT_CAPABILITIES) if driver else None
        if tree is None:
            raise MpsError("the driver's files are not staged yet")
        missing = [name for name in (CONTROL, SMI) if name not in tree.binaries]
        if missing:
            raise MpsError(f"the driver on this node has no {' and no '.join(missing)}: install that part of it")
        return cls(Path(tree.path, "lib64/bin"), Path(tree.path, "lib64"))

    @property
    def environment(self) -> Mapping[str, str]:
        """What they are run with; nothing of our own environment."""
        return {"PATH": f"{self.bin}:{SYSTEM_PATH}", "LD_LIBRARY_PATH": str(self.libraries), "LC_ALL": "C"}

    async def control(self, pipe: Path, command: str) -> str:
        """Say something to the daemon of that pipe directory. Returns what it answers. Raises: MpsError."""
        environment = {**self.environment, PIPE_VARIABLE: str(pipe)}
        return await _output([str(self.bin / CONTROL)], environment, f"{command}\n", COMMAND_S)

    async def set_compute_mode(self, uuid: GpuUuid, mode: str) -> None:
        """`EXCLUSIVE_PROCESS` lets one process, the MPS server, have the GPU; `DEFAULT` any. Raises: MpsError."""
        await _output([str(self.bin / SMI), "-i", uuid, "-c", mode], self.environment, "", SMI_S)


async def _output(command: list[str], environment: Mapping[str, str], said: str, limit_s: float) -> str:
    pipe = asyncio.subprocess.PIPE
    name = Path(command[0]).name
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environment), cwd="/", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        raise MpsError(f"{name} cannot be run: {error.strerror}") from error
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate(said.encode())
    except TimeoutError:
        raise MpsError(f"{name} did not end within {limit_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = " ".join(output.decode(errors="replace").split())
    if process.returncode:
        raise MpsError(
            f"{name} {' '.join(command[1:]) or said.strip()} ended with {process.returncode}: {text[:_SHOWN_MAX]}"
        )
    return text


UP_S: Final = 10.0  # for a daemon to answer after its start
END_S: Final = 5.0  # for one to end after it was told, before the next stronger word
PROBE_PAUSE_S: Final = 0.05
PROBE: Final = "get_default_active_thread_percentage"
# $1 shm, $2 its folder, $3 our state folder, $4 the libraries: not for mount(8), which has the host's. Clients may lay
# links among what they share; where the kernel (5.10) and mount(8) know how, none is followed.
_SCRIPT: Final = """
cd / && mount --bind "$1" /dev/shm && mount --bind "$2" "$3" || exit 1
mount -o remount,bind,nosuid,nodev,noexec,nosymfollow /dev/shm 2> /dev/null
LD_LIBRARY_PATH="$4"; export LD_LIBRARY_PATH
shift 4
exec "$@"
"""


class MpsDaemon:
    """A daemon that runs, or does not. Its methods are called by one task.

    place: of the one that runs, or else of the next, which `renewed` gives as soon as one has ended.
    """

    def __init__(self, place: DaemonFolder, renewed: Callable[[], DaemonFolder]) -> None:
        self.place = place
        self._renewed = renewed
        self._watch: ProcessWatch | None = None

    @property
    def alive(self) -> bool:
        """Whether it was found to serve, and its process lives."""
        return self._watch is not None and self._watch.alive

    async def ended(self) -> None:
        """Returns when it has ended; never, where there is none."""
        await (self._watch.ended if self._watch else asyncio.Event()).wait()

    def prepare(self) -> None:
        """Make the folders of the next one: containers are created with them before it is up. Raises: MpsError."""
        if fault := mount_fault(clients(self.place.state)):
            raise MpsError(fault)
        try:
            self.place.make()
        except OSError as error:
            raise MpsError(f"the folders of {CONTROL} cannot be made: {error}") from error

    async def start(self, tools: MpsTools, settings: MpsSettings) -> None:
        """Start the one that was prepared and wait until it serves. Raises: MpsError: it does not, and is gone."""
        try:
            await tools.set_compute_mode(self.place.uuid, "EXCLUSIVE_PROCESS")
            pid = self._spawn(tools)
            process = process_of(pid)
            if process is None:
                said = self._last_words()
                self._gone(pid)
                raise MpsError(f"{CONTROL} ended at once: {said}")
            self.place.note(process)
            watch = ProcessWatch(process)
        except OSError as error:
            raise MpsError(f"{CONTROL} cannot be started: {error}") from error
        try:
            await self._serves(tools, watch)
            await self._limit(tools, settings)
        except MpsError:
            await self._end(watch, signal.SIGTERM, signal.SIGKILL)
            raise
        self._watch = watch

    async def adopt(self, tools: MpsTools, settings: MpsSettings) -> bool:
        """Take over the one that was noted, if it lives and serves; end it if it only lives."""
        if not self.place.file.exists():
            return False
        process = self.place.noted()
        try:
            watch = ProcessWatch(process) if process else None
        except OSError:
            watch = None
        if watch is None:
            self.place = self._renewed()
            return False
        with suppress(MpsError):
            await tools.control(self.place.pipe, PROBE)
            await self._limit(tools, settings)
            if self.place.generation:  # clients of another one write outside the file system that is for them
                self._watch = watch
                return True
        await self._end(watch, signal.SIGTERM, signal.SIGKILL)
        return False

    def lost(self) -> None:
        """It has ended by itself."""
        if self._watch:
            self._let_go(self._watch)
            self._watch = None

    async def quit(self, tools: MpsTools) -> None:
        """Have it quit, by force if it must be."""
        watch, self._watch = self._watch, None
        if watch:
            with suppress(MpsError):
                await tools.control(self.place.pipe, "quit")
            await self._end(watch, None, signal.SIGTERM, signal.SIGKILL)

    async def end(self, tools: MpsTools) -> None:
        """The same, and give the GPU back to all. Raises: MpsError: not given back."""
        await self.quit(tools)
        await tools.set_compute_mode(self.place.uuid, "DEFAULT")
        self.place.forget()

    def _spawn(self, tools: MpsTools) -> int:
        """Returns its process id: every program on the way there becomes the next one."""
        place, state = self.place, self.place.state
        within = [f"{place.shm}", f"{place.folder}", f"{state}", f"{tools.libraries}", f"{tools.bin / CONTROL}", "-f"]
        environment = {
            "PATH": f"{tools.bin}:{SYSTEM_PATH}",
            "CUDA_VISIBLE_DEVICES": place.uuid,
            PIPE_VARIABLE: f"{state}/pipe",
            LOG_VARIABLE: f"{state}/log",
        }
        output = (str(place.log / "output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        # Not subprocess: its objects want to see their child's end, and this child outlives us.
        return os.posix_spawnp(
            "unshare",
            ["unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c", _SCRIPT, "sh", *within],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, *output),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # what stops us by a signal to our group does not stop it
            setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
        )

    async def _serves(self, tools: MpsTools, watch: ProcessWatch) -> None:
        try:
            async with asyncio.timeout(UP_S):
                while watch.alive:
                    with suppress(MpsError):
                        await tools.control(self.place.pipe, PROBE)
                        return
                    await asyncio.sleep(PROBE_PAUSE_S)
        except TimeoutError:
            raise MpsError(f"{CONTROL} did not answer within {UP_S:.0f} s: {self._last_words()}") from None
        raise MpsError(f"{CONTROL} ended: {self._last_words()}")

    async def _limit(self, tools: MpsTools, settings: MpsSettings) -> None:
        """The limits that no client can lift. They count for servers that start after."""
        if settings.most_threads_percent < WHOLE_PERCENT:
            threads = settings.most_threads_percent
            await tools.control(self.place.pipe, f"set_default_active_thread_percentage {threads}")
        if settings.most_memory_mib:
            memory = settings.most_memory_mib
            await tools.control(self.place.pipe, f"set_default_device_pinned_mem_limit 0 {memory}M")

    async def _end(self, watch: ProcessWatch, *words: signal.Signals | None) -> None:
        """Until its process is gone, by one word after the other where it takes too long. None: it was told to quit."""
        for number in words:
            if number:
                watch.send(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await watch.ended.wait()
                    break
        self._let_go(watch)

    def _let_go(self, watch: ProcessWatch) -> None:
        watch.close()
        self._gone(watch.process.pid)

    def _gone(self, pid: int) -> None:
        _reap(pid)
        self.place = self._renewed()

    def _last_words(self) -> str:
        with suppress(OSError):
            words = (self.place.log / "output").read_text(errors="replace").split()
            return " ".join(words)[-200:] or "it said nothing"
        return "it said nothing"


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # taken over from before us, it is init's child
        os.waitpid(pid, os.WNOHANG)
