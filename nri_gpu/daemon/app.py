"""The running daemon: puts its parts together, hands the rooms to one another, keeps it going until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.daemon.audit import AuditLog, PolicyNote
from nri_gpu.daemon.control import Reporter, Subjects
from nri_gpu.daemon.journal import JOURNAL, Journal, StateRecorder
from nri_gpu.daemon.policy_file import PolicyFile, PolicyWatch
from nri_gpu.daemon.snapshot import Host, SnapshotKeeper
from nri_gpu.daemon.state_folder import StateFolder, former_ledger
from nri_gpu.domain.errors import Exit, PolicyError
from nri_gpu.domain.names import CONTROL_SOCKET, LEDGER
from nri_gpu.domain.node import Inventory
from nri_gpu.driver.controller import Around, DriverKeeper, DriverPlace
from nri_gpu.driver.profiles import ProfileKeeper
from nri_gpu.health.controller import HealthController, HealthDependencies, HealthPlace
from nri_gpu.inventory.controller import Followers, InventoryCache, InventoryController
from nri_gpu.inventory.node_watch import node_watch
from nri_gpu.kubelet.controller import KubeletController
from nri_gpu.kubelet.labels import LabelController
from nri_gpu.mps.controller import MpsController
from nri_gpu.mps.daemon import MpsTools
from nri_gpu.mps.folders import user_of
from nri_gpu.mps.gpu_controller import MpsDependencies
from nri_gpu.nri.convert import Configured
from nri_gpu.plugin.handlers import REQUEST_TIMEOUT_S, Outside, Plugin
from nri_gpu.plugin.releasing import Rechecks
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import Identity, Supervisor, Watchers
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.policy.mps import MpsSettings
from nri_gpu.policy.service import AuditSettings
from nri_gpu.simulation.source import source_of
from nri_gpu.system.log_once import LogOnce
from nri_gpu.system.notify import Notifier
from nri_gpu.system.state import Board
from nri_gpu.system.succession import Succession
from nri_gpu.system.tasks import cancelled, exit_code

DRAIN_S: Final = 5.0
HEALTH_FILE: Final = "health.json"  # in the state folder
LEDGER_DELAY_S: Final = 0.05  # changes come in bursts; the file is for people
STARTING: Final = Inventory(
    taken_at=0, fault="nri-gpu has just started and has not heard from the driver yet; try again in a moment"
)


class Fixed(Struct, frozen=True):
    """Settings that hold for the life of the process; a reload that changes one says that it needs a restart."""

    socket: str
    driver_root: str
    host_root: str
    library_dirs: tuple[str, ...]
    stage_dir: str
    refresh_s: int
    compat_dir: str
    audit: AuditSettings
    kubelet: KubeletSettings


class Daemon:
    """The running service."""

    def __init__(
        self,
        state: StateFolder,
        key: bytes,
        policy_file: PolicyFile,
        topology: Path | None,
        succession: Succession | None = None,
    ) -> None:
        self._state = state
        self._succession = succession or Succession(state.path)
        self._hands_over = self._handed_over = False  # the next daemon is there; it has the state folder
        self._policy_file = policy_file
        self._notifier = Notifier()
        looking_for = "the driver's files are being looked for; try again in a moment"
        self._board = Board(STARTING, looking_for)
        self._mps = MpsController(
            state.path.absolute(),
            lambda: self._plugin.ledger if self._synchronized else None,
            MpsDependencies(lambda: MpsTools.of(self._board.snapshot().driver), self._mps_settings),
            self._board.put_mps,
        )
        self._inventory = InventoryController(
            self._board,
            Followers(
                driver=lambda: self._driver.look_again(),
                profiles=lambda: self._profiles.look_again(),
                labels=lambda: self._labels.look_again(),
            ),
        )
        policy = self._first_policy()
        settings = policy_file.salvage if policy.fault else policy
        self._fixed = _fixed(settings)
        self._identity = Identity(settings.plugin.name, settings.plugin.index)
        place = HealthPlace(
            driver_root=self._fixed.driver_root,
            library_dirs=self._fixed.library_dirs,
            file=state.path / HEALTH_FILE,
            simulated=topology is not None,
        )
        self._health = HealthController(
            place,
            HealthDependencies(
                policy=self._settings,
                ledger=lambda: self._plugin.ledger if self._synchronized else None,
                publish=self._inventory.publish,
                refresh=lambda: self._cache.poke(),
            ),
        )
        source = source_of(topology, self._fixed.driver_root, self._fixed.library_dirs, host_root=self._fixed.host_root)
        self._cache = InventoryCache(
            self._health.watching(source),
            publish=self._inventory.publish,
            on_fault=self._inventory.not_refreshed,
            looked=self._looked,
            refresh_s=self._fixed.refresh_s,
        )
        self._rechecks = Rechecks(self._cache.poke, lambda: self._plugin.waiting())
        self._audit = _audit_log(settings, state.path)
        recorder = StateRecorder(
            Journal(state.path / JOURNAL, key), self._audit, self._later, settings.ledger.created_grace_s
        )
        self._plugin = Plugin(
            Outside(
                snapshot=self._board.snapshot,
                clock=time.monotonic,
                later=self._later,
                changed=self._ledger_changed,
                inventory_age_s=self._cache.age_s,
                recorder=recorder,
                left=self._rechecks.begin,
                start_hindrance=self._mps.start_hindrance,
                user_of=user_of,
                stage_dir=os.path.realpath(self._fixed.stage_dir),
            ),
            policy,
            key,
        )
        self._recall(state.path / LEDGER)
        self._kubelet = KubeletController(self._board, self._plugin, self._fixed.kubelet, self._succession)
        self._board.changed = self._snapshot_changed
        self._sizes = Sizes(lambda: self._settings().plugin.request_bytes, self._later)
        self._supervisor = Supervisor(
            self._plugin, lambda: self._identity, Watchers(self._configured, self._ready, self._away), self._sizes
        )
        self._note(policy)
        subjects = Subjects(
            self._board,
            self._plugin,
            self._cache,
            self._inventory,
            self._kubelet,
            lambda: self._sizes.fault,
            {**policy_file.options, **({"topology": str(topology.absolute())} if topology else {})},
        )
        self._reporter = Reporter(state.path / CONTROL_SOCKET, subjects)
        self._watch = node_watch(source.kernel_view, self._node_changed, simulated=topology is not None)
        self._stop = asyncio.Event()
        self._ledger_timer: asyncio.TimerHandle | None = None
        self._ledger_faults = LogOnce()
        self._reloading: set[asyncio.Task[None]] = set()
        self._one_reload = asyncio.Lock()
        self._synchronized = False
        self._profiles = ProfileKeeper(Path(self._fixed.stage_dir), self._board)
        self._labels = LabelController(self._board, self._labels_file, self._fixed.kubelet)
        self._policy_watch: PolicyWatch | None = None
        self._driver = DriverKeeper(
            DriverPlace(
                root=Path(self._fixed.driver_root),
                library_dirs=self._fixed.library_dirs,
                stage_dir=Path(self._fixed.stage_dir),
                state_dir=state.path,
                simulated=topology is not None,
                retry_s=self._fixed.refresh_s,
                compat_dir=Path(self._fixed.compat_dir) if self._fixed.compat_dir else None,
            ),
            self._board,
            Around(self._generations, self._module_changed),
        )
        self._simulated = topology is not None
        self._snapshots = SnapshotKeeper(
            state,
            key,
            Host(
                driver_root=Path(self._fixed.driver_root),
                library_dirs=self._fixed.library_dirs,
                stage_dir=Path(self._fixed.stage_dir),
                look=source.kernel_view,
                answered=lambda: source.answered,
                scanned=lambda: self._driver.scanned,
            ),
            self._board,
        )

    def watch_policy(self, file: Path) -> None:
        """Reload whenever that file is another one, too."""
        self._policy_watch = PolicyWatch(file, self._reload)

    async def run(self, inherited: int | None) -> Exit:
        """Serve until SIGTERM, SIGINT, or the end of a connection that we were started with."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._notifier.feed_watchdog()
        self._kubelet.begin()
        if not self._simulated and self._snapshots.restore(self._cache):
            self._profiles.look_again()
            self._labels.look_again()
        kubelet = asyncio.create_task(self._kubelet.run())
        serving = asyncio.create_task(self._serve(inherited))
        rest = [
            self._driver.run(),
            self._cache.run(),
            self._health.run(),
            self._profiles.run(),
            self._watch.run(),
            self._snapshots.run(),
            self._mps.run(),
            self._labels.run(),
            self._reporter.run(),
            *([self._policy_watch.run()] if self._policy_watch else []),
        ]
        last = [serving, *([asyncio.create_task(self._audit.run())] if self._audit else [])]
        parts = [kubelet, *last, *map(asyncio.create_task, rest)]
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stopping, *parts}, return_when=asyncio.FIRST_COMPLETED)
        code = exit_code(parts)
        self._notifier.stopping()
        if self._hands_over:  # the others first, for the time without NRI to be short
            await cancelled(each for each in parts if each not in (kubelet, *last))
        await self._supervisor.stop(DRAIN_S)
        await cancelled(each for each in (stopping, *parts) if each is not kubelet or not self._hands_over)
        self._write_ledger()
        if self._hands_over:
            self._handed_over = True
            self._state.close()
            threads = asyncio.create_task(loop.shutdown_default_executor())
            threads.add_done_callback(lambda _: self.close())
            await self._succession.passed()
            await cancelled([kubelet])
        self._notifier.close()
        logger.info("stopped")
        return code

    def close(self) -> None:
        """Let the next daemon have the stage folder; after `run`, when no thread is left."""
        self._driver.close()

    async def _serve(self, inherited: int | None) -> None:
        if inherited is not None:
            await self._supervisor.run_inherited(inherited)
        else:
            await self._supervisor.run(Path(self._fixed.socket))

    def _recall(self, file: Path) -> None:
        try:
            self._plugin.recall(former_ledger(file, time.monotonic()))
        except (OSError, ValueError) as error:
            logger.bind(path=str(file), fault=str(error)).warning("last ledger not read; who left a GPU is not known")

    def _first_policy(self) -> Policy:
        try:
            return self._policy_file.load()
        except PolicyError as error:
            for fault in error.faults:
                logger.bind(fault=str(fault)).error("policy not usable")
            last = self._policy_file.last_good()
            if last is None:
                logger.error("no good policy is kept: every container that asks will be refused")
                return Policy.broken(str(error.faults[0]))
            logger.warning("started on the last good policy")
            return last

    def _settings(self) -> Policy:
        policy = self._plugin.policy
        return self._policy_file.salvage if policy.fault else policy

    def _reload(self) -> None:
        """SIGHUP: the policy again, and the node again."""
        task = asyncio.get_running_loop().create_task(self._read_again())
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    async def _read_again(self) -> None:
        try:
            async with self._one_reload:
                # In a thread: thousands of rules take as long to read as the runtime waits for an answer.
                policy = await asyncio.to_thread(self._policy_file.load)
        except PolicyError as error:
            for fault in error.faults:
                logger.bind(fault=str(fault)).error("policy not reloaded, the old one stays")
        else:
            self._use(policy)
            self._identity = Identity(policy.plugin.name, policy.plugin.index)
            self._kubelet.changed()
            logger.bind(path=policy.source).info("policy reloaded")
            self._warn_of_fixed(policy)
        self._cache.poke()
        self._driver.look_again()

    def _use(self, policy: Policy) -> None:
        """From here on decisions are by this one."""
        self._plugin.policy = policy
        self._note(policy)
        self._health.changed()
        self._reporter.policy_changed()
        self._labels.look_again()
        self._mps.look_again()

    def _note(self, policy: Policy) -> None:
        if self._audit is None:
            return
        text = self._policy_file.taken
        if policy.fault:
            self._audit.policy_changed(PolicyNote("", "", policy.fault))
        else:
            self._audit.policy_changed(PolicyNote(text.file, text.text) if text else PolicyNote("", ""))

    def _warn_of_fixed(self, policy: Policy) -> None:
        if _fixed(policy) != self._fixed:
            logger.warning("socket, folders, audit log, refresh interval and [kubelet] change with a restart only")

    def _later(self, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(action)

    def _looked(self, inventory: Inventory, began: float) -> None:
        self._inventory.answered()
        self._plugin.looked(inventory, began)

    def _module_changed(self) -> None:
        self._inventory.module_changed(self._board.snapshot().module_version or "")
        self._cache.poke()

    def _node_changed(self) -> None:
        """Seen from outside the driver: a device, a node, a module, an instance came or went."""
        self._cache.poke()
        self._driver.look_soon()

    def _snapshot_changed(self) -> None:
        self._plugin.observe()
        self._kubelet.changed()

    def _labels_file(self) -> str:
        return self._settings().labels.file

    def _generations(self) -> frozenset[str] | None:
        """Which drivers' files containers have mounted, once the runtime has told."""
        return self._plugin.ledger.generations() if self._synchronized else None

    def _mps_settings(self) -> MpsSettings:
        return self._plugin.policy.mps

    def _configured(self, configured: Configured) -> None:
        """A plugin that the runtime starts finds its drop-in file's text here: that file is its policy."""
        self._reporter.configured(configured)
        self._kubelet.configured(configured)
        self._plugin.request_timeout_s = configured.request_timeout_ms / 1000 or REQUEST_TIMEOUT_S
        if not configured.config.strip():
            return
        try:
            policy = self._policy_file.load_text("the runtime's NRI configuration for this plugin", configured.config)
        except PolicyError as error:
            self._use(Policy.broken(str(error.faults[0])))
            for fault in error.faults:
                logger.bind(fault=str(fault)).error("policy not usable")
        else:
            self._use(policy)
            self._warn_of_fixed(policy)

    def _ready(self) -> None:
        self._synchronized = True
        self._kubelet.connected(not self._stop.is_set())
        if not self._fixed.kubelet.enabled:
            self._succession.settled()
        self._mps.look_again()
        self._health.changed()
        self._reporter.ready()
        status = f"serving {self._fixed.socket}, {len(self._plugin.ledger.entries)} grants"
        if without := len(self._plugin.ungranted):
            status += f", {without} containers run without the GPUs they asked for"
        self._notifier.ready(status)

    def _away(self, why: str) -> None:
        self._kubelet.connected(False)
        self._reporter.away(why)
        self._notifier.status(f"not connected: {why}")

    def _ledger_changed(self, ledger: Ledger) -> None:
        self._kubelet.changed()
        if self._handed_over:
            return  # what Allocate gives now the next daemon hears of PodResources
        self._mps.look_again()
        self._health.changed()
        if self._audit:
            self._audit.ledger_changed(ledger)
        # What is written to the file for people is the newest when the timer is up.
        if self._ledger_timer is None:
            self._ledger_timer = asyncio.get_running_loop().call_later(LEDGER_DELAY_S, self._write_ledger)

    def _write_ledger(self) -> None:
        if self._ledger_timer:
            self._ledger_timer.cancel()
        self._ledger_timer = None
        try:
            self._state.write_ledger(self._plugin.ledger)
        except OSError as error:
            self._ledger_faults.warning("ledger.json not written; the grants on the containers hold", str(error))
        else:
            self._ledger_faults.clear()

    def _asked_to_stop(self, number: signal.Signals) -> None:
        logger.bind(signal=number.name).info("stopping")
        self._hands_over = self._fixed.kubelet.enabled and self._succession.awaited()
        if self._hands_over:
            self._kubelet.stop_registering()
        else:  # at once: what is in flight is still answered for a while, and pods admitted
            self._kubelet.connected(False)
        self._stop.set()


def _audit_log(policy: Policy, state: Path) -> AuditLog | None:
    settings = policy.audit
    folder = Path(settings.dir) if settings.dir else state
    return AuditLog(folder, settings.max_mib << 20, time.time) if settings.max_mib else None


def _fixed(policy: Policy) -> Fixed:
    driver = policy.driver
    return Fixed(
        policy.plugin.socket,
        driver.root,
        driver.host_root,
        driver.library_dirs,
        driver.stage_dir,
        policy.inventory.refresh_s,
        policy.compat.dir,
        policy.audit,
        policy.kubelet,
    )
