"""A command on a terminal of our own: a pty of a chosen size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

PATIENCE_S = 30.0
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Screen(Struct, frozen=True):
    """What a command wrote to its terminal, and its exit code."""

    code: int
    raw: str

    @property
    def lines(self) -> list[str]:
        """Without colour, and without the blanks that fill a line."""
        return [line.rstrip() for line in STYLE.sub("", self.raw).splitlines()]

    @property
    def colours(self) -> set[str]:
        return set(STYLE.findall(self.raw))


def on_terminal(
    *arguments: object,
    columns: int = 80,
    environment: Mapping[str, str] | None = None,
    program: Sequence[object] = (sys.executable, "-m", "nri_gpu"),
) -> Screen:
    """A program with these arguments on a terminal. environment: all of it, but for the search path."""
    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen(
            list(map(str, (*program, *arguments))),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", **(environment or {})},
            cwd=Path(__file__).parents[2],
        )
    finally:
        os.close(follower)
    with os.fdopen(leader, "rb", buffering=0) as reader, process:
        said = b""
        try:
            while part := reader.read(1 << 16):
                said += part
        except OSError:  # EIO: the command has closed its terminal
            pass
        return Screen(process.wait(PATIENCE_S), said.decode())
