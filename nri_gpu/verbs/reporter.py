"""The part of a running daemon that answers `nri-gpu status`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.codec import encode
from nri_gpu.inventory.cache import InventoryCache
from nri_gpu.log import logger
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.model import Policy
from nri_gpu.runtime.board import Board
from nri_gpu.runtime.control import Answer, ControlSocket
from nri_gpu.runtime.plugin import Plugin
from nri_gpu.runtime.report import Connection, View, status_json, transitions_json
from nri_gpu.verbs.inventory_keeper import InventoryKeeper
from nri_gpu.verbs.kubelet_keeper import KubeletKeeper


class Subjects(Struct, frozen=True):
    """What is reported on.

    list_fault: why the runtime could not list the node's containers to us again; empty when it could. options: of the
    command line, by their key in the policy, and `topology`, the simulated node's file.
    """

    board: Board
    plugin: Plugin
    cache: InventoryCache
    inventory: InventoryKeeper
    kubelet: KubeletKeeper
    list_fault: Callable[[], str] = lambda: ""
    options: Mapping[str, object] = {}


class Reporter:
    """Knows how we stand with the runtime, and tells it together with the rest."""

    def __init__(self, path: Path, subjects: Subjects, wall: Callable[[], float] = time.time) -> None:
        self._path = path
        self._subjects = subjects
        self._wall = wall
        self._connection = Connection(ready=False, since=wall())
        questions: Mapping[str, Answer] = {
            "status": lambda: {**status_json(self.view()), "options": subjects.options},
            "transitions": self._transitions,
            "inventory": self._inventory,
        }
        self._control = ControlSocket(path, questions)
        self._listening = False

    async def run(self) -> None:
        """Serve until cancelled. A socket that cannot be had costs `status` and nothing else."""
        try:
            await self._control.open()
        except OSError as error:
            logger.bind(path=str(self._path), fault=str(error)).warning("no control socket, so no nri-gpu status")
        else:
            self._listening = True
            self.policy_changed()
        try:
            await asyncio.Event().wait()
        finally:
            self._listening = False
            await self._control.close()

    def policy_changed(self) -> None:
        """Who may ask may have changed."""
        if not self._listening:
            return
        try:
            self._control.admit(self._group())
        except OSError as error:
            fault = f"control.group: {error}; in a systemd unit set Group= to it, in a drop-in"
            logger.bind(path=str(self._path), fault=fault).warning("only root can ask for status")

    def configured(self, configured: Configured) -> None:
        """What the runtime said of itself."""
        self._connection = replace(
            self._connection,
            runtime=configured.runtime,
            version=configured.version,
            nri_version=configured.nri_version,
        )

    def ready(self) -> None:
        """Serving a runtime."""
        self._connection = replace(self._connection, ready=True, since=self._wall(), why="")

    def away(self, why: str) -> None:
        """Not serving one any more. why: the sentence."""
        since = self._wall() if self._connection.ready else self._connection.since
        self._connection = replace(self._connection, ready=False, since=since, why=why)

    def view(self) -> View:
        """The moment of asking."""
        plugin, cache = self._subjects.plugin, self._subjects.cache
        policy = plugin.policy
        source, fault = (policy.source, "") if isinstance(policy, Policy) else ("-", policy.fault)
        return View(
            node=self._subjects.board.snapshot(),
            ledger=plugin.ledger,
            connection=self._connection,
            wall=self._wall(),
            monotonic=time.monotonic(),
            inventory_age_s=cache.age_s(),
            inventory_fault=cache.fault,
            policy_source=source,
            policy_fault=fault,
            inventory_confirmed=cache.confirmed or cache.current is None,
            history=self._subjects.inventory.history,
            kubelet=self._subjects.kubelet.report(),
            kubelet_open=self._subjects.kubelet.fail_open(),
            list_fault=self._subjects.list_fault(),
        )

    def _transitions(self) -> Mapping[str, Any]:
        """Short, for whoever asks each second."""
        number = self._subjects.board.snapshot().number
        history = transitions_json(self._subjects.inventory.history)
        return {"schema": "nri-gpu/transitions/v1", "inventory_number": number, **history}

    def _inventory(self) -> Mapping[str, Any]:
        """All that is known, for `gpus --watch` of the same version."""
        return {"schema": "nri-gpu/inventory/v1", "inventory": encode(self._subjects.board.snapshot().inventory)}

    def _group(self) -> int | None:
        policy = self._subjects.plugin.policy
        name = policy.control.group if isinstance(policy, Policy) else ""
        if not name:
            return None
        import grp  # only where there is a group to look up

        try:
            return grp.getgrnam(name).gr_gid
        except KeyError:
            logger.bind(fault=f"control.group: no group {name!r} on this host").warning("only root can ask for status")
            return None
