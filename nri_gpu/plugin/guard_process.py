"""`nri-gpu guard`: the guard as a process of its own, so that whatever ends the daemon does not end the guard."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from nri_gpu.domain.errors import Exit, PolicyError, fault_of
from nri_gpu.domain.text import counted
from nri_gpu.nri.convert import Configured
from nri_gpu.plugin.guard import Guard
from nri_gpu.plugin.guard_state import DaemonState
from nri_gpu.plugin.guard_status import REPORT_EVERY_S, GuardStatus, process_started, write_guard_status
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import Identity, SessionFollowers, Supervisor
from nri_gpu.policy.model import Policy
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.records.policy_file import build_policy, load_last_good, read_policy, was_kept
from nri_gpu.system.container_stops import stop_containers
from nri_gpu.system.liveness import LivenessFile
from nri_gpu.system.runtime_cri import REVOKED, RuntimeCri
from nri_gpu.system.service_manager import Notifier, run_until_told
from nri_gpu.system.tasks import LogOnce, cancelled, later

DRAIN_S: Final = 2.0


def guard_settings(state_dir: Path, path: Path | None, options: Mapping[str, object]) -> Policy | None:
    """Return the policy that the daemon would start with; None where neither the file nor the last good one is usable.

    Each fault is logged.
    """
    try:
        return build_policy(read_policy(path, in_force=was_kept(state_dir)), options, all_options=False)
    except PolicyError as error:
        for fault in error.faults:
            logger.bind(fault=str(fault)).error("policy not usable")
    try:
        return load_last_good(state_dir, options)
    except (PolicyError, OSError) as error:
        logger.bind(fault=fault_of(error)).error("last good policy not usable either")
        return None


def _plugin_settings(policy: Policy, fallback: Policy) -> PluginSettings:
    return (fallback if policy.fault else policy).plugin


class GuardProcess:
    def __init__(self, settings: Policy, state: DaemonState, run_dir: Path) -> None:
        self._settings = settings
        self._state = state
        self._run_dir = run_dir
        self._status = GuardStatus(pid=os.getpid(), started=process_started(os.getpid()))
        self._faults = LogOnce()
        self._notifier = Notifier()
        self._liveness = LivenessFile(run_dir)
        self._guard = Guard(state, later)
        identity = Identity(settings.guard.name, settings.guard.index)
        # The daemon's limit, also while it is away.
        self._cri = RuntimeCri(lambda: settings.guard)
        sizes = Sizes(lambda: _plugin_settings(state.policy(), settings), later, counts=False, cri=self._cri)
        followers = SessionFollowers(self._configured, self._ready, self._away, self._away)
        self._supervisor = Supervisor(
            self._guard, lambda: identity, followers, sizes, away_opens_nothing=state.away_opens_nothing
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Exit:
        self._keep_writing()
        self._liveness.keep(lambda: self._status.connected)
        self._tasks.add(asyncio.create_task(self._state.follow()))
        serving = asyncio.create_task(self._supervisor.run(Path(self._settings.plugin.socket)))
        return await run_until_told(serving, self._notifier, self._ending)

    async def _ending(self) -> None:
        await self._supervisor.stop(DRAIN_S)
        await cancelled(self._tasks)

    def _configured(self, configured: Configured) -> None:
        self._guard.runtime, self._guard.version = configured.runtime, configured.version
        self._status = replace(self._status, runtime=configured.runtime, runtime_version=configured.version)

    def _ready(self) -> None:
        found = self._guard.found
        without = len(found.running) + len(found.doubtful)
        self._status = replace(
            self._status,
            connected=True,
            validates=self._supervisor.validates,
            ungranted=without,
            fault="",
            cri_fault=self._cri.hindrance(),
        )
        logger.bind(ungranted=without, waiting=len(found.waiting)).info("guarding")
        status = f", {counted(without, 'container')} without the GPUs asked for" if without else ""
        self._notifier.ready(f"guarding {self._settings.plugin.socket}{status}")
        later(self._write_status)
        if found.revoked:
            self._cri.kill({each.id: each.pod.full_name for each in found.revoked}, REVOKED)
        if found.running and self._settings.guard.stop_ungranted:
            task = asyncio.create_task(self._stop_containers(found.running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _away(self, why: str) -> None:
        self._notifier.status(f"not connected: {why}")
        self._status = replace(self._status, connected=False, fault=why)
        self._write_status()

    async def _stop_containers(self, containers: list[Container]) -> None:
        """Stop containers without any grant: a grant that is not valid may be ours, from before the key was lost."""
        names: dict[str, str] = {container.id: container.pod.full_name for container in containers}
        await stop_containers(names, self._settings.guard, "it ran without the GPUs it asked for")

    def _write_status(self) -> None:
        with self._faults.guard("guard status not written", path=str(self._run_dir)):
            write_guard_status(self._run_dir, replace(self._status, policy_fault=self._state.policy_fault))

    def _keep_writing(self) -> None:
        self._write_status()
        asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._keep_writing)
