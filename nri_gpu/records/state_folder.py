"""The state folder: its lock, which one daemon holds at a time, and the key that grants are signed with."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.domain.errors import NriGpuError, cause_of
from nri_gpu.system.storage import (
    KeyLengthError,
    NotPrivateError,
    lock_holder,
    make_key,
    open_lock,
    read_key,
    signature,
    text_of,
    try_lock,
)
from nri_gpu.system.tasks import due

WATCH_S: Final = 5.0  # between two looks at the folder


class StateError(NriGpuError):
    """An unusable state folder. The sentence names it and says why. taken: another daemon has it."""

    def __init__(self, sentence: str, *, taken: bool = False) -> None:
        super().__init__(sentence)
        self.taken = taken


class StateFolder:
    """A folder of mode 0700, `/run/nri-gpu` by default. /run is empty after a boot, so the key is made once per boot.

    key_fault: why a key that was there was replaced, or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key_fault = ""
        self._lock: int | None = None

    def open(self) -> None:
        """Make and lock the folder. Raises: StateError, if that fails, or another daemon holds it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            lock = open_lock(self.path / "lock")
        except OSError as error:
            cure = "run as root" if isinstance(error, PermissionError) else "correct that"
            raise StateError(
                f"state folder {self.path} cannot be used: {cause_of(error)}; {cure}, or give another --state-dir"
            ) from error
        if not try_lock(lock):
            holder = lock_holder(lock) or self._holder()
            os.close(lock)
            raise StateError(
                f"another nri-gpu{holder} runs with state folder {self.path}; two of them would refuse each other's "
                "containers: stop that one, or give --state-dir and the --socket of another runtime",
                taken=True,
            )
        self._lock = lock
        # For the message above.
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())

    @property
    def lost(self) -> bool:
        """Return whether the open folder was removed or replaced since, with the lock in it.

        What this daemon writes then is read by nobody: not by the guard, by `status`, nor by the next daemon.
        """
        if self._lock is None:
            return False
        opened, found = os.fstat(self._lock), signature(self.path / "lock", follow=False)
        return found is None or found[:2] != (opened.st_dev, opened.st_ino)

    def watch(self, every_s: float = WATCH_S) -> None:
        """Log, once the folder is lost, from the running event loop. Its key went with it, so it is not made again."""
        if self.lost:
            logger.bind(path=str(self.path)).error("state folder removed or replaced while nri-gpu runs")
        else:
            asyncio.get_running_loop().call_at(due(every_s), self.watch, every_s)

    def close(self) -> None:
        """Release the folder for another daemon."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def key(self) -> bytes:
        """Return the key, made if there is no usable one. Raises: StateError."""
        file = self.path / "key"
        try:
            return read_key(file)
        except FileNotFoundError:
            pass
        except (NotPrivateError, KeyLengthError) as error:
            self.key_fault = cause_of(error)
        except OSError as error:
            self.key_fault = f"it cannot be opened: {cause_of(error)}"
        try:
            return make_key(file)
        except OSError as error:
            raise StateError(f"key {file} cannot be read or made: {cause_of(error)}") from error

    def _holder(self) -> str:
        pid = (text_of(self.path / "lock") or "").strip()
        return f" (pid {pid})" if pid else ""
