"""The tokens' key, beside the kubelet's checkpoint: it lives exactly as long as the answers that it signed.

The kubelet removes sockets from that folder at its start and leaves files alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nri_gpu.allocation.token import KEY_BYTES
from nri_gpu.files import NotPrivateError, read_private
from nri_gpu.log import logger

KEY_FILE: Final = "nri-gpu.key"


class KeyKeeper:
    """Looks for the key whenever the folder may have come or been made anew. keyed: told each that is another one."""

    def __init__(self, folder: Path, keyed: Callable[[bytes], None]) -> None:
        self._folder = folder
        self._keyed = keyed
        self._key: bytes | None = None
        self._said = ""

    def look(self) -> None:
        """Now. That there is no folder is no fault yet: the kubelet makes it, and the endpoints say so."""
        try:
            key = tokens_key(self._folder, self._key)
        except FileNotFoundError:
            return
        except OSError as error:
            fault = f"key in {self._folder}: {error.strerror}; it is needed to sign what the kubelet is answered"
            if fault != self._said:
                logger.bind(fault=fault).warning("no device plugin yet")
            self._said = fault
            return
        if key != self._key:
            self._key, self._said = key, ""
            self._keyed(key)


def tokens_key(folder: Path, known: bytes | None = None) -> bytes:
    """The key, made when there is none. known: the one in use, kept where the folder was made anew. Raises: OSError."""
    file = folder / KEY_FILE
    try:
        if len(key := read_private(file, KEY_BYTES + 1)) == KEY_BYTES:
            return key
    except FileNotFoundError:
        pass
    except NotPrivateError:  # what others could read or write, they may have, and forge grants with it
        known = None
    fresh = file.with_name(f".{KEY_FILE}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
        stream.write(known or secrets.token_bytes(KEY_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(file)
    return file.read_bytes()
