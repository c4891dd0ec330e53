"""A command in a real terminal: a tmux of our own, whose screen can be read and resized, and into which keys go."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import packages
from tests.support.waiting import wait_for

PATIENCE_S = 30.0


class Terminal:
    """with Terminal(folder, [program, ...], columns=80, rows=24) as terminal: ... The server ends with it."""

    def __init__(self, folder: Path, command: list[str], *, columns: int, rows: int) -> None:
        """folder: for tmux's socket; it must be short. The shell's exit code is shown when the command has ended."""
        self._tmux = [*packages.command("tmux"), "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._command = f"trap : INT; {shlex.join(command)}; echo ended with $?; read forever"
        self._size = ["-x", str(columns), "-y", str(rows)]

    def __enter__(self) -> Self:
        self._ask("new-session", "-d", *self._size, self._command)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ask("kill-server")

    def screen(self, *, styled: bool = False) -> str:
        return self._ask("capture-pane", "-p", *(["-e"] if styled else []))

    def wait_for(self, *words: str) -> str:
        """The screen, once it shows each of these."""
        screen = ""

        def shown() -> bool:
            nonlocal screen
            screen = self.screen()
            return all(word in screen for word in words)

        wait_for(f"the screen to show {words}", shown, PATIENCE_S, lambda: screen)
        return screen

    def resize(self, columns: int, rows: int) -> None:
        self._ask("resize-window", "-x", str(columns), "-y", str(rows))

    def press(self, key: str) -> None:
        """A key by tmux's name for it, such as C-c."""
        self._ask("send-keys", key)

    def write(self, text: str) -> None:
        """Type it; a tabulator asks for completions."""
        self._ask("send-keys", "-l", "--", text)

    def _ask(self, *words: str) -> str:
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "SHELL": "/bin/sh"}
        done = subprocess.run(
            [*self._tmux, *words], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return done.stdout
