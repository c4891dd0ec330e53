"""The proof that another nri-gpu serves the same runtime, of a kind that no pod can make.

Two of them refuse each other's containers: each takes the other's signed grant for a forged one. So does a pod's
container that writes such an annotation itself, and that alone proves nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from loguru import logger

from nri_gpu.domain.container import Adjusted
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.system.proc import PROC
from nri_gpu.system.process import Process, lives, process_of
from nri_gpu.system.sockets import clients_of, opened_by
from nri_gpu.system.storage import text_of

_ARGUMENTS_MAX = 1 << 12  # bytes


class SecondPlugin:
    """The proof as it was last seen. registered: the name and index by which this plugin registers."""

    def __init__(self, registered: Callable[[], PluginSettings]) -> None:
        self._registered = registered
        self.told = ""  # by the runtime
        self._connected: tuple[Process, ...] = ()  # when this daemon started

    @property
    def name(self) -> str:
        return self._registered().name

    @property
    def proof(self) -> str:
        """Return the proof, as a clause; empty where there is none."""
        return self.told or connected_clause([each.pid for each in self._connected if lives(each)])

    def validated(self, adjusted: Adjusted) -> None:
        """Take which plugins the runtime asked about a container, and whose its grant is (NRI 0.10)."""
        own, named = self._registered(), [each for each in adjusted.asked if _name(each) == self.name]
        owner = adjusted.grant.owner if adjusted.grant else ""
        told = ""
        if len(named) > 1:
            told = f"the runtime asks two plugins of this name, {' and '.join(named)}"
        elif _name(owner) == own.name and owner != f"{own.index}-{own.name}":
            told = f"NRI plugin {owner} granted GPUs to a container"
        if told and not self.told:
            logger.bind(fault=told).error("another nri-gpu serves this runtime")
        self.told = told

    async def look(self, socket: Path) -> None:
        """Look once for another nri-gpu that is connected to the runtime's socket."""
        pids = await asyncio.to_thread(lambda: [*connected_daemons(socket)])
        found = map(process_of, pids)
        self._connected = tuple(each for each in found if each)
        if self._connected:
            named = ",".join(str(each.pid) for each in self._connected)
            bound = logger.bind(socket=str(socket), pids=named, fault=self.proof)
            bound.error("another nri-gpu serves this runtime")


def connected_clause(pids: list[int]) -> str:
    """Return what is said of other daemons that are connected; empty without one."""
    return f"another nri-gpu (pid {', '.join(map(str, pids))}) is connected to its NRI socket" if pids else ""


def connected_daemons(socket: Path, proc: Path = PROC) -> Iterator[int]:
    """Yield the pid of each other `nri-gpu run` that is connected to the runtime's socket, as far as this user sees.

    A child that has just been forked has its parent's words and connections until it begins a program of its own, so
    each connection counts once, and our own never.
    """
    counted: set[int] = set()
    try:
        pids = sorted(int(each.name) for each in proc.iterdir() if each.name.isdecimal())
    except OSError:
        return
    for pid in pids:
        words = (text_of(proc / str(pid) / "cmdline", _ARGUMENTS_MAX, "utf-8") or "").split("\0")
        if pid != os.getpid() and "run" in words and any("nri_gpu" in word.replace("-", "_") for word in words[:3]):
            process = proc / str(pid)
            counted |= set(opened_by(proc / "self"))
            if connections := clients_of(socket, process).intersection(opened_by(process)) - counted:
                counted |= connections
                yield pid


def _name(plugin: str) -> str:
    """Return the name of `10-nri-gpu`."""
    return plugin.partition("-")[2]
