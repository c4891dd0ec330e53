"""`ledger.json`: what it publishes, and what of the ledger of the daemon before still counts."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import LEDGER
from nri_gpu.domain.value import encode
from nri_gpu.ledger.events import DevicesAllocated, PodGone, Reconciled, Removed, Synchronized
from nri_gpu.ledger.holders import DriverDevice
from nri_gpu.ledger.ledger import GrantPhase, Ledger, Live
from nri_gpu.ledger.reservations import SETTLED_S, reservation_of
from nri_gpu.records.ledger_file import LedgerFile, read_ledger, write_ledger
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support import nri_messages as nri
from tests.support.handover import HandoverBench
from tests.support.ledgers import after
from tests.support.scripted_runtime import until


def kept(folder: Path, ledger: Ledger) -> Path:
    write_ledger(folder / LEDGER, ledger)
    return folder / LEDGER


def restarted(bench: HandoverBench, folder: Path, *listed: Any) -> HandoverBench:  # noqa: ANN401 - pods and containers
    """Another daemon on the same node, to which the runtime lists these."""
    new = HandoverBench()
    new.clock.now = bench.clock.now + 2
    new.state.ledger = read_ledger(kept(folder, bench.plugin.ledger), new.clock.now)
    new.synchronize([of for of, _ in listed], [nri.running(made) for _, made in listed])
    return new


def test_a_gpu_that_was_released_without_a_daemon_is_waited_for(tmp_path: Path) -> None:
    bench = HandoverBench()
    bench.run("device=0", "first")
    stays = bench.run("device=1", "stays")
    new = restarted(bench, tmp_path, stays)
    assert {releasing.pod for releasing in new.plugin.ledger.releasing.values()} == {"ml/first"}
    assert new.left == 1
    new.clock.now += 1
    new.look(0)
    assert new.withheld == ""


def test_how_long_a_container_has_had_its_gpu_is_kept(tmp_path: Path) -> None:
    bench = HandoverBench()
    stays = bench.run("device=0", "stays")
    (began,) = (entry.since for entry in bench.plugin.ledger.entries.values())
    bench.clock.now += 100
    again = restarted(bench, tmp_path, stays)
    assert [entry.since for entry in again.plugin.ledger.entries.values()] == [began]


def test_reservations_stay(tmp_path: Path) -> None:
    bench = HandoverBench()
    device = AllocatedDevice("nvidia.com/gpu", bench.node.gpus[0].uuid)
    bench.plugin.reserve([device], shared=False)
    new = restarted(bench, tmp_path)
    assert new.plugin.ledger.reservations.keys() == {device}
    assert all(isinstance(entry.until, float) for entry in new.plugin.ledger.entries.values())
    assert new.withheld


def test_a_reservation_is_read_with_its_sandbox(tmp_path: Path) -> None:
    """By that it is known at the start that a container of another plugin's has what the kubelet counts."""
    device = AllocatedDevice("nvidia.com/gpu", make.uuid(0))
    kept_for = reservation_of(device, make.grant(0), Mode.EXCLUSIVE, 5.0, None)
    for reservation in (kept_for, replace(kept_for, pod_gone=True)):
        assert read_ledger(kept(tmp_path, Ledger().with_reservation(reservation)), 9.0).reservations == {
            device: reservation
        }


def test_the_published_ledger(tmp_path: Path) -> None:
    mine, theirs = make.container(), make.foreign(3)
    ledger = make.ledger(make.entry(1, 0, mode=Mode.SHARED, phase=GrantPhase.CREATED, to=mine), others=[theirs])
    assert json.loads(kept(tmp_path, ledger).read_text()) == {
        "schema": "nri-gpu/ledger/v1",
        "grants": [
            {
                "namespace": "ml",
                "pod": "train",
                "pod_uid": "uid-train",
                "container": "main",
                "container_id": mine.id,
                "phase": "created",
                "mode": "shared",
                "gpu_uuids": [make.uuid(1), make.uuid(0)],
                "driver_generation": make.GENERATION,
                "since_s": 0.0,
                "lost": False,
                "pod_id": "sandbox-train",
                "pod_gone": False,
            }
        ],
        "foreign": [
            {
                "container_id": theirs.container_id,
                "pod": "ml/plugin",
                "container": "",
                "gpu_uuids": [make.uuid(3)],
                "watched": [],
                "regained": [],
            }
        ],
        "leaving": [],
        "prepared": [],
        "opened": [],
        "processes": {},
    }


def test_who_gave_it_is_in_no_file_of_a_daemon(tmp_path: Path) -> None:
    """An observer knows it, and keeps its ledger in memory; an audit log without the field stays as it was."""
    theirs = make.foreign(3)
    assert "by" not in encode(theirs)
    assert encode(replace(theirs, by="CDI"))["by"] == "CDI"
    texts = {kept(tmp_path, make.ledger(others=[replace(theirs, by=by)])).read_text() for by in ("", "CDI")}
    assert len(texts) == 1


def test_that_it_was_a_monitor_is_remembered(tmp_path: Path) -> None:
    """By the next daemon, whose policy may have another list; of a container whose numbers are in the file."""
    one, two = make.foreign(0, 1), make.foreign(2, name="other")
    held = replace(one, watched=frozenset({make.uuid(0)}), regained=frozenset({make.uuid(1)}))
    live = {one.container_id: Live(one.container_id, "main", one.pod_id, one.pod, frozenset({(195, 7)}))}
    ledger = replace(make.ledger(others=[held, two]), live=live, processes={one.container_id: FirstProcess(40, 1)})
    assert read_ledger(kept(tmp_path, ledger), 0.0).external == {one.container_id: held}


def test_what_holds_no_gpu_is_published_and_not_read(tmp_path: Path) -> None:
    nothing = make.entry(mode=None, to=make.container(name="a"))
    lapsed = make.entry(0, phase=GrantPhase.LAPSED, to=make.container(name="b"))
    monitors = make.entry(0, mode=None, to=make.container(name="c"))
    file = kept(tmp_path, make.ledger(nothing, lapsed, monitors))
    found = [(grant["mode"], grant["phase"]) for grant in json.loads(file.read_text())["grants"]]
    assert found == [("none", "running"), ("exclusive", "lapsed"), ("admin", "running")]
    assert read_ledger(file, 0.0) == Ledger()


def test_it_reads_what_is_written(tmp_path: Path) -> None:
    phases = {"a": GrantPhase.RUNNING, "b": GrantPhase.CREATED}
    entries = [make.entry(3, phase=phase, to=make.container(name=name)) for name, phase in phases.items()]
    device = AllocatedDevice("nvidia.com/gpu", f"{make.uuid(3)}::1")
    ledger = after(make.ledger(*entries), DevicesAllocated(5.0, (device,), shared=True))
    found = read_ledger(kept(tmp_path, ledger), 100.0)
    assert found.reservations.keys() == {device}
    known = {id_: (each.grant, each.phase) for id_, each in ledger.entries.items()}
    assert {id_: (each.grant, each.phase) for id_, each in found.entries.items()} == known


def test_lost_containers_and_first_processes_stay(tmp_path: Path) -> None:
    granted, other = make.container(), make.container(of="other")
    seen = FirstProcess(41, 1234, Cgroup("", f"/kubepods/{granted.id}"))
    lives = Live(other.id, "main", other.pod.id, "ml/other", frozenset({(195, 3)}))
    ledger = replace(make.ledger(make.entry(0, to=granted)), live={other.id: lives})
    ledger = ledger.with_processes({granted.id: seen, other.id: FirstProcess(42, 1235)})
    lost = after(ledger, Removed(6.0, (other.id,)), PodGone(5.0, granted.pod.id))
    found = read_ledger(kept(tmp_path, lost), 100.0)
    assert found.lost == {granted.id: 5.0, other.id: 6.0}
    assert (found.entries, found.live, found.processes) == (lost.entries, lost.live, lost.processes)


def test_one_that_is_looked_for_is_written_as_before_the_list(tmp_path: Path) -> None:
    """The version before this one looks at the processes of all that the file calls lost; of this one it has none."""
    granted, other = make.container(), make.container(of="other")
    lives = Live(other.id, "main", other.pod.id, "ml/other", frozenset({(195, 3)}))
    ledger = replace(make.ledger(make.entry(0, to=granted)), live={other.id: lives})
    unlisted = after(ledger, Synchronized(5.0, unsought=frozenset({granted.id, other.id})))
    assert unlisted.lost.keys() == unlisted.unsought.keys() == {granted.id, other.id}
    found = read_ledger(kept(tmp_path, unlisted), 100.0)
    assert not found.lost
    assert found.entries[granted.id].phase is GrantPhase.RUNNING
    assert found.live == ledger.live


def test_no_file_is_an_empty_ledger(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / LEDGER, 0.0) == Ledger()


GRANT = {
    "namespace": "ml", "pod": "train", "pod_uid": "u", "container": "main", "container_id": "c", "phase": "running",
    "mode": Mode.EXCLUSIVE.value, "gpu_uuids": [make.uuid(0)], "driver_generation": "1",
}  # fmt: skip
RELEASING = {"gpu_uuid": make.uuid(0), "pod": "ml/train", "pod_uid": "u", "since_s": 1.0, "grace_s": 60.0}
HEAD = {"schema": "nri-gpu/ledger/v1", "grants": []}
WRONG: dict[str, Any] = {
    "a list": [],
    "another schema": HEAD | {"schema": "nri-gpu/ledger/v2"},
    "no grants": {"schema": "nri-gpu/ledger/v1"},
    "grants that are none": HEAD | {"grants": 3},
    "a grant that is none": HEAD | {"grants": ["x"]},
    "no phase": HEAD | {"grants": [{key: value for key, value in GRANT.items() if key != "phase"}]},
    "a phase of tomorrow": HEAD | {"grants": [GRANT | {"phase": "asleep"}]},
    "a mode of tomorrow": HEAD | {"grants": [GRANT | {"mode": "asleep"}]},
    "an id that is a number": HEAD | {"grants": [GRANT | {"container_id": 7}]},
    "uuids that are a text": HEAD | {"grants": [GRANT | {"gpu_uuids": make.uuid(0)}]},
    "a grace without end": HEAD | {"leaving": [RELEASING | {"grace_s": 1e12}]},
    "a grace that is no number": HEAD | {"leaving": [RELEASING | {"grace_s": "long"}]},
    "a time that is none": HEAD | {"leaving": [RELEASING | {"since_s": "NaN"}]},
}
NO_LEDGER = {name: json.dumps(wrong) for name, wrong in WRONG.items()} | {
    "empty": "",
    "no JSON": "{",
    "deep": "[" * 100_000,
    "NUL": "\x00",
}


@pytest.mark.parametrize("text", NO_LEDGER.values(), ids=NO_LEDGER)
def test_a_file_that_is_no_ledger(tmp_path: Path, text: str) -> None:
    file = tmp_path / LEDGER
    file.write_text(text)
    with pytest.raises(ValueError, match="it is not what nri-gpu writes: "):
        read_ledger(file, 100.0)


def test_a_time_to_come_is_now(tmp_path: Path) -> None:
    file = tmp_path / LEDGER
    file.write_text(json.dumps(HEAD | {"leaving": [RELEASING | {"since_s": 1e9}]}))
    (releasing,) = read_ledger(file, 100.0).releasing.values()
    assert releasing.since == 100.0


def test_a_ledger_of_before_is_read(tmp_path: Path) -> None:
    file = tmp_path / LEDGER
    file.write_text(json.dumps({"schema": "nri-gpu/ledger/v1", "grants": [GRANT], "foreign": []}))
    assert list(read_ledger(file, 0.0).entries) == [ContainerId("c")]


def write_soon(file: Path, *ledgers: Ledger) -> bool:
    """Whether one of these changes brings the file at once; at the end it is written in any case."""
    state, there = NodeState(make.inventory()), file.exists

    async def run() -> bool:
        written = LedgerFile(file, state, delay_s=3600.0, soon_s=0.0)
        for ledger in ledgers:
            state.commit(ledger)
            await asyncio.sleep(0.01)
        soon = there()
        written.close()
        return soon

    return asyncio.run(run())


def test_creation_and_start_make_one_write_after_both(tmp_path: Path) -> None:
    phases = (GrantPhase.CREATED, GrantPhase.RUNNING)
    created, running = (make.ledger(make.entry(1, phase=phase)) for phase in phases)
    assert not write_soon(tmp_path / LEDGER, created, running)
    assert [each.phase for each in read_ledger(tmp_path / LEDGER, 0.0).entries.values()] == [GrantPhase.RUNNING]


def test_what_stands_nowhere_else_is_written_soon(tmp_path: Path) -> None:
    created = make.ledger(make.entry(1, phase=GrantPhase.CREATED))
    device = AllocatedDevice("nvidia.com/gpu", f"{make.uuid(3)}::1")
    assert write_soon(tmp_path / LEDGER, created, after(created, DevicesAllocated(5.0, (device,), shared=True)))


async def test_each_change_is_written_in_its_time(tmp_path: Path) -> None:
    state, file = NodeState(make.inventory()), tmp_path / LEDGER

    def says(uuid: GpuUuid) -> bool:
        return [each.grant.uuids for each in read_ledger(file, 0.0).entries.values()] == [(uuid,)]

    written = LedgerFile(file, state, delay_s=0.0, soon_s=0.0)
    for uuid in (make.uuid(1), make.uuid(2)):
        state.commit(make.ledger(make.entry_of(uuid)))
        await until("the file", partial(says, uuid))
    written.close()


def test_a_device_that_a_list_lacked_is_counted_anew(tmp_path: Path) -> None:
    """A time to come was edited by hand, and would keep the GPU of NVIDIA's driver for as long."""
    lacked = DriverDevice(device="gpu-6", namespace="ml", pod_name="p", container_name="main", unlisted_since=1e9)
    ledger = read_ledger(kept(tmp_path, Ledger(prepared={lacked.id: lacked})), 1.0)
    lists = (Reconciled(at, (), frozenset()) for at in (2.0, 2.0 + SETTLED_S))
    assert not after(ledger, *lists).prepared
