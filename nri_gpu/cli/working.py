"""Progress messages of slow commands, on standard error, so that standard output is unchanged."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

WAIT_S: Final = 0.5  # what is done by then needs no word


@contextmanager
def working(what: str, share: Callable[[], float] | None = None, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Show `what` as long as the work lasts, on a terminal. share: of the work that is done, 0.0 to 1.0."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()

    def show() -> None:
        if over.wait(wait_s):
            return
        from nri_gpu.cli.terminal import show_work

        show_work(what, over, share)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
