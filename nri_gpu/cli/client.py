"""Questions to the running daemon over its control socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nri_gpu.domain.names import CONTROL_SOCKET

TIMEOUT_S: Final = 5.0
READ_BYTES: Final = 1 << 16


def ask(path: Path, question: str) -> Mapping[str, Any]:
    """The daemon's answer to one question. Raises: OSError; ValueError: it is no answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(f"{question}\n".encode())
        answer = json.loads(b"".join(iter(lambda: connection.recv(READ_BYTES), b"")))
    if not isinstance(answer, dict) or "error" in answer:
        raise ValueError(answer.get("error") if isinstance(answer, dict) else "not a JSON object")
    return answer


def daemon_status(state_dir: Path) -> Mapping[str, Any]:
    """The `status` of the running daemon; empty where none runs, or we may not ask it."""
    try:
        return ask(state_dir / CONTROL_SOCKET, "status")
    except (OSError, ValueError):
        return {}
