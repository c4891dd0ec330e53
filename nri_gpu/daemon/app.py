"""The running daemon, which builds its parts, starts their tasks, and ends them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.cordon.cordon_controller import CordonController
from nri_gpu.cordon.cordon_file import CordonRecord
from nri_gpu.daemon.answers import (
    CordonAnswer,
    CordonStatus,
    DraStatus,
    KubeletStatus,
    PolicyStatus,
    ProcessesAnswer,
    RecordStatus,
    RepairedAnswer,
    StrayStatus,
)
from nri_gpu.daemon.connection_report import ConnectionReport
from nri_gpu.daemon.control import Command, ControlSocket
from nri_gpu.daemon.metrics import MetricsController
from nri_gpu.daemon.node_controllers import NodeControllers, restart_only
from nri_gpu.daemon.view import View, processes_of
from nri_gpu.domain.errors import Exit, fault_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import CONTROL_SOCKET, LEDGER
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import counted
from nri_gpu.dra.dra_controller import DraController
from nri_gpu.kubelet.kubelet_controller import KubeletController
from nri_gpu.kubelet.read_listing import without_unnamed
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.nri.convert import Configured
from nri_gpu.plugin.decision_log import Refusals
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.guard_status import guard_connected
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.plugin.holds_follower import HoldsFollower
from nri_gpu.plugin.registration_pause import AwayFile
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import Identity, SessionFollowers, Supervisor
from nri_gpu.policy.dra_settings import dra_faults
from nri_gpu.policy.model import Policy
from nri_gpu.records.audit import AuditLog
from nri_gpu.records.audit_records import PolicyRecord
from nri_gpu.records.journal import JOURNAL, Journal
from nri_gpu.records.kept_folder import kept_folder
from nri_gpu.records.ledger_file import LedgerFile, read_ledger
from nri_gpu.records.policy_file import PolicyFile, first_policy
from nri_gpu.records.policy_reload import PolicyReload, PolicyWatch
from nri_gpu.records.recorder import StateRecorder
from nri_gpu.records.state_folder import StateFolder
from nri_gpu.records.usage_lines import device_named, devices_of, now
from nri_gpu.records.usage_log import UsageLog
from nri_gpu.stray.stray_controller import StrayController
from nri_gpu.system.cgroups import ContainerCgroups, mounts_of
from nri_gpu.system.child import unkilled
from nri_gpu.system.cpu import why_no_hwcaps
from nri_gpu.system.liveness import LivenessFile
from nri_gpu.system.node_name import node_name
from nri_gpu.system.runtime_cri import REVOKED, RuntimeCri
from nri_gpu.system.service_manager import Notifier
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.storage import boot_id
from nri_gpu.system.succession import Succession
from nri_gpu.system.tasks import cancelled, exit_code, later

DRAIN_S: Final = 5.0
STARTING: Final = Inventory(
    taken_at=0, fault="nri-gpu has just started, and the driver has not answered yet; try again in a moment"
)
LOOKING_FOR_FILES: Final = "the driver's files are being searched for; try again in a moment"


class Daemon:
    def __init__(
        self,
        folder: StateFolder,
        key: bytes,
        policy_file: PolicyFile,
        topology: Path | None,
        succession: Succession | None = None,
        liveness: LivenessFile | None = None,
        *,
        joins_runtime: bool = True,
    ) -> None:
        self._folder = folder
        self._succession = succession or Succession(folder.path)
        self._joins = joins_runtime
        self._hands_over = False  # told to stop while its successor stands by
        self._notifier = Notifier()
        self._liveness = liveness or LivenessFile(None)
        self._stop = asyncio.Event()
        self._asides: set[asyncio.Task[None]] = set()
        self._serving = ""  # what the service manager is told; empty while no runtime is served
        self._node_known = False
        self._policy_file = policy_file
        self._policy_watch: PolicyWatch | None = None
        policy = first_policy(policy_file)
        policy_file.keep_options()
        state = self._state = NodeState(
            STARTING, LOOKING_FOR_FILES, policy, fallback=policy_file.salvage, hwcaps=not why_no_hwcaps()
        )
        fixed = self._fixed = state.settings  # for the life of the process
        self._policy = PolicyReload(policy_file, state, self._warn_of_fixed, lambda: self._sizes.namespaces())
        self._audit = _audit_log(fixed, folder.path)
        self._cri = RuntimeCri(lambda: state.settings.guard)
        kept = kept_folder(fixed.usage, simulated=topology is not None)
        self._usage = _usage_log(fixed, kept)
        self._record = RecordStatus(str(kept), "") if self._usage else RecordStatus("", str(kept))
        self._holds = HoldsFollower(state, self._usage, now, boot_id(), later)
        self._node = NodeControllers(
            state, fixed, folder, key, topology, lambda: self._sizes.containers(), stages=joins_runtime
        )
        self._refusals = Refusals()
        self._plugin = self._make_plugin(key)
        self._kubelet = self._make_kubelet()
        self._dra = DraController(folder.path, state, self._plugin, fixed)
        self._ledger_file = LedgerFile(folder.path / LEDGER, state)
        self._sizes = self._make_sizes()
        self._stray = StrayController(state, self._sizes.containers)
        self._away_file = AwayFile(folder.path, state, self._kubelet.fail_open)
        self._supervisor = self._make_supervisor()
        self._options = {**policy_file.options, **({"topology": str(topology.absolute())} if topology else {})}
        self._connection = ConnectionReport()
        self._control = self._make_control()
        self._metrics = MetricsController(fixed.metrics, self._view, sampled=self._node.usage.ask)
        self._recall()
        self._cordons = CordonController(kept, state, told=self._cordoned, module_load=self._node.module_load)
        self._follow()
        self._holds.follow()

    def _make_plugin(self, key: bytes) -> Plugin:
        journal = Journal(self._folder.path / JOURNAL, key)
        grace_s = self._fixed.ledger.created_grace_s
        needs = PluginDependencies(
            clock=time.monotonic,
            later=later,
            inventory_age_s=self._node.cache.age_s,
            recorder=StateRecorder(journal, self._audit, later, grace_s),
            look_at_gpus=self._node.cache.poke,
            start_hindrance=self._node.mps.start_hindrance,
            kill=lambda names: self._cri.kill(names, REVOKED),
            stage_dir=os.path.realpath(self._fixed.driver.stage_dir),
            registered=lambda: self._policy.registered,
            refusals=self._refusals,
            cgroups=ContainerCgroups(mounts_of("self")),
        )
        return Plugin(self._state, needs, key)

    def _make_sizes(self) -> Sizes:
        return Sizes(
            lambda: self._state.settings.plugin,
            later,
            self._refusals.add,
            cri=self._cri,
            forgotten=self._plugin.sandbox_forgotten,
        )

    def _make_kubelet(self) -> KubeletController:
        dra, kubelet = self._fixed.dra, self._fixed.kubelet
        twice = any(dra_faults(dra, kubelet))
        parts = (self._state, self._plugin, kubelet, self._succession)
        return KubeletController(*parts, offered_twice=twice, claims=dra.enabled)

    def _make_supervisor(self) -> Supervisor:
        followers = SessionFollowers(self._configured, self._ready, self._away, self._waits)
        parts = (self._plugin, self._identity, followers, self._sizes)
        return Supervisor(*parts, away_opens_nothing=lambda: self._away_file.opens_nothing)

    def _make_control(self) -> ControlSocket:
        commands: dict[str, Command] = {
            "repaired": self._repaired,
            "cordon": self._cordon,
            "uncordon": self._uncordon,
            "processes": self._processes,
        }
        path = self._folder.path / CONTROL_SOCKET
        return ControlSocket(path, self._state, self._view, commands, self._node.usage.ask)

    def _identity(self) -> Identity:
        return Identity(self._policy.registered.name, self._policy.registered.index)

    def _follow(self) -> None:
        self._node.cache.subscribe(self._plugin.looked)
        self._node.cache.subscribe(self._cordons.looked)
        self._state.then(self._cordons.follow_ledger, Changed.LEDGER)
        self._state.then(self._plugin.observe, Changed.NODE, Changed.POLICY)
        self._state.then(self._control.policy_changed, Changed.POLICY)
        if self._audit:
            self._state.first(self._note_policy, Changed.POLICY)
            self._audit.follow(self._state)
            self._note_policy()

    def _recall(self) -> None:
        """Go by the previous daemon's ledger until the runtime has listed its containers.

        No follower is told: only in a connection is it known whose PIDs the runtime names, and whoever looked for a
        lost container's processes before would find none, and let its GPU go.
        """
        file, ledger = self._folder.path / LEDGER, Ledger()
        try:
            ledger = read_ledger(file, time.monotonic())
        except (OSError, ValueError) as error:
            bound = logger.bind(path=str(file), fault=fault_of(error))
            bound.warning("last ledger not read; recently released GPUs are unknown")
        ledger = without_unnamed(ledger, self._fixed.kubelet)
        prepared = {} if self._plugin.external.pods is None else ledger.prepared  # nobody would tell of their end
        self._state.ledger = replace(ledger, prepared=prepared, claims=self._dra.recalled())

    def watch_policy(self, file: Path) -> None:
        """Reload the policy whenever `file` changes, too."""
        self._policy_watch = PolicyWatch(file, self._reload)

    async def run(self, inherited: int | None) -> Exit:
        """Serve until SIGTERM, SIGINT, or the end of the connection that we were started with."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._notifier.feed_watchdog()
        self._liveness.keep(self._is_ready)
        self._folder.watch()
        self._kubelet.begin()
        self._cordons.begin()
        self._node.restore()
        kubelet = asyncio.create_task(self._kubelet.run())
        # The last tasks to end: requests in flight are answered, and the audit log has them.
        last = [asyncio.create_task(self._serve(inherited))]
        last += [asyncio.create_task(each.run()) for each in (self._audit, self._usage) if each]
        parts = (self._control.run(), self._metrics.run(), self._stray.run(), self._policy.run(), self._dra.run())
        rest = [
            asyncio.create_task(each)
            for each in (
                *self._node.runs(),
                *parts,
                self._cordons.run(),
                self._plugin.monitors.run(self._plugin.observe),
            )
        ]
        if self._policy_watch:
            rest.append(asyncio.create_task(self._policy_watch.run()))
        stopping, telling = asyncio.create_task(self._stop.wait()), asyncio.create_task(self._tell_when_known())
        await asyncio.wait({stopping, kubelet, *last, *rest}, return_when=asyncio.FIRST_COMPLETED)
        code = exit_code([kubelet, *last, *rest])
        self._notifier.stopping()
        if self._hands_over:  # the others first, so that the time without NRI is short
            await cancelled(rest)
        await self._supervisor.stop(DRAIN_S)
        await cancelled([stopping, telling, *last, *rest, *([] if self._hands_over else [kubelet])])
        self._ledger_file.close()
        if self._hands_over:
            await self._hand_over(kubelet)
        self._notifier.close()
        logger.info("stopped")
        return code

    def close(self) -> None:
        """Release the stage folder for the next daemon; after `run`, when no thread is left."""
        self._node.close()

    async def _serve(self, inherited: int | None) -> None:
        if inherited is not None:
            await self._supervisor.run_inherited(inherited)
        elif not self._joins:
            self._connection.alone()
            self._serving = "a simulation, which joins no runtime"
            self._tell_ready()
            await self._stop.wait()
        else:
            await self._supervisor.run(Path(self._fixed.plugin.socket))

    async def _hand_over(self, kubelet: asyncio.Task[None]) -> None:
        """Release the folders, and serve the kubelet until the successor does."""
        self._folder.close()
        threads = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
        threads.add_done_callback(lambda _: self.close())
        await self._succession.passed()
        await cancelled([kubelet])

    def _asked_to_stop(self, number: signal.Signals) -> None:
        logger.bind(signal=number.name).info("stopping")
        self._hands_over = self._fixed.kubelet.enabled and self._succession.awaited()
        if self._hands_over:
            self._kubelet.stop_registering()
        else:  # at once: what is in flight is still answered for a while, and pods admitted
            self._kubelet.connected(False)
        self._stop.set()

    def _reload(self) -> None:
        """Read the policy again, and look at the node again, on SIGHUP."""
        self._aside(self._read_again())

    def _aside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def _read_again(self) -> None:
        await self._policy.read_again()
        await self._cordons.read_again()
        self._node.look_again()

    def _warn_of_fixed(self, policy: Policy) -> None:
        in_force = restart_only(self._fixed)
        changed = [name for name, value in restart_only(policy).items() if value != in_force[name]]
        if changed:
            logger.bind(settings=", ".join(changed)).warning("reloaded policy changes settings that need a restart")

    def _configured(self, configured: Configured) -> None:
        self._plugin.runtime = configured.runtime
        self._connection.configured(configured)
        self._kubelet.configured(configured)
        self._dra.configured(configured)
        self._policy.configured(configured.config)

    def _ready(self) -> None:
        self._away_file.look()
        self._kubelet.connected(not self._stop.is_set())
        self._dra.connected(True)
        if not self._fixed.kubelet.enabled:
            self._succession.settled()
        self._connection.ready()
        self._aside(self._plugin.second.look(Path(self._fixed.plugin.socket)))
        status = f"serving {self._fixed.plugin.socket}"
        if without := len(self._plugin.ungranted):
            status += f", {counted(without, 'container')} without the GPUs asked for"
        self._serving = status
        self._tell_ready()

    async def _tell_when_known(self) -> None:
        """Be ready no earlier than the node: the kubelet waits for us, and its first container would be refused."""
        await self._node.known()
        self._node_known = True
        self._tell_ready()

    def _is_ready(self) -> bool:
        """Return whether the pod is ready: containers can be granted GPUs, or a successor is taking over."""
        return self._view().grants or self._succession.awaited()

    def _tell_ready(self) -> None:
        if self._serving and self._node_known:
            self._notifier.ready(self._serving)

    def _away(self, why: str) -> None:
        self._serving = ""
        self._kubelet.connected(False)
        self._dra.connected(False)
        self._waits(why)

    def _waits(self, why: str) -> None:
        """Report only that we wait: the kubelet may go on with a successor, for nothing is created without it."""
        self._connection.away(why)
        self._notifier.status(f"not connected: {why}")

    def _policy_status(self, policy: Policy) -> PolicyStatus:
        """Return which policy is in force. Where there is none, as every request is refused, no text is in force."""
        file = self._policy_file
        if policy.fault:
            return PolicyStatus(policy.source, policy.fault)
        # A file with a fault is rejected where the policy before it stays in force.
        return PolicyStatus(policy.source, "", file.fault, file.taken.digest if file.taken else "")

    def _view(self) -> View:
        """Return the daemon as it is now."""
        state, policy, cache, health = self._state, self._state.policy, self._node.cache, self._node.health
        resources, stray, dra = self._kubelet.report(), self._stray, self._dra
        return View(
            node=state.node,
            node_name=node_name(),
            ledger=state.ledger,
            connection=self._connection.connection(
                self._supervisor.facts,
                self._sizes.fault,
                self._cri.hindrance() if self._joins else "",
                self._plugin.second.proof,
            ),
            wall=time.time(),
            monotonic=time.monotonic(),
            inventory_age_s=cache.age_s(),
            inventory_fault=cache.fault,
            inventory_confirmed=cache.confirmed or cache.current is None,
            policy=self._policy_status(policy),
            settings=state.settings,
            options=self._options,
            counts=self._plugin.counts,
            refusals=tuple(self._refusals.last),
            usages=self._node.usage.report(),
            ungranted=len(self._plugin.ungranted),
            lost=self._plugin.processes.described(),
            held=self._holds.seconds(),
            record=self._record,
            unkilled=unkilled(),
            history=self._node.inventory.history,
            restarts=self._node.restarts(),
            health_transitions=health.transitions,
            notes=health.notes(),
            xids=health.xids.counts,
            kubelet=KubeletStatus(resources is not None, resources or (), self._kubelet.fail_open()),
            dra=DraStatus(
                enabled=dra.settings.enabled,
                driver=dra.settings.driver,
                asked_s=dra.asked_s,
                silent_s=dra.silent_s(),
                report=dra.report,
                fault=dra.fault,
            ),
            stray=StrayStatus(state.settings.stray.enabled, stray.looked_s, stray.fault, stray.findings),
            cordons={
                uuid: CordonStatus(at_s=each.at_s, by=each.by, why=each.why, until_reset=each.reset is not None)
                for uuid, each in self._cordons.records.items()
            },
            cordon_fault=self._cordons.fault,
            guard_connected=guard_connected(Path(self._fixed.metrics.guard_dir)) if self._joins else None,
        )

    async def _processes(self, _: str) -> ProcessesAnswer:
        """Return the processes on GPUs, as the last samples saw them. Nothing keeps or logs them."""
        return processes_of(self._node.usage.processes(), self._node.usage.report(), self._sizes.containers())

    async def _repaired(self, word: str) -> RepairedAnswer:
        """Record root's confirmation that a GPU was reset."""
        uuid, due = self._node.health.repaired(word)
        awaited = self._cordons.repaired(uuid)
        if due:
            logger.bind(gpu_uuid=uuid, reason=due).warning("root reported a GPU as reset")
            if self._audit:
                self._audit.repaired(uuid, due)
        return RepairedAnswer(uuid, due, self._state.settings.health.hold_down_s, awaited)

    async def _cordon(self, line: str) -> CordonAnswer:
        """Take a GPU out of use."""
        found = await self._cordons.cordon(line)
        record, usage = self._cordons.records.get(GpuUuid(found.gpu_uuid)), self._state.ledger.usage()
        uses = [usage[uuid] for uuid in record.given if uuid in usage] if record else []
        holders = dict.fromkeys(name for use in uses for name in (*use.pods.values(), *use.idle_claims))
        return CordonAnswer(gpu_uuid=found.gpu_uuid, fault=found.fault, holders=tuple(holders))

    async def _uncordon(self, line: str) -> CordonAnswer:
        """Take a GPU back into use."""
        found = await self._cordons.uncordon(line)
        return CordonAnswer(gpu_uuid=found.gpu_uuid, fault=found.fault, withheld=found.withheld)

    def _cordoned(self, uuid: GpuUuid, record: CordonRecord, ended: str) -> None:
        """Keep who took a GPU out of use, when and why, and how it came back: log, history and audit log."""
        bound = logger.bind(gpu_uuid=uuid, name=record.by, reason=ended or record.why)
        bound.info("GPU is in use again" if ended else "root took a GPU out of use")
        what = f"is in use again: {ended}" if ended else f"is taken out of use by {record.by}: {record.why}"
        self._node.inventory.cordoned(uuid, what, worse=not ended)
        if self._audit:
            self._audit.cordoned(uuid, record.by, record.why, ended)
        if self._usage:
            device = device_named(uuid, devices_of(self._state.node.inventory))
            self._usage.cordoned(device, record.by, record.why, record.at_s, ended)

    def _note_policy(self) -> None:
        assert self._audit
        text, fault = self._policy_file.taken, self._state.policy.fault
        known = (text.file, text.text) if text and not fault else ("", "")
        self._audit.policy_changed(PolicyRecord(*known, fault))


def _usage_log(policy: Policy, kept: Path | str) -> UsageLog | None:
    """Return the record of holds. kept: its folder, or why there is none."""
    if isinstance(kept, str):
        return None
    return UsageLog(kept, boot_id(), now, keep_days=policy.usage.keep_days, keep_mib=policy.usage.keep_mib)


def _audit_log(policy: Policy, state: Path) -> AuditLog | None:
    settings = policy.audit
    folder = Path(settings.dir) if settings.dir else state
    return AuditLog(folder, settings.max_mib << 20, time.time) if settings.max_mib else None
