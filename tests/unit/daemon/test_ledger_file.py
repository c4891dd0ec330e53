"""`ledger.json`: what it publishes, and what of the ledger of the daemon before still counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.ledger import GrantPhase, Ledger
from nri_gpu.allocation.reservations import reserve
from nri_gpu.daemon.ledger_file import read_ledger, write_ledger
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.kubelet import AllocatedDevice
from nri_gpu.domain.names import LEDGER
from tests.support import builders as make
from tests.support import nri_messages as nri
from tests.support.plugin import Bench
from tests.unit.plugin.test_releasing import GRACE_S, HandoverBench


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


def test_what_was_waited_for_is_waited_for(tmp_path: Path) -> None:
    bench = HandoverBench()
    bench.run_and_end()
    new = restarted(bench, tmp_path)
    assert "ml/first" in new.withheld
    new.clock.now += GRACE_S
    assert new.withheld == ""


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


def test_one_that_never_ran_is_not(tmp_path: Path) -> None:
    bench = HandoverBench()
    bench.granted("device=0", "first")
    assert restarted(bench, tmp_path).plugin.ledger == Ledger()


def test_reservations_stay(tmp_path: Path) -> None:
    bench = HandoverBench()
    device = AllocatedDevice("nvidia.com/gpu", bench.node.gpus[0].uuid)
    bench.plugin.reserve([device], shared=False)
    new = restarted(bench, tmp_path)
    assert new.plugin.ledger.reservations.keys() == {device}
    assert all(isinstance(entry.until, float) for entry in new.plugin.ledger.entries.values())
    assert new.withheld


def test_the_published_ledger(tmp_path: Path) -> None:
    bench = Bench()
    of = nri.asking("device=1,0;mode=shared")
    made = nri.container(of)
    assert isinstance(bench.plugin.create_container(nri.create(of, made)), bytes)
    plain = nri.pod("other")
    held = nri.container(plain)
    held.linux.devices.add(path="/dev/nvidia3", type="c", major=195, minor=3)
    bench.plugin.create_container(nri.create(plain, held))
    text = kept(tmp_path, bench.plugin.ledger).read_text()
    assert json.loads(text) == {
        "schema": "nri-gpu/ledger/v1",
        "grants": [
            {
                "namespace": "ml",
                "pod": "train",
                "pod_uid": "uid-train",
                "container": "main",
                "container_id": made.id,
                "phase": "created",
                "mode": "shared",
                "gpu_uuids": [bench.node.gpus[0].uuid, bench.node.gpus[1].uuid],
                "driver_generation": "580.95.05-test",
            }
        ],
        "foreign": [
            {"container_id": held.id, "pod": "ml/other", "container": "", "gpu_uuids": [bench.node.gpus[3].uuid]}
        ],
        "leaving": [],
    }


def test_a_grant_of_nothing_is_published_and_not_read(tmp_path: Path) -> None:
    bench = Bench()
    bench.plugin.create_container(nri.create(nri.asking("none"), pb.Container(id="c", name="n")))
    file = kept(tmp_path, bench.plugin.ledger)
    (grant,) = json.loads(file.read_text())["grants"]
    assert (grant["mode"], grant["gpu_uuids"]) == ("none", [])
    assert read_ledger(file, 0.0) == Ledger()


def test_it_reads_what_is_written(tmp_path: Path) -> None:
    ledger = reserve(Ledger(), [AllocatedDevice("nvidia.com/gpu", f"{make.uuid(3)}::1")], 5.0, shared=True)
    for number, phase in enumerate((GrantPhase.RUNNING, GrantPhase.CREATED)):
        entry = make.entry(number, phase=phase, to=make.container(name=f"c{number}"))
        ledger = ledger.with_entry(entry)
    found = read_ledger(kept(tmp_path, ledger), 100.0)
    assert found.entries.keys() == ledger.entries.keys()
    assert found.reservations.keys() == ledger.reservations.keys()
    for id_, entry in found.entries.items():
        known = ledger.entries[id_]
        assert replace(entry.grant, pod_id=known.grant.pod_id) == known.grant
        assert entry.phase is known.phase


def test_what_has_lapsed_and_what_holds_no_gpu_is_left_out(tmp_path: Path) -> None:
    lapsed = make.entry(0, phase=GrantPhase.LAPSED, to=make.container(name="a"))
    ledger = Ledger().with_entry(lapsed)
    assert read_ledger(kept(tmp_path, ledger), 0.0) == Ledger()


def test_no_file_is_an_empty_ledger(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / LEDGER, 0.0) == Ledger()


SAID = "it is not what nri-gpu writes|schema|Phase|grace|JSON|Expecting|Invalid|convert|recursion"
GRANT = {
    "namespace": "ml", "pod": "train", "pod_uid": "u", "container": "main", "container_id": "c", "phase": "running",
    "mode": Mode.EXCLUSIVE.value, "gpu_uuids": [make.uuid(0)], "driver_generation": "1",
}  # fmt: skip
RELEASING = {"gpu_uuid": make.uuid(0), "pod": "ml/train", "pod_uid": "u", "since_s": 1.0, "grace_s": 60.0}
WRONG: dict[str, Any] = {
    "a list": [],
    "another schema": {"schema": "nri-gpu/ledger/v2", "grants": []},
    "no grants": {},
    "grants that are none": {"grants": 3},
    "a grant that is none": {"grants": ["x"]},
    "no phase": {"grants": [{key: value for key, value in GRANT.items() if key != "phase"}]},
    "a phase of tomorrow": {"grants": [{**GRANT, "phase": "asleep"}]},
    "an id that is a number": {"grants": [{**GRANT, "container_id": 7}]},
    "uuids that are a text": {"grants": [{**GRANT, "gpu_uuids": make.uuid(0)}]},
    "a grace without end": {"leaving": [{**RELEASING, "grace_s": 1e12}]},
    "a grace that is no number": {"leaving": [{**RELEASING, "grace_s": "long"}]},
    "a time that is none": {"leaving": [{**RELEASING, "since_s": "NaN"}]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_ledger(tmp_path: Path, wrong: Any) -> None:  # noqa: ANN401
    file = tmp_path / LEDGER
    whole = {"schema": "nri-gpu/ledger/v1", "grants": [], **wrong} if isinstance(wrong, dict) else wrong
    if wrong == {}:
        del whole["grants"]
    file.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=SAID):
        read_ledger(file, 100.0)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"])
def test_nor_is_anything_that_is_no_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / LEDGER
    file.write_text(text)
    with pytest.raises(ValueError, match=SAID):
        read_ledger(file, 100.0)


def test_a_time_to_come_is_now(tmp_path: Path) -> None:
    file = tmp_path / LEDGER
    raw = {"schema": "nri-gpu/ledger/v1", "grants": [], "leaving": [{**RELEASING, "since_s": 1e9}]}
    file.write_text(json.dumps(raw))
    (releasing,) = read_ledger(file, 100.0).releasing.values()
    assert releasing.since == 100.0


def test_a_ledger_of_before_is_read(tmp_path: Path) -> None:
    file = tmp_path / LEDGER
    file.write_text(json.dumps({"schema": "nri-gpu/ledger/v1", "grants": [GRANT], "foreign": []}))
    assert list(read_ledger(file, 0.0).entries) == [ContainerId("c")]
