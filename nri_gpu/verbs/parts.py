"""The tasks that a long-running verb is made of: none of them may end by itself unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from loguru import logger

from nri_gpu.verbs.exits import Exit


def exit_code(parts: Iterable[asyncio.Task[None]]) -> Exit:
    """How the verb ends, with a line for each part that died of a bug. Asked before the others are cancelled."""
    died = [part for part in parts if part.done() and part.exception()]
    for part in died:
        logger.opt(exception=part.exception()).critical("bug: a part of nri-gpu died, so all of it ends")
    return Exit.BUG if died else Exit.OK
