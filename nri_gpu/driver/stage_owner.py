"""Ownership of a folder of staged drivers: only one daemon knows whose grants still have a generation mounted.

The owner locks `.owner` there for as long as it lives, and writes its state folder and the boot into it. The name
outlives the lock: while the owner restarts, its containers still use the files, and no other daemon may prune them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from nri_gpu.domain.errors import DriverError, cause_of
from nri_gpu.domain.finding import Finding, in_policy
from nri_gpu.driver.stage import private_folder
from nri_gpu.system.storage import boot_id, lock_holder, open_lock, text_of, try_lock

OWNER_FILE: Final = ".owner"


class StageTakenError(DriverError):
    """The refusal of a folder that another daemon owns."""


class NotReleasedError(StageTakenError):
    """The refusal of a folder whose owner, the previous daemon with the same state folder, has not ended yet."""


class StageOwner:
    """The ownership of a folder by one daemon. base: where it stages.

    state_dir: shared by a daemon and its successors.
    """

    def __init__(self, base: Path, state_dir: Path) -> None:
        self.base = base
        self._state_dir = str(state_dir.resolve())
        self._lock: int | None = None

    @property
    def held(self) -> bool:
        return self._lock is not None

    def take(self) -> None:
        """Own the folder until `close`. Raises: StageTakenError; DriverError, if the folder cannot be used."""
        try:
            self._take(private_folder(self.base) / OWNER_FILE)
        except OSError as error:
            raise DriverError(f"stage folder {self.base} cannot be used: {cause_of(error)} ({OWNER_FILE})") from error

    def close(self) -> None:
        """Let the next daemon own it: no thread of ours works there any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self, file: Path) -> None:
        lock = open_lock(file)
        if self._lock is not None and os.path.samestat(os.fstat(self._lock), os.fstat(lock)):
            os.close(lock)
        else:
            self.close()  # the folder was removed meanwhile
            alone, named = try_lock(lock), owner_of(self.base)
            if not alone or named not in ("", self._state_dir):
                refusal = self._refusal(named, lock_holder(lock), alive=not alone)
                os.close(lock)
                raise refusal
            self._lock = lock
        if not owner_of(self.base):
            with suppress(OSError):  # the disk may be full, and everything staged before: then when it is taken again
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, f"{boot_id()}\n{self._state_dir}\n".encode(), 0)

    def _refusal(self, named: str, holder: str, *, alive: bool) -> StageTakenError:
        if named == self._state_dir:
            return NotReleasedError(
                f"the previous nri-gpu{holder} still uses stage folder {self.base}; try again in a moment"
            )
        whose = f"stage folder {self.base} belongs to another nri-gpu{holder}, with state folder {named or '(unknown)'}"
        remedy = "set another driver.stage_dir for this one"
        if alive:
            return StageTakenError(f"{whose}, and they would remove each other's files: {remedy}")
        gone = f"if that nri-gpu and its containers are gone permanently, remove {self.base / OWNER_FILE}"
        return StageTakenError(f"{whose}, whose containers may have its files mounted: {remedy}; {gone}")


def stage_advice(stage_dir: str, state_dir: Path) -> Iterator[Finding]:
    """Yield why a daemon with that state folder could not use a folder of staged drivers."""
    owner = owner_of(Path(stage_dir))
    if owner not in ("", str(state_dir.resolve())):
        yield in_policy(
            f"driver.stage_dir {stage_dir} belongs to the nri-gpu with state folder {owner}, so one with state folder "
            f"{state_dir} refuses every container that asks: give it a stage folder of its own",
            "driver.stage_dir",
        )


def owner_of(base: Path) -> str:
    """Return the state folder of the daemon that owned the folder since boot, or empty if none can be read."""
    boot, _, rest = (text_of(base / OWNER_FILE, encoding="utf-8") or "").partition("\n")
    return rest.strip() if boot == boot_id() else ""
