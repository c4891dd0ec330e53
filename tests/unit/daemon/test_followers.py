"""Whoever is told of a change ends nothing by what it raises: no request, no look at the node, not the daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.daemon.app import Daemon
from nri_gpu.nri.subscription import Event
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import PolicyFile
from nri_gpu.records.state_folder import StateFolder
from tests.support import nri_messages as nri
from tests.support import plugin
from tests.support.daemon import FOUR_GPUS
from tests.support.log import Log

OPTIONS: dict[str, str | bool] = {
    "kubelet.enabled": True,
    "kubelet.podresources": "",
    "dra.driver": "gpu.example.com",
    "mps.enabled": True,
}


def failing(follower: Callable[..., object]) -> Callable[..., None]:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    fails.__qualname__ = follower.__qualname__
    return fails


def with_bugs(daemon: Daemon) -> set[str]:
    """Let everybody whom this daemon tells of something fail. Returns their names."""
    told: set[str] = set()
    state, node, audit = daemon._state, daemon._node, daemon._audit
    for name in ("_first", "_then"):
        followers = getattr(state, name)
        told |= {each.__qualname__ for each, _ in followers}
        setattr(state, name, [(failing(each), of) for each, of in followers])
    for owner in (node.inventory, node.cache):
        told |= {each.__qualname__ for each in owner._followers}
        owner._followers = [failing(each) for each in owner._followers]
    assert audit
    for name in ("decided", "synchronized"):
        told.add(getattr(audit, name).__qualname__)
        setattr(audit, name, failing(getattr(audit, name)))
    journal = daemon._plugin._needs.recorder._journal  # type: ignore[attr-defined] # the real one
    for name in ("granted", "settled", "remembered"):
        setattr(journal, name, failing(getattr(journal, name)))
    return told


async def test_nobody_who_is_told_of_a_change_ends_anything(folder: Path, log: Log) -> None:
    state_folder = StateFolder(folder)
    state_folder.open()
    with contextlib.closing(state_folder):
        key = state_folder.key()
        daemon = Daemon(state_folder, key, PolicyFile(None, OPTIONS, state_folder.path), FOUR_GPUS)
        told, state = with_bugs(daemon), daemon._state
        await daemon._node.cache.refresh()
        state.put_driver(plugin.node().driver)
        of = nri.asking("1")
        daemon._plugin.synchronized(())
        reply = daemon._plugin.create_container(nri.create(of, nri.container(of)))
        assert isinstance(reply, bytes)
        assert pb.CreateContainerResponse.FromString(reply).adjust.linux.devices
        assert len(state.ledger.entries) == 1
        started = nri.event(Event.START_CONTAINER, of, nri.container(of), own_rpc=True)[1]
        assert daemon._plugin.lifecycle(started, Event.START_CONTAINER) == b""
        state.use(Policy.default())
        await asyncio.sleep(0)
    logged = {line.fields["follower"] for line in log.said("bug: a follower of changes failed; the rest goes on")}
    assert logged == told
    assert log.said("bug in the journal; signed grants on containers stay valid")
