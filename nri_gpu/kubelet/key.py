"""The tokens' key, beside the kubelet's checkpoint: it lives exactly as long as the answers that it signed.

The kubelet removes sockets from that folder at its start and leaves files alone.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from nri_gpu.allocation.token import KEY_BYTES

KEY_FILE: Final = "nri-gpu.key"


def tokens_key(folder: Path, known: bytes | None = None) -> bytes:
    """The key, made when there is none. known: the one in use, kept where the folder was made anew. Raises: OSError."""
    file = folder / KEY_FILE
    if (key := _read(file)) is not None:
        return key
    fresh = file.with_name(f".{KEY_FILE}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
        stream.write(known or secrets.token_bytes(KEY_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(file)
    return file.read_bytes()


def _read(file: Path) -> bytes | None:
    """A whole one that is root's own, or ours; whoever else could have written it could forge grants."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
            return None  # and anew: what others could read, they may have read
        key = stream.read(KEY_BYTES + 1)
    return key if len(key) == KEY_BYTES else None
