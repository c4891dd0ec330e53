"""`nri-gpu observe`: the process that looks at the node beside any stack, and waits while a daemon runs there.

It writes nothing but its run folder. It never connects to NRI, has no key, and signs nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.daemon.answers import CHANGES_NOTHING, ProcessesAnswer, RuntimeConnection
from nri_gpu.daemon.control import Command, ControlSocket
from nri_gpu.daemon.metrics import MetricsController
from nri_gpu.daemon.view import View, processes_of
from nri_gpu.domain.errors import Exit, NriGpuError, cause_of
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.inventory_controller import InventoryCache, InventoryController
from nri_gpu.inventory.node_watch import DEV_FOLDERS, NodeWatch, Pace
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.inventory.topology_source import TopologySource
from nri_gpu.observe.observe_policy import ObservePolicy
from nri_gpu.observe.observed_source import ObservedSource
from nri_gpu.observe.observed_xids import ObservedXids
from nri_gpu.observe.observer import FRESH_S, FRESH_WAIT_S, Observer, Senses
from nri_gpu.plugin.counts import Counts
from nri_gpu.plugin.guard_status import in_pod
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_reload import PolicyWatch
from nri_gpu.system.capabilities import CHOWN, DAC_READ_SEARCH, SYS_ADMIN, SYS_PTRACE, permits, set_aside
from nri_gpu.system.child import unkilled
from nri_gpu.system.liveness import ALIVE, LivenessFile
from nri_gpu.system.node_name import node_name
from nri_gpu.system.service_manager import Notifier, run_until_told
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.storage import lock_holder, open_lock, try_lock
from nri_gpu.system.tasks import first_done, set_within
from nri_gpu.usage.usage_controller import UsageController

LOCK: Final = "lock"  # in the run folder, and in a daemon's state folder
OURS: Final = frozenset({LOCK, ALIVE, CONTROL_SOCKET})  # files of a run folder
DAEMON_LOOK_S: Final = 5.0  # between two looks for a daemon
DRIVER_S: Final = 10.0  # for the driver to answer before the first look
NODE_PACE: Final = Pace(look_s=10.0)  # nobody waits for a grant: a GPU that came is shown a moment later
STARTING: Final = Inventory(
    taken_at=0, fault="the observer has just started, and the driver has not answered yet; try again in a moment"
)


class RunFolderError(NriGpuError):
    """An unusable run folder. code: what the process ends with."""

    def __init__(self, sentence: str, code: Exit) -> None:
        super().__init__(sentence)
        self.code = code


def lock_folder(path: Path) -> int:
    """Make the run folder, and return the descriptor of its lock, which holds as long as that is open.

    Raises: RunFolderError, also if another observer has it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := _not_ours(path):
            raise RunFolderError(f"run folder {path} {why}: give another --run-dir", Exit.UNAVAILABLE)
        path.chmod(0o700)
        lock = open_lock(path / LOCK)
    except OSError as error:
        cure = "be root" if isinstance(error, PermissionError) else "correct that"
        sentence = f"run folder {path} cannot be used: {cause_of(error)}; {cure}, or give another --run-dir"
        raise RunFolderError(sentence, Exit.of(error)) from None
    if not try_lock(lock):
        holder = lock_holder(lock)
        os.close(lock)
        sentence = f"another observer{holder} runs with run folder {path}: stop that one, or give another --run-dir"
        raise RunFolderError(sentence, Exit.UNAVAILABLE)
    return lock


def _not_ours(path: Path) -> str:
    """Return why a folder must not be made the observer's, as a clause, or empty. Raises: OSError."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o067 and {each.name for each in path.iterdir()} - OURS:
        return "is open to other users and has files that are no observer's, so it would be closed to them"
    return ""


def daemon_in(state_dir: Path) -> str | None:
    """Return ` (pid 12)` of the daemon that runs with this state folder, empty if its PID is unknown, None without one.

    Its lock is looked at and never taken: a daemon that starts just then must find it free. In a pod the host's folder
    is not mounted, so there only a daemon of the same pod is seen.
    """
    try:
        descriptor = os.open(state_dir / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    holder = lock_holder(descriptor)
    os.close(descriptor)
    return holder or ("" if listens(state_dir / CONTROL_SOCKET) else None)


def listens(path: Path) -> bool:
    """Return whether a process listens at this Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        return connection.connect_ex(str(path)) == 0


def confine() -> bool:
    """Leave all capabilities but CHOWN, for control.group, to the children. Return whether NVML can be opened.

    The child that looks needs SYS_PTRACE and DAC_READ_SEARCH to read what processes have open; the unit and the chart
    give no more. A pod that is not privileged may open no node of the driver's.
    """
    try:
        set_aside([CHOWN], hand_on=[SYS_PTRACE, DAC_READ_SEARCH])
        return permits(SYS_ADMIN) or not in_pod()
    except OSError as error:
        logger.bind(fault=cause_of(error)).warning("capabilities not set aside")
        return not in_pod()


def paced(policy: Policy) -> Policy:
    """Return the policy with the GPUs described as seldom as processes are looked at: who asks has it done, too."""
    return replace(policy, inventory=replace(policy.inventory, refresh_s=policy.observe.look_s))


class ObserveProcess:
    """The parts of the observer. senses: how it learns of containers, processes and the kubelet.

    topology: a simulated node's file. state_dir: of the daemon that it waits for. may_open: as of `ObservedSource`.
    stays: false where it ends when there is a daemon, as in a terminal.
    """

    def __init__(
        self,
        policy: ObservePolicy,
        run_dir: Path,
        senses: Senses,
        *,
        topology: Path | None = None,
        state_dir: Path,
        may_open: bool = True,
        stays: bool = True,
    ) -> None:
        self._policy = policy
        self._run_dir = run_dir
        self._state_dir = state_dir
        self._stays = stays
        self._waits = False  # for a daemon to end
        self._topology = topology
        self._notifier = Notifier()
        self._liveness = LivenessFile(run_dir, 0o600)
        fixed = self._fixed = paced(policy.policy)
        state = self._state = NodeState(STARTING, policy=fixed)
        driver = fixed.driver
        self._usage = UsageController(
            driver, state, simulated=topology is not None, containers=lambda: self._observer.containers
        )
        nvml = NvmlSource(
            driver.root,
            driver.library_dirs,
            host_root=driver.host_root,
            stage_dir=driver.stage_dir,
            samples=self._usage.refreshed,
        )
        observed = ObservedSource(nvml, may_open=may_open)
        self._source = TopologySource(topology) if topology else observed
        self._inventory = InventoryController(state)
        self._told = asyncio.Event()  # set with each answer of the driver
        self._cache = InventoryCache(
            self._source,
            self._inventory.publish,
            self._inventory.not_refreshed,
            refresh_s=fixed.inventory.refresh_s,
        )
        self._cache.subscribe(lambda _inventory, _began: self._answered())
        self._watch = NodeWatch(
            self._source.kernel_view, self._cache.poke, folders=() if topology else DEV_FOLDERS, pace=NODE_PACE
        )
        self._xids = ObservedXids(driver, state, lambda: self._observer.conclude(), self._cache.poke)
        self._observer = Observer(state, senses, xids=lambda: self._xids.last, without=lambda: observed.without)
        self._since_s = time.time()
        refused: Mapping[str, Command] = dict.fromkeys(("repaired", "cordon", "uncordon"), _refuse)
        commands = {**refused, "processes": self._processes}
        self._control = ControlSocket(run_dir / CONTROL_SOCKET, state, self._view, commands, self._fresh)
        self._metrics = MetricsController(fixed.metrics, self._view, sampled=self._usage.ask)
        state.then(self._control.policy_changed, Changed.POLICY)
        state.then(self._xids.follow, Changed.NODE, Changed.POLICY)
        self._policy_watch: PolicyWatch | None = None

    def watch_policy(self, file: Path) -> None:
        """Read the policy again whenever `file` changes, too."""
        self._policy_watch = PolicyWatch(file, self._reload)

    async def run(self) -> Exit:
        """Observe until SIGTERM or SIGINT. One that does not stay ends as well where a daemon runs."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        self._liveness.keep(lambda: self._waits or self._observer.ready)
        return await run_until_told(asyncio.create_task(self._serve()), self._notifier)

    async def _serve(self) -> None:
        while await self._has_room():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in self._parts()]
                await asyncio.sleep(0)  # by then the control socket listens
                self._notifier.ready("observing")
                logger.bind(path=str(self._run_dir)).info("observing: `nri-gpu status` shows what is seen")
                await self._until_daemon(there=True)
                for task in tasks:
                    task.cancel()

    async def _has_room(self) -> bool:
        """Wait while a daemon runs on this node. Return false where this process ends for it instead."""
        if (holder := daemon_in(self._state_dir)) is None:
            return True
        sentence = f"a daemon{holder} runs on this node, with state folder {self._state_dir}, and shows all"
        if not self._stays:
            print(f"{sentence}: run `nri-gpu status`")
            return False
        logger.bind(path=str(self._state_dir), holder=holder.strip(" ()")).info(
            "a daemon runs on this node: the observer shows nothing while it does"
        )
        self._notifier.ready(f"waiting: {sentence}")
        self._waits = True
        await self._until_daemon(there=False)
        self._waits = False
        logger.info("the daemon is gone, observing again")
        return True

    async def _until_daemon(self, *, there: bool) -> None:
        """Return once a daemon runs on this node, or none does."""
        while (daemon_in(self._state_dir) is not None) is not there:  # noqa: ASYNC110 - of a lock nobody is told
            await asyncio.sleep(DAEMON_LOOK_S)

    def _parts(self) -> Iterator[Coroutine[None, None, None]]:
        yield from (self._cache.run(), self._watch.run(), self._usage.run(), self._xids.run())
        yield from (self._control.run(), self._metrics.run(), self._observe())
        if self._policy_watch:
            yield self._policy_watch.run()

    async def _observe(self) -> None:
        """Look once it is known which numbers the driver's nodes have, or the driver takes long to tell."""
        await first_done(self._cache.ready(), timeout_s=DRIVER_S)
        await self._observer.run()

    def _reload(self) -> None:
        """Read the policy again, and ask the driver again, on SIGHUP."""
        self._policy.read()
        self._state.use(policy := paced(self._policy.policy))
        changed = [name for name in ("driver", "metrics") if getattr(policy, name) != getattr(self._fixed, name)]
        if changed:
            settings = ", ".join(f"[{name}]" for name in changed)
            logger.bind(settings=settings).warning("reloaded policy changes settings that need a restart")
        self._cache.poke()

    def _answered(self) -> None:
        self._inventory.answered()
        self._told.set()

    async def _fresh(self) -> None:
        """Return once what is known is not old, for somebody who asks, or after a while."""
        await asyncio.gather(self._usage.ask(), self._observer.fresh(), self._described())

    async def _described(self) -> None:
        if (self._cache.age_s() or 0.0) > FRESH_S:
            self._told.clear()
            self._cache.poke()
            await set_within(self._told, FRESH_WAIT_S)

    async def _processes(self, _: str) -> ProcessesAnswer:
        return processes_of(self._usage.processes(), self._usage.report(), self._observer.containers)

    def _view(self) -> View:
        """Return the observer as it is now, in the daemon's words."""
        state, cache = self._state, self._cache
        ready = self._observer.ready
        why = "" if ready else "the observer has not looked at this node yet; try again in a moment"
        return View(
            node=state.node,
            node_name=node_name(),
            ledger=state.ledger,
            connection=RuntimeConnection(ready=ready, since_s=self._since_s, joined=False, fault=why),
            wall=time.time(),
            monotonic=time.monotonic(),
            inventory_age_s=cache.age_s(),
            inventory_fault=cache.fault,
            policy=self._policy.status,
            settings=state.settings,
            options={"topology": str(self._topology.absolute())} if self._topology else {},
            counts=Counts(),
            usages=self._usage.report(),
            history=self._inventory.history,
            restarts={"nvml": max(0, self._source.starts - 1), "events": max(0, self._xids.starts - 1)},
            unkilled=unkilled(),
            stray=self._observer.stray(),
            xids=self._xids.counts,
            observer=self._observer.status(),
        )


async def _refuse(_: str) -> object:
    return {"error": CHANGES_NOTHING}
