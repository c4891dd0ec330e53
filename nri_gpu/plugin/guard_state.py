"""The daemon's state folder as the guard reads it: the key, the policy in force, and whose GPUs went to another."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.errors import PolicyError, cause_of
from nri_gpu.plugin.registration_pause import FILE as AWAY_FILE
from nri_gpu.policy.model import Policy
from nri_gpu.records.journal import JOURNAL, RevokedReader
from nri_gpu.records.policy_file import DEFAULT_PATH, LAST_GOOD, OPTIONS, kept_options, load_last_good, load_policy
from nri_gpu.system.storage import KeyLengthError, NotPrivateError, Signature, read_key, signature
from nri_gpu.system.tasks import LogOnce, set_within

_AS_ROOT: Final = "Run the guard as root, with the daemon's --state-dir."
_ANEW: Final = (
    "Remove what is in the place of the key, and restart the daemon, which makes a new one; delete the pods whose "
    "grants are not valid then."
)
LOOK_S: Final = 5.0  # between two looks at the policy's files, where no watch tells of a change


class DaemonState:
    """The daemon's state folder, read only. A request takes the policy as it was parsed last, and parses nothing.

    path: of the policy that holds as long as the daemon kept none; None for the default file.
    """

    def __init__(self, folder: Path, path: Path | None) -> None:
        """Parse the policy. One that cannot be used is logged: then every container that asks needs a grant."""
        self._folder = folder
        self._path = path
        self._policy_files = (folder / LAST_GOOD, folder / OPTIONS, path or DEFAULT_PATH)
        self._journal = RevokedReader(folder / JOURNAL)
        self._faults = LogOnce()
        self.policy_fault = ""  # of the files as they are; the policy from before is in force then
        self._signatures = self._signed()
        self._policy = Policy.default()
        try:
            self._policy = self._read()
        except Exception as error:
            self._policy = Policy.broken(_fault(error))
            self._complain(error)

    def key(self) -> bytes | None:
        """Return the key; None where there is none, or where somebody else could have written it."""
        file = self._folder / "key"
        try:
            key = read_key(file)
        except (FileNotFoundError, KeyLengthError):
            return None
        except OSError as error:
            denied = isinstance(error, PermissionError) and not isinstance(error, NotPrivateError)
            fix = _AS_ROOT if denied else _ANEW
            self._faults.warning("key not read: no signed grant is valid", cause_of(error), fix=fix, path=str(file))
            return None
        self._faults.clear()
        return key

    def away_opens_nothing(self) -> bool:
        """Return whether the daemon found that no container can start here without what it was granted."""
        return (self._folder / AWAY_FILE).exists()

    def policy(self) -> Policy:
        """Return the policy that was parsed last."""
        return self._policy

    def revoked(self) -> Collection[ContainerId]:
        """Return the containers whose GPUs were granted to another before they started. Raises: OSError."""
        return self._journal.revoked()

    async def follow(self) -> None:
        """Parse the policy anew, in a thread, each time that its files change, until cancelled.

        A policy that cannot be used leaves the one from before in force.
        """
        from nri_gpu.system.folder_watch import ENTRIES, IN_CLOSE_WRITE, FolderWatch, nearest  # here: it has ctypes

        changed = asyncio.Event()
        watch = FolderWatch(changed.set, ENTRIES | IN_CLOSE_WRITE)
        with suppress(OSError):  # a node has few inotify instances: then every LOOK_S
            watch.open(())
        try:
            while True:
                # Before the look, so that no change falls between; again, because a folder may be made or replaced.
                watch.add(nearest(file.parent) for file in self._policy_files)
                if (found := self._signed()) == self._signatures:
                    await set_within(changed, LOOK_S)
                    changed.clear()
                else:
                    self._signatures = found
                    await self._read_again()
        finally:
            watch.close()

    async def _read_again(self) -> None:
        try:
            # In a thread: thousands of rules take as long to read as the runtime waits for an answer.
            self._policy = await asyncio.to_thread(self._read)
        except Exception as error:  # whatever it is: a guard that ended would refuse nobody
            self._complain(error)
        else:
            self.policy_fault = ""
            logger.bind(path=self._policy.source).info("policy reloaded")

    def _read(self) -> Policy:
        """Return the policy that the daemon used last, so that both ignore the same requests.

        Raises: PolicyError, OSError.
        """
        options = kept_options(self._folder)
        return load_last_good(self._folder, options) or load_policy(self._path, options, all_options=False)

    def _signed(self) -> tuple[Signature | None, ...]:
        return tuple(map(signature, self._policy_files))

    def _complain(self, error: Exception) -> None:
        """Log why the files cannot be used, once until that changes."""
        before, self.policy_fault = self.policy_fault, _fault(error)
        if self.policy_fault == before:
            return
        bound = logger.bind(fault=self.policy_fault)
        if self._policy.fault:
            bound.error("policy not usable: every container that requests GPUs needs a valid grant")
        else:
            bound.error("policy not reloaded, the old one stays")


def _fault(error: Exception) -> str:
    return str(error.faults[0]) if isinstance(error, PolicyError) else repr(error)
