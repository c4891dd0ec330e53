"""A runc that waits, so that a test can act in the middle of a container's start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import packages
from tests.support.waiting import wait_for


class Gate:
    """A runc that waits before it starts a container for as long as the gate is shut."""

    def __init__(self, base: Path) -> None:
        self.runc, self._shut, self._reached = base / "runc", base / "shut", base / "reached"
        waits = f"touch {self._reached}; while [ -e {self._shut} ]; do sleep 0.01; done"
        self.runc.write_text(
            f'#!/bin/sh\ncase " $* " in *" start "*) [ -e {self._shut} ] && {{ {waits}; }};; esac\n'
            f'exec {packages.runc()} "$@"\n'
        )
        self.runc.chmod(0o755)

    @contextmanager
    def shut(self) -> Iterator[None]:
        self._shut.touch()
        try:
            yield
        finally:
            self._shut.unlink()

    def wait_reached(self) -> None:
        wait_for("runc to start the container", self._reached.exists, 20)
