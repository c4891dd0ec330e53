"""The fault table's rows of health: whatever a GPU or its event process does, containers for the others are created.

As in `test_fault_table.py`, whose machine this is, somebody creates containers for GPU 0 all the while.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.health import EventType, HealthState
from nri_gpu.health import listener
from nri_gpu.health.controller import HealthController
from nri_gpu.health.listener import EventChild, EventSink
from nri_gpu.health.node_health import Moment
from nri_gpu.inventory.child import child_command
from nri_gpu.inventory.source import Source
from nri_gpu.policy.health import Events
from nri_gpu.policy.model import Policy
from tests.support.driver_root import make_driver_root
from tests.support.log import Log
from tests.support.nvml import Act, FakeGpu, FakeMig, build_fake_nvml, happen
from tests.unit.daemon.rig import Rig, gpus

INIT, WAIT, HANDLE = "nvmlInitWithFlags", "nvmlEventSetWait_v2", "nvmlDeviceGetHandleByIndex_v2"
TWO = gpus(2)
PART = FakeMig(place=0, gi=1, uuid="MIG-a0000000-0000-4000-8000-000000000000")
CUT = [TWO[0], replace(TWO[1], mig=(1, 1), parts=(PART,))]


SILENCE_S = 4.0  # a hang is noticed soon; a wait takes one second


class HealthRig(Rig):
    """A machine whose GPUs are listened to, all of them. ahead_s: how far its clock is ahead of ours."""

    def __init__(self, base: Path, machine: Sequence[FakeGpu] | None) -> None:
        default = Policy.default()
        self.policy = replace(default, health=replace(default.health, events=Events.ALL))
        self.ahead_s = 0.0
        super().__init__(base, machine)

    def health_of(self, gpu: int = 1) -> HealthState:
        """As the last snapshot has it."""
        return self.node_state.node.gpus[gpu].health.state

    def _listener(self, sink: EventSink) -> EventChild:
        self.listener = EventChild(self.root, (), sink, sysfs=str(self.base / "sys"), silence_s=SILENCE_S)
        return self.listener

    def _moment(self) -> Moment:
        return Moment(time.monotonic() + self.ahead_s, time.time() + self.ahead_s)

    def _judged(self, source: Source) -> Source:
        self.node_state.use(self.policy)
        self.node_state.synchronized = True
        self.health = HealthController(
            self.policy.driver,
            self.base / "health.json",
            self.node_state,
            publish=self._published,
            refresh=lambda: self.cache.poke(),
            simulated=False,
            moment=self._moment,
            listener=self._listener,
        )
        return self.health.watching(source)

    def _ledger_changed(self) -> None:
        self.health.changed()

    def _more(self) -> Sequence[Coroutine[None, None, None]]:
        return (self.health.run(),)


@pytest.fixture
def rig(tmp_path: Path, log: Log) -> HealthRig:
    del log  # thousands of decisions
    return HealthRig(tmp_path, TWO)


async def becomes(rig: HealthRig, what: str, fact: Callable[[], object]) -> None:
    """It becomes so, and creates for GPU 0 go on after it."""
    await rig.until(what, fact)
    before = rig.created
    await rig.until("creates to go on", lambda: rig.created > before)


async def listening(rig: HealthRig, log: Log, than: int = 0, gpus: int = 2) -> None:
    """Somebody listens to so many GPUs, for more times than those."""
    await becomes(rig, "somebody to listen", lambda: listens(log, gpus) > than)


def listens(log: Log, gpus: int = 2) -> int:
    """How often somebody began to."""
    return sum(line.fields["gpus"] == gpus for line in log.said("listening for errors of gpus"))


async def receives_events(rig: HealthRig) -> None:
    """GPU 1 turns bad by an event, and comes back when it was quiet for long enough."""
    happen(rig.root, 1, EventType.XID, 79)
    await becomes(rig, "an event", lambda: "XID 79" in rig.ask("device=1"))
    rig.ahead_s += rig.policy.health.hold_down_s + 1
    await becomes(rig, "it to recover", lambda: recovered(rig))


def recovered(rig: HealthRig) -> bool:
    rig.cache.poke()
    return rig.health_of() is HealthState.HEALTHY


@pytest.mark.parametrize(
    ("xid", "state"),
    [(31, HealthState.HEALTHY), (94, HealthState.SUSPECT), (79, HealthState.BAD)],
    ids=["ignored", "other", "fatal"],
)
async def test_an_xid_of_each_class(rig: HealthRig, log: Log, xid: int, state: HealthState) -> None:
    async with rig.running():
        await listening(rig, log)
        happen(rig.root, 1, EventType.XID, xid)
        await becomes(rig, "its event", lambda: any(line.fields["xid"] == xid for line in log.said("gpu event")))
        assert rig.health_of() is state
        assert bool(rig.ask("device=1")) == (state is HealthState.BAD)
        assert rig.health_of(0) is HealthState.HEALTHY
    assert rig.refused == []


async def test_an_xid_of_one_mig_device(tmp_path: Path, log: Log) -> None:
    rig = HealthRig(tmp_path, CUT)
    rig.capabilities(("gi1", 147), ("gi1/ci0", 148))
    async with rig.running():
        await listening(rig, log)
        assert rig.ask(f"device={PART.uuid}") == ""
        for time in (1, 2):
            rig.ahead_s += rig.policy.health.reprobe_s + 1
            happen(rig.root, 1, EventType.XID, 94, part=(1, 0))
            await becomes(rig, "its event", partial(times, log, time))
        assert "XID 94" in rig.ask(f"device={PART.uuid}")
        assert rig.health_of() is HealthState.HEALTHY
    assert rig.refused == []


def times(log: Log, time: int) -> bool:
    """Whether so many events arrived."""
    return len(log.said("gpu event")) == time


@pytest.mark.parametrize("deed", ["hang", "crash"])
async def test_waiting_that_hangs_or_crashes(rig: HealthRig, log: Log, deed: str) -> None:
    rig.play(TWO, Act(WAIT, "hang" if deed == "hang" else "crash"))
    async with rig.running():
        await becomes(rig, "it to be said", lambda: log.said("not listening for errors of the GPUs; trying again"))
        assert WAIT in log.one("not listening for errors of the GPUs; trying again").fields["fault"]
        rig.play(TWO)
        await becomes(rig, "it to listen again", lambda: log.said("listening for errors of gpus again"))
        await receives_events(rig)
    assert rig.refused == []
    assert rig.answered_while_asking() >= 1


@pytest.mark.parametrize(
    "garbage",
    [
        '{"type": "event"}',
        '{"type": "watching", "gpus": [], "failed": []}',
        "[" * 60_000,
        '{"type": "call", "call": "\\u001b[31m"}',
        "\0",
    ],
)
async def test_garbage_from_the_event_process(
    rig: HealthRig, log: Log, monkeypatch: pytest.MonkeyPatch, garbage: str
) -> None:
    program = rig.base / "program"
    runs(program, f"#!{sys.executable} -I\nimport time\nprint({garbage!r}, flush=True)\ntime.sleep(60)\n")
    with monkeypatch.context() as patched:
        patched.setattr(listener, "child_command", lambda *told: (str(program), *child_command(*told)[1:]))
        rig = HealthRig(rig.base, None)
        async with rig.running():
            await becomes(rig, "three of them", lambda: rig.listener.attempts >= 3)
            runs(program, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            await listening(rig, log)
            await receives_events(rig)
    first, *_ = log.said("not listening for errors of the GPUs; trying again")
    assert "sent a malformed line after start" in first.fields["fault"]
    assert rig.refused == []


def runs(program: Path, text: str) -> None:
    """The event process is this from now on."""
    fresh = program.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o755)
    fresh.rename(program)


async def test_an_event_process_that_is_killed(rig: HealthRig, log: Log) -> None:
    async with rig.running():
        await listening(rig, log)
        before = listens(log)
        end(rig)
        await listening(rig, log, before)
        await receives_events(rig)
    assert rig.refused == []


def end(rig: HealthRig) -> None:
    assert rig.listener.pid
    os.kill(rig.listener.pid, signal.SIGKILL)


async def test_a_driver_that_is_unloaded_and_loaded_while_somebody_listens(rig: HealthRig, log: Log) -> None:
    """By force: while somebody listens to all GPUs, a module does not unload by itself."""
    async with rig.running():
        await listening(rig, log)
        rig.play(TWO, Act(INIT, "fail", 9))
        rig.unload()
        before = listens(log)
        end(rig)
        await rig.until("the end of grants", lambda: "kernel module was unloaded" in rig.ask("device=1"))
        rig.play(TWO)
        rig.load()
        await becomes(rig, "grants again", lambda: rig.ask("device=1") == "" and rig.cache.fault == "")
        await listening(rig, log, before)
        await receives_events(rig)
        assert rig.health_of(0) is HealthState.HEALTHY
    assert all("modprobe nvidia" in refusal for refusal in set(rig.refused)), set(rig.refused)


async def test_a_driver_upgrade_while_somebody_listens(rig: HealthRig, log: Log) -> None:
    new = "590.10"
    async with rig.running():
        await listening(rig, log)
        fresh = rig.base / "fresh"
        make_driver_root(fresh, new)
        build_fake_nvml(fresh, TWO, driver=new)
        rig.root.rename(rig.base / "old")
        fresh.rename(rig.root)
        rig.load(new)
        before = listens(log)
        end(rig)
        rig.watch.notify()
        await becomes(
            rig,
            "the new driver",
            lambda: rig.node_state.node.inventory.driver_version == new and rig.ask("device=1") == "",
        )
        await listening(rig, log, before)
        await receives_events(rig)
        assert rig.health_of(0) is HealthState.HEALTHY
    assert all("580.95.05" in refusal or new in refusal for refusal in rig.refused)


async def test_a_gpu_that_is_lost_while_somebody_listens_to_it(rig: HealthRig, log: Log) -> None:
    async with rig.running():
        await listening(rig, log)
        rig.play(TWO, Act(HANDLE, "fail", 15, gpu=1))
        rig.cache.poke()
        await becomes(rig, "its loss", lambda: "(15)" in rig.ask("device=1"))
        await listening(rig, log, gpus=1)
        rig.play(TWO)
        rig.cache.poke()
        await becomes(rig, "its return", lambda: len(rig.node_state.node.gpus) == 2)
        assert "bad since" in rig.ask("device=1")
        rig.ahead_s += rig.policy.health.hold_down_s + 1
        await becomes(rig, "it to recover", lambda: recovered(rig))
    assert rig.refused == []
