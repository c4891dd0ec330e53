"""Who has a folder of staged drivers: one daemon, which alone knows by whose grants a generation is still mounted.

`.owner` there is locked for as long as that daemon lives, and names its state folder and the boot. The name outlives
the lock: in between two lives of the owner, when its containers go on with the files, nobody else may come and prune.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.stage import private_folder
from nri_gpu.system.storage import boot_id, lock_holder, open_lock, text_of, try_lock

OWNER_FILE: Final = ".owner"


class StageTakenError(DriverError):
    """Another daemon has the folder."""


class NotReleasedError(StageTakenError):
    """The daemon before this one, with the same state folder, still lives; it ends in a moment."""


class StageOwner:
    """One daemon's claim to a folder. base: where it stages. state_dir: whose life with its predecessors is one."""

    def __init__(self, base: Path, state_dir: Path) -> None:
        self.base = base
        self._state_dir = str(state_dir.resolve())
        self._lock: int | None = None

    @property
    def held(self) -> bool:
        """Whether the folder was ours when it was taken last."""
        return self._lock is not None

    def take(self) -> None:
        """Have it, or find it had, until `close`. Raises: StageTakenError; DriverError: it cannot be used."""
        try:
            self._take(private_folder(self.base) / OWNER_FILE)
        except OSError as error:
            raise DriverError(f"stage folder {self.base} cannot be used: {error.strerror} ({OWNER_FILE})") from error

    def close(self) -> None:
        """Let the next daemon have it: no thread of ours works there any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self, file: Path) -> None:
        lock = open_lock(file)
        if self._lock is not None and os.path.samestat(os.fstat(self._lock), os.fstat(lock)):
            os.close(lock)
            return
        self.close()  # the folder was removed under us
        alone, named = try_lock(lock), owner_of(self.base)
        if not alone or named not in ("", self._state_dir):
            refusal = self._refusal(named, lock_holder(lock), alive=not alone)
            os.close(lock)
            raise refusal
        self._lock = lock
        if not named:
            with suppress(OSError):  # a full disk may hold all that is needed, staged before
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{boot_id()}\n{self._state_dir}\n".encode(), 0)

    def _refusal(self, named: str, holder: str, *, alive: bool) -> StageTakenError:
        if named == self._state_dir:
            return NotReleasedError(
                f"the nri-gpu before this one{holder} still has stage folder {self.base}; try again in a moment"
            )
        whose = f"stage folder {self.base} is that of another nri-gpu{holder}, with state folder {named or '(unknown)'}"
        remedy = "give this one a driver.stage_dir of its own"
        if alive:
            return StageTakenError(
                f"{whose}, and two would remove each other's files from running containers: {remedy}"
            )
        gone = f"where that one is gone for good, and its containers too, remove {self.base / OWNER_FILE}"
        return StageTakenError(f"{whose}, whose containers may have its files mounted: {remedy}, or, {gone}")


def owner_of(base: Path) -> str:
    """The state folder of the daemon that staged there since the node booted; empty: none, or it cannot be read."""
    boot, _, rest = (text_of(base / OWNER_FILE, encoding="utf-8") or "").partition("\n")
    return rest.strip() if boot == boot_id() else ""
