"""The tasks that a long-running verb is made of: none of them may end by itself unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from nri_gpu.domain.errors import RestartNeededError
from nri_gpu.log import logger
from nri_gpu.verbs.exits import Exit


def exit_code(parts: Iterable[asyncio.Task[None]]) -> Exit:
    """How the verb ends, with a line for each part that died of a bug. Asked before the others are cancelled.

    One that needs the process started again ends it on purpose, and is no bug.
    """
    died = [part for part in parts if part.done() and part.exception()]
    if needed := [part.exception() for part in died if isinstance(part.exception(), RestartNeededError)]:
        logger.bind(fault=str(needed[0])).error("ending, to be started again")
        return Exit.UNAVAILABLE
    for part in died:
        logger.opt(exception=part.exception()).critical("bug: a part of nri-gpu died, so all of it ends")
    return Exit.BUG if died else Exit.OK
