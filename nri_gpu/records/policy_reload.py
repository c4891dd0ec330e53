"""The policy in force while the daemon runs: the file read again, the runtime's text, a watch on the file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.text import listed
from nri_gpu.policy.model import Policy
from nri_gpu.policy.widening import lost_restrictions, newly_allowed
from nri_gpu.records.policy_file import RUNTIME, PolicyFile
from nri_gpu.system.state import NodeState
from nri_gpu.system.storage import Signature, signature
from nri_gpu.system.tasks import LogOnce

LOOK_S: Final = 10.0
REMIND_S: Final = 30.0
SETTLE_S: Final = 0.2  # a file that is written in place is whole once it has not changed for so long
NAMES_SHOWN: Final = 20


class PolicyReload:
    """The reload of policies."""

    def __init__(
        self,
        file: PolicyFile,
        state: NodeState,
        changed: Callable[[Policy], None],  # called with each good policy that took the place of another
        namespaces: Callable[[], Iterable[str]] = tuple,  # of the node's pods
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registered = state.settings.plugin  # the file's, which say how we register
        self._served = state.settings.kubelet  # for the life of the process
        self._faults = LogOnce(clock=clock)
        self._file = file
        self._state = state
        self._changed = changed
        self._namespaces = namespaces
        self._one_at_a_time = asyncio.Lock()
        if file.from_runtime:
            self._use(file.last_good() or Policy.broken(f"{RUNTIME} has not come yet; try again in a moment"))

    async def run(self) -> None:
        """Warn of what this policy newly allows, and remind of a fault of the file, until cancelled."""
        await self._compare(self._state.policy)
        while True:
            self.remind()
            await asyncio.sleep(REMIND_S)

    def remind(self) -> None:
        """Log a fault of the file that lasts for minutes as one error; its reader has logged the fault before."""
        if fault := self._file.fault:
            self._faults.fault = fault
            self._faults.warning("policy file still has a fault", fault)
        else:
            self._faults.clear()

    async def read_again(self) -> None:
        """Read the file again. A policy with faults is logged, and the one in force stays."""
        try:
            async with self._one_at_a_time:
                # In a thread: thousands of rules take as long to read as the runtime waits for an answer.
                while True:
                    text = self._file.text
                    policy = await asyncio.to_thread(self._file.load, again=True)
                    if text is self._file.text:  # or the runtime's came meanwhile, and has to hold
                        break
        except PolicyError as error:
            _log_kept(error)
            return
        self.registered = policy.plugin
        self._use(policy)
        logger.bind(path=policy.source).info("policy reloaded")
        self._changed(policy)
        await self._compare(policy)

    def configured(self, text: str) -> None:
        """Use the drop-in file's text from Configure: for a plugin that the runtime starts, that is the policy.

        If a text came before and none comes now, the policy in force stays.
        """
        if text.strip():
            self.take_text(text)
        elif self._file.from_runtime:
            self._miss_text()

    def take_text(self, text: str) -> None:
        """Put a text of the runtime's in force; a text with faults refuses every request."""
        try:
            policy = self._file.load_text(text)
        except PolicyError as error:
            self._state.use(Policy.broken(str(error.faults[0])))
            for fault in error.faults:
                logger.bind(fault=str(fault)).error("policy not usable")
        else:
            self._use(policy)
            self._changed(policy)
            self._say_wider(policy, tuple(self._namespaces()))

    def _miss_text(self) -> None:
        try:
            self._file.load_without_text()
        except PolicyError as error:
            if self._state.policy.fault:
                self._state.use(Policy.broken(str(error.faults[0])))
            _log_kept(error)

    def _use(self, policy: Policy) -> None:
        """Put a policy in force, with the device plugin as it is served.

        Whom we inject for is the new policy's: until PodResources is asked, such containers are refused.
        """
        asks, served = policy.kubelet, self._served
        kubelet = replace(served, inject_for=asks.inject_for, reservations=asks.reservations)
        self._state.use(replace(policy, kubelet=kubelet))

    async def _compare(self, policy: Policy) -> None:
        await asyncio.to_thread(self._say_wider, policy, tuple(self._namespaces()))

    def _say_wider(self, policy: Policy, present: tuple[str, ...]) -> None:
        """Warn of namespaces that may ask by this policy and might not by the one before, and of lost restrictions."""
        if not (before := self._file.before):
            return
        if lost := lost_restrictions(before, policy):
            logger.bind(settings=listed(lost, NAMES_SHOWN)).warning("policy has lost restrictions")
        if names := newly_allowed(before, policy, present):
            shown = listed((*names[-NAMES_SHOWN:], *names[:-NAMES_SHOWN]), NAMES_SHOWN)
            logger.bind(namespaces=shown).warning("policy lets more namespaces ask for GPUs")


def _log_kept(error: PolicyError) -> None:
    for fault in error.faults:
        logger.bind(fault=str(fault)).error("policy not reloaded, the old one stays")


class PolicyWatch:
    """The watch that calls `changed` once for each content of the file that it finds."""

    def __init__(
        self, file: Path, changed: Callable[[], None], *, look_s: float = LOOK_S, settle_s: float = SETTLE_S
    ) -> None:
        self._file = file
        self._changed = changed
        self._look_s = look_s
        self._settle_s = settle_s
        self._known = signature(file)

    async def run(self) -> None:
        from nri_gpu.system.folder_watch import folder_changed  # here, because it brings ctypes along

        while True:
            await folder_changed(self._file.parent, self._look_s)
            if signature(self._file) != self._known:
                self._known = await self._settled()
                self._changed()

    async def _settled(self) -> Signature | None:
        """Return the file's signature once it stays the same."""
        while True:
            before = signature(self._file)
            await asyncio.sleep(self._settle_s)
            if signature(self._file) == before:
                return before
