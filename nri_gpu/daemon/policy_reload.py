"""Which policy is in force: the first one, and what SIGHUP, a changed file or the runtime put in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.daemon.policy_file import PolicyFile
from nri_gpu.domain.errors import PolicyError
from nri_gpu.plugin.supervisor import Identity
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import NodeState
from nri_gpu.system.storage import Signature, signature

LOOK_S: Final = 10.0
SETTLE_S: Final = 0.2  # a file that is written in place is whole once it has not changed for so long


def first_policy(file: PolicyFile) -> Policy:
    """The policy to start with: the file's, else the last good one that was kept, else a broken one."""
    try:
        return file.load()
    except PolicyError as error:
        _log_faults(error, "policy not usable")
        last = file.last_good()
        if last is None:
            logger.error("no good policy is kept: every container that asks will be refused")
            return Policy.broken(str(error.faults[0]))
        logger.warning("started on the last good policy")
        return last


class PolicyReload:
    """Puts policies in force. identity: how we register, by the file's policy.

    changed: called with each good policy that took the place of another.
    """

    def __init__(self, file: PolicyFile, state: NodeState, changed: Callable[[Policy], None]) -> None:
        self.identity = _identity(state.settings)
        self._file = file
        self._state = state
        self._changed = changed
        self._one_at_a_time = asyncio.Lock()

    async def read_again(self) -> None:
        """Read the file again. A policy with faults is logged, and the one in force stays."""
        try:
            async with self._one_at_a_time:
                # In a thread: thousands of rules take as long to read as the runtime waits for an answer.
                policy = await asyncio.to_thread(self._file.load)
        except PolicyError as error:
            _log_faults(error, "policy not reloaded, the old one stays")
            return
        self.identity = _identity(policy)
        self._state.use(policy)
        logger.bind(path=policy.source).info("policy reloaded")
        self._changed(policy)

    def take_text(self, text: str) -> None:
        """Use the drop-in file's text from Configure: for a plugin that the runtime starts, that is the policy."""
        try:
            policy = self._file.load_text("the runtime's NRI configuration for this plugin", text)
        except PolicyError as error:
            self._state.use(Policy.broken(str(error.faults[0])))
            _log_faults(error, "policy not usable")
        else:
            self._state.use(policy)
            self._changed(policy)


class PolicyWatch:
    """Calls `changed` once for each content of the file that it finds."""

    def __init__(
        self, file: Path, changed: Callable[[], None], *, look_s: float = LOOK_S, settle_s: float = SETTLE_S
    ) -> None:
        self._file = file
        self._changed = changed
        self._look_s = look_s
        self._settle_s = settle_s
        self._known = signature(file)

    async def run(self) -> None:
        """Until cancelled."""
        from nri_gpu.system.inotify import folder_changed  # here, because it brings ctypes along

        while True:
            await folder_changed(self._file.parent, self._look_s)
            if signature(self._file) != self._known:
                self._known = await self._settled()
                self._changed()

    async def _settled(self) -> Signature | None:
        """The file's signature once it stays the same."""
        while True:
            before = signature(self._file)
            await asyncio.sleep(self._settle_s)
            if signature(self._file) == before:
                return before


def _identity(policy: Policy) -> Identity:
    return Identity(policy.plugin.name, policy.plugin.index)


def _log_faults(error: PolicyError, phrase: str) -> None:
    for fault in error.faults:
        logger.bind(fault=str(fault)).error(phrase)
