from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.cli.replay_command import compare, recorded_lines
from nri_gpu.decision.decide import decide
from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, FirstProcess
from nri_gpu.ledger.ledger import GrantPhase, Ledger
from nri_gpu.policy.model import DriverCapabilities, EnvironmentSettings, Policy
from nri_gpu.records.audit import FILE, GRANTS_AT_ONCE, OLD_FILE, WAITING_MAX, AuditLog
from nri_gpu.records.audit_limits import POD_SHARE, RECORD_MAX
from nri_gpu.records.audit_records import Compared, PassedOver, Replay, changed_record
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.ledgers import decided, prepared, unprepared
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until

NODE = make.node()
MIB = 2**20
BUG = "bug in the audit log; nothing else depends on it"


class Shell:
    """A plugin's part: decides, commits, tells the log."""

    def __init__(self, log: AuditLog) -> None:
        self.log, self.state, self.now = log, NodeState(NODE.inventory), 50.0
        log.follow(self.state)

    def create(self, container: Container) -> None:
        self.now += 0.01  # nobody's grace is over
        decision = decide(container, NODE, self.state.ledger, Policy.default())
        self.log.decided(container, decision, NODE, self.now)
        self.state.commit(decided(self.state.ledger, decision, self.now))

    def remove(self, container: Container) -> None:
        self.state.commit(self.state.ledger.without_containers({container.id}))


def asking(number: int, claim: str = "1") -> Container:
    return make.container(claim, of=f"pod-{number}")


PIPE_BYTES = 65536


def unread(pipe: int) -> int:
    found = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)


def read_to_the_end(pipe: int) -> str:
    os.set_blocking(pipe, True)
    with open(pipe, "rb") as file:
        return file.read().decode()


@contextlib.asynccontextmanager
async def writing(folder: Path, most_bytes: int = MIB, delay_s: float = 0.25) -> AsyncIterator[AuditLog]:
    """A log that has written all it was told once this ends."""
    log = AuditLog(folder, most_bytes, wall=lambda: 1_800_000_000.0, delay_s=delay_s)
    async with running(log.run()):
        await asyncio.sleep(0)
        yield log


def records(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def replayed(file: Path) -> int:
    """How many decisions the file holds; all of it is read, and decided again alike."""
    compared = list(compare(recorded_lines([file])))
    assert all(isinstance(each, Compared) and each.same for each in compared)
    return len(compared)


async def test_it_has_roots_word_that_a_gpu_was_reset(tmp_path: Path) -> None:
    async with writing(tmp_path) as log:
        log.repaired(make.uuid(0), "a reset is due since XID 46")
        Shell(log).create(asking(0))
    (found,) = (each for each in records(tmp_path / FILE) if each["kind"] == "repaired")
    assert (found["gpu_uuid"], found["due"]) == (make.uuid(0), "a reset is due since XID 46")
    assert replayed(tmp_path / FILE) == 1


async def test_it_has_who_took_a_gpu_out_of_use_and_why(tmp_path: Path) -> None:
    async with writing(tmp_path) as log:
        log.cordoned(make.uuid(0), "alice", "fan broken", "")
        Shell(log).create(asking(0))
    (found,) = (each for each in records(tmp_path / FILE) if each["kind"] == "cordoned")
    assert (found["gpu_uuid"], found["by"], found["why"]) == (make.uuid(0), "alice", "fan broken")
    assert replayed(tmp_path / FILE) == 1


async def test_claims_are_in_it_and_decide_again_what_they_decided(tmp_path: Path) -> None:
    claim = make.prepared_claim(0, pods=("pod-1",))
    allocated = Allocated((AllocatedDevice("claim", make.uuid(0)),), key=claim.called, claims=(claim.uid,))
    async with writing(tmp_path) as log:
        shell = Shell(log)
        log.synchronized(prepared(Ledger(), make.prepared_claim(1, name="first")))
        shell.state.commit(prepared(shell.state.ledger, claim))
        shell.create(asking(2, "device=0"))  # which is refused
        shell.create(make.container(of="pod-1", kubelet=allocated))
        shell.state.commit(unprepared(shell.state.ledger, claim.uid))
        shell.create(make.container(of="pod-3", kubelet=replace(allocated, admin=True)))
    assert replayed(tmp_path / FILE) == 3
    answers = [each["answer"] for each in records(tmp_path / FILE) if each["kind"] == "decision"]
    assert [(each["decision"], each.get("mode")) for each in answers] == [
        ("refuse", None),
        ("inject", "exclusive"),
        ("inject", None),
    ]
    assert "mac" not in (tmp_path / FILE).read_text()


async def test_what_asks_for_parts_of_the_driver_is_in_it_and_an_audit_without_it_still_replays(tmp_path: Path) -> None:
    """Of the environment, that variable; of an earlier version, no such line."""
    asking = replace(make.container("1", of="encoder"), env={"NVIDIA_DRIVER_CAPABILITIES": "all"})
    async with writing(tmp_path) as log:
        shell = Shell(log)
        shell.create(asking)
        shell.create(make.container("1", of="plain"))
    lines = (tmp_path / FILE).read_text()
    assert '"env":{"NVIDIA_DRIVER_CAPABILITIES":"all"}' in lines
    assert replayed(tmp_path / FILE) == 2
    ask = Policy(environment=EnvironmentSettings(driver_capabilities=DriverCapabilities.ASK))
    answers = list(compare(recorded_lines([tmp_path / FILE]), ask))
    assert [isinstance(each, Compared) and each.same for each in answers] == [False, True]
    (tmp_path / FILE).write_text(lines.replace('"env":{"NVIDIA_DRIVER_CAPABILITIES":"all"},', ""))
    assert replayed(tmp_path / FILE) == 2


async def test_both_files_together_are_bounded_and_each_can_be_replayed(tmp_path: Path) -> None:
    async with writing(tmp_path, most_bytes=40_000, delay_s=0) as log:
        shell = Shell(log)
        for number in range(200):
            shell.create(asking(number))
            if number > 2:
                shell.remove(asking(number - 2))
            await log.written()
    for name in (OLD_FILE, FILE):
        assert (tmp_path / name).stat().st_size < 60_000
        assert replayed(tmp_path / name)


@pytest.mark.parametrize("turns", range(1, 12, 2))
async def test_a_stop_while_notes_are_encoded_loses_none(tmp_path: Path, turns: int) -> None:
    async with writing(tmp_path, delay_s=0) as log:
        shell = Shell(log)
        for number in range(3):
            shell.create(asking(number))
        for _ in range(turns):
            await asyncio.sleep(0)
    assert replayed(tmp_path / FILE) == 3


@pytest.mark.parametrize("noted", [0, 1, 40])
async def test_lines_stand_in_the_order_in_which_they_were_noted(tmp_path: Path, noted: int) -> None:
    """On a disk that is slow, also at a stop, and whoever asks for all to be written: a pipe that is full."""
    os.mkfifo(tmp_path / FILE)
    reader = os.open(tmp_path / FILE, os.O_RDONLY | os.O_NONBLOCK)
    kept_open = os.open(tmp_path / FILE, os.O_WRONLY)
    async with writing(tmp_path, delay_s=0) as log:
        shell = Shell(log)
        for number in range(200):  # more than a pipe holds
            shell.create(asking(number, "nonsense"))
        await until("a full pipe", lambda: unread(reader) == PIPE_BYTES)
        waits = asyncio.create_task(log.written())
        for number in range(noted):
            shell.create(asking(200 + number, "nonsense"))
            await asyncio.sleep(0)
        reading = asyncio.get_running_loop().run_in_executor(None, read_to_the_end, reader)
    async with asyncio.timeout(10):
        await waits
    os.close(kept_open)
    said = [json.loads(line) for line in (await reading).splitlines() if line]
    pods = [each["container"]["pod"]["name"] for each in said if each["kind"] == "decision"]
    assert pods == [f"pod-{number}" for number in range(200 + noted)]


async def test_what_is_noted_beside_a_disk_that_hangs_is_bounded_and_follows(tmp_path: Path, log: Log) -> None:
    os.mkfifo(tmp_path / FILE)  # whoever opens it waits for a reader
    async with writing(tmp_path, delay_s=0) as audit:
        shell = Shell(audit)
        count = WAITING_MAX + 20
        for number in range(count):
            shell.create(asking(number, "nonsense"))
            await asyncio.sleep(0.1 if number == 0 else 0)
        reader = os.open(tmp_path / FILE, os.O_RDONLY | os.O_NONBLOCK)
        kept_open = os.open(tmp_path / FILE, os.O_WRONLY)
        reading = asyncio.get_running_loop().run_in_executor(None, read_to_the_end, reader)
    os.close(kept_open)
    said = [json.loads(line) for line in (await reading).splitlines() if line]
    pods = [each["container"]["pod"]["name"] for each in said if each["kind"] == "decision"]
    dropped = log.one("audit log: decisions lost").fields["dropped"]
    assert dropped == WAITING_MAX
    assert pods == ["pod-0", *(f"pod-{number}" for number in range(1 + dropped, count))]


async def test_many_notes_cost_the_event_loop_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with writing(tmp_path, delay_s=0.05) as log:
        shell, loop = Shell(log), asyncio.get_running_loop()
        turns = 0

        def counted(action: Callable[..., object], *args: object, context: Context | None = None) -> asyncio.Handle:
            nonlocal turns
            turns += 1
            return call_soon(action, *args, context=context)

        call_soon = loop.call_soon
        monkeypatch.setattr(loop, "call_soon", counted)
        for number in range(50):
            shell.create(asking(number))
        await asyncio.sleep(0.3)
        monkeypatch.undo()
        assert turns <= 2  # this test's own
        assert replayed(tmp_path / FILE) == 50


async def test_a_large_ledger_is_written_in_parts(tmp_path: Path) -> None:
    created = [make.container(of=f"p{n}") for n in range(GRANTS_AT_ONCE * 2 + 1)]
    entries = [make.entry(to=each, mode=None, phase=GrantPhase.CREATED) for each in created]
    processes = {each.id: FirstProcess(0, 0) for each in created}
    async with writing(tmp_path) as log:
        log.synchronized(replace(make.ledger(*entries), processes=processes))
    parts = [each for each in records(tmp_path / FILE) if each["kind"] in ("ledger", "changed")]
    assert max(len(part["entries"]) for part in parts) == GRANTS_AT_ONCE
    for part in "entries", "processes":
        assert {id_ for each in parts for id_ in each.get(part, ())} == processes.keys()


async def test_a_bug_in_a_record_is_logged_once_and_ends_nothing(tmp_path: Path, log: Log) -> None:
    cannot_be_recorded = replace(asking(0).pod, labels={"a": object()})
    async with writing(tmp_path, delay_s=0) as audit:
        shell = Shell(audit)
        shell.create(asking(1))
        for number in (2, 3):
            shell.create(replace(asking(number), pod=cannot_be_recorded))
        shell.create(asking(4))
    assert replayed(tmp_path / FILE) == 2
    assert isinstance(log.one(BUG).exception, TypeError)
    assert log.one("audit log: decisions lost").fields["dropped"] == 2


async def test_a_bug_in_writing_is_logged_and_ends_nothing(log: Log) -> None:
    async with writing(Path("no path has\0"), delay_s=0) as audit:
        Shell(audit).create(asking(0))
        await audit.written()
    assert isinstance(log.one(BUG).exception, ValueError)


async def test_a_line_cut_short_is_told_of_and_spoils_no_other(tmp_path: Path) -> None:
    async with writing(tmp_path) as log:
        Shell(log).create(asking(0))
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-40])
    async with writing(tmp_path) as log:
        Shell(log).create(asking(1))
    (said,) = (each for each in compare(recorded_lines([file])) if isinstance(each, str))
    assert str(file) in said
    assert [each.same for each in compare(recorded_lines([file])) if isinstance(each, Compared)] == [True, True]


async def test_a_folder_that_is_gone_is_said_once_and_costs_nothing_else(tmp_path: Path, log: Log) -> None:
    async with writing(tmp_path / "gone", delay_s=0) as audit:
        shell = Shell(audit)
        for number in range(3):
            shell.create(asking(number))
            await audit.written()
    assert len(log.said("audit log not written; nothing else depends on it")) == 1


async def test_on_a_disk_that_hangs_decisions_are_lost_and_counted_and_the_rest_replays(
    tmp_path: Path, log: Log
) -> None:
    async with writing(tmp_path) as audit:
        shell = Shell(audit)
        for number in range(WAITING_MAX):  # two notes each, and nobody writes meanwhile
            shell.create(asking(number, "none"))
            shell.remove(asking(number, "none"))
        shell.create(asking(WAITING_MAX, "device=1"))
    lost = log.one("audit log: decisions lost").fields["dropped"]
    assert replayed(tmp_path / FILE) == WAITING_MAX + 1 - lost < WAITING_MAX


def hoarding(attempt: int, annotations: int = 950) -> Container:
    """A container that is refused, with 243 kB of annotations: almost all that Kubernetes takes."""
    many = {f"gpu.nri.io/container.c{number}": "x" * 225 for number in range(annotations)}
    return make.container(pod=make.pod("hoard", annotations={**many, "gpu.nri.io": "nonsense"}), name=f"m{attempt}")


async def test_a_pod_with_large_annotations_does_not_push_out_what_others_were_granted(tmp_path: Path) -> None:
    """Kubernetes takes 256 KiB of them, and the kubelet creates a refused container again."""
    async with writing(tmp_path, most_bytes=4 * MIB, delay_s=0) as log:
        shell = Shell(log)
        shell.create(asking(0))
        for attempt in range(60):
            shell.create(hoarding(attempt))
            await log.written()
    assert not (tmp_path / OLD_FILE).exists()
    first, *cut = (each for each in records(tmp_path / FILE) if each["kind"] in ("decision", "cut"))
    assert (first["container"]["pod"]["name"], first["answer"]["decision"]) == ("pod-0", "inject")
    assert {each["kind"] for each in cut} == {"cut"}
    assert cut[0]["container"]["pod"]["annotations"] == {"gpu.nri.io": "nonsense"}
    assert (cut[0]["annotations"], cut[0]["answer"]["code"]) == (951, "bad-request")
    assert len({each["annotations_sha256"] for each in cut}) == 1
    assert cut[0]["bytes"] > 243_000


async def test_a_record_that_was_cut_is_named_and_passed_over(tmp_path: Path) -> None:
    """One that is granted, too: the ledger has it all the same, and the next decision depends on it."""
    large = make.pod("large", "device=0", labels={f"l{number}": "x" * 200 for number in range(200)})
    async with writing(tmp_path) as log:
        shell = Shell(log)
        shell.create(make.container(pod=large))
        shell.create(asking(1, "device=0"))
    cut, refused = compare(recorded_lines([tmp_path / FILE]))
    assert isinstance(cut, PassedOver)
    assert (cut.pod, cut.container, cut.decisions) == ("large", "main", 1)
    assert "its record was cut" in cut.why
    assert isinstance(refused, Compared)
    assert (refused.same, refused.now["code"]) == (True, "gpu-busy")


async def test_one_pod_has_a_share_of_a_file_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    async with writing(tmp_path, most_bytes=200_000, delay_s=0) as log:
        shell = Shell(log)
        shell.create(asking(0, "device=0"))
        for _ in range(300):
            shell.create(asking(1, "device=0"))
        shell.create(asking(1, "device=1"))  # and a grant is in the ledger without its decision
        shell.create(asking(2, "device=1"))
        await log.written()
    written = (tmp_path / FILE).read_text().splitlines()
    of_pod = [line for line in written if "pod-1" in line and '"decision"' in line]
    assert sum(map(len, of_pod)) < 200_000 / POD_SHARE + RECORD_MAX
    compared = list(compare(recorded_lines([tmp_path / FILE])))
    again = [each for each in compared if isinstance(each, Compared)]
    assert all(each.same for each in again)
    assert [each.now["code"] for each in again if each.container.pod.name == "pod-2"] == ["gpu-busy"]
    left_out = [each for each in compared if isinstance(each, PassedOver)]
    number = sum(each.decisions for each in left_out)
    assert number <= 303 - len(again) < 2 * number
    assert {each.pod for each in left_out} == {"pod-1"}


async def test_in_the_next_file_a_pod_has_its_share_again(tmp_path: Path) -> None:
    async with writing(tmp_path, most_bytes=20_000, delay_s=0) as log:
        shell = Shell(log)
        for number in range(120):
            shell.create(asking(number % 12, "nonsense"))
            await log.written()
    assert (tmp_path / OLD_FILE).exists()
    pods = {each["container"]["pod"]["name"] for each in records(tmp_path / FILE) if each["kind"] == "decision"}
    assert len(pods) > 1


async def test_each_change_of_the_ledger_says_when(tmp_path: Path) -> None:
    async with writing(tmp_path, delay_s=0) as log:
        shell = Shell(log)
        shell.create(made := asking(0))
        shell.remove(made)
        log.synchronized(Ledger())
    ledgers = [each for each in records(tmp_path / FILE) if each["kind"] in ("changed", "ledger")]
    assert [each["at_s"] for each in ledgers] == [1_800_000_000.0] * 4
    assert replayed(tmp_path / FILE) == 1


def test_a_replay_knows_who_is_being_looked_for() -> None:
    ledger = make.ledger(make.entry(0))
    looked_for = replace(ledger, unsought=dict.fromkeys(ledger.entries, 5.0))
    replay = Replay(lambda *_: Policy())
    for before, after in pairwise((Ledger(), looked_for, ledger)):
        record = changed_record(before, after, 0.0)
        assert record
        replay.take(record)
        assert replay.ledger.unsought == after.unsought


async def test_a_file_begins_with_a_record_and_one_cut_short_goes_on_with_a_new_line(tmp_path: Path) -> None:
    for life in range(3):
        async with writing(tmp_path, delay_s=0) as log:
            Shell(log).create(asking(life))
        with (tmp_path / FILE).open("a") as file:
            file.write('{"kind": "dec' if life == 1 else "")
    lines = (tmp_path / FILE).read_text().splitlines()
    assert "" not in lines
    assert sum(line == '{"kind": "dec' for line in lines) == 1
