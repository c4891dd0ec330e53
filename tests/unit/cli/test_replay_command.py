"""`nri-gpu replay`: what another policy would have decided."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import to_builtins

from nri_gpu.domain.errors import Exit
from nri_gpu.records.audit_limits import cut_record, left_out_record
from tests.support import builders as make
from tests.unit.cli.conftest import Done, NriGpuCall
from tests.unit.cli.printed import record

OLD_NODE = (
    '{"kind": "node", "schema": "nri-gpu/audit/v1", "node": {"number": 3, "inventory": {"taken_at": 1.0}, "profiles": '
    '{"folder": "/var/lib/nri-gpu/drivers/profiles", "minors": [0, 1]}}}'
)
Replayed = Callable[..., Done]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record(tmp_path / "audit.jsonl")
    return tmp_path / "audit.jsonl"


@pytest.fixture
def replay(recorded: Path, tmp_path: Path, nri_gpu: NriGpuCall) -> Replayed:
    def run(*options: str, policy: str | None = None) -> Done:
        (tmp_path / "new.toml").write_text(policy or "")
        more = [] if policy is None else ["--policy", tmp_path / "new.toml"]
        return nri_gpu("replay", recorded, *more, *options)

    return run


def test_by_the_recorded_policy_nothing_differs(replay: Replayed) -> None:
    assert replay() == Done(Exit.OK, "3 decisions, none differs\n", "")


def test_a_policy_that_options_of_the_daemon_mend_can_be_played(replay: Replayed) -> None:
    done = replay(policy="[kubelet]\nenabled = true\n[dra]\nenabled = true\n")
    assert (done.code, done.err) == (Exit.OK, "")


def test_a_refusal_is_its_code_whatever_its_words(replay: Replayed, recorded: Path) -> None:
    log = recorded.read_text()
    recorded.write_text(log.replace('"reason": "', '"reason": "in other words: '))
    assert replay() == Done(Exit.OK, "3 decisions, none differs\n", "")
    recorded.write_text(log.replace('"code": "bad-request"', '"code": "gpu-busy"'))
    assert replay().code == Exit.FINDING


def test_a_node_as_d995626f_recorded_it(replay: Replayed, recorded: Path) -> None:
    """Its application profiles are none of a node's facts any more."""
    lines = recorded.read_text().splitlines()
    node = json.loads(lines[0])
    node["node"]["profiles"] = json.loads(OLD_NODE)["node"]["profiles"]
    recorded.write_text("\n".join([OLD_NODE, json.dumps(node), *lines[1:]]))
    assert replay() == Done(Exit.OK, "3 decisions, none differs\n", "")


def test_json_for_programs(replay: Replayed) -> None:
    done = replay("-o", "json", policy='[defaults]\nmode = "shared"\n')
    assert (done.code, done.document["schema"]) == (Exit.FINDING, "nri-gpu/replay/v1")
    assert [each["now"]["mode"] for each in done.document["different"]] == ["shared", "shared"]


def test_a_line_that_is_no_record_is_reported_with_its_place(replay: Replayed, recorded: Path) -> None:
    first = len(recorded.read_text().splitlines()) + 1
    with recorded.open("a") as file:
        file.write('{"kind": "decision"}\n[]\nnot json\n')
    done = replay()
    assert done.code == Exit.FINDING
    assert "3 decisions, none differs" in done.out
    places = [line.split(": ", 2)[1] for line in done.err.splitlines()]
    assert places == [f"{recorded}:{first + more}" for more in range(3)]


def test_a_file_that_begins_with_no_record_is_no_audit_log(nri_gpu: NriGpuCall, recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "policy.toml"
    other.write_text("# one\n\n[namespaces]\nallow = []\n" * 1000)
    for files in ((other,), (recorded, other)):
        done = nri_gpu("replay", *files)
        assert (done.code, done.out) == (Exit.CONFIGURATION, "")
        *complaints, last = done.err.splitlines()
        assert len(complaints) == 3
        assert last.startswith(f"nri-gpu: {other} is no audit log: its first 3 lines are none of one; name audit.jsonl")


def test_what_the_log_has_not_whole_is_named_and_no_finding(replay: Replayed, recorded: Path) -> None:
    large = make.container("nonsense", of="large")
    cut = cut_record(large, {"decision": "refuse", "code": "bad-request", "reason": "x"}, 1_800_000_000.0, 243_512)
    left_out = [left_out_record(large.pod, 1_800_000_001.0, number) for number in (1, 2, 4)]
    with recorded.open("a") as file:
        file.writelines(json.dumps(to_builtins(each)) + "\n" for each in (cut, *left_out))
    done = replay()
    assert (done.code, done.err) == (Exit.OK, "")
    assert done.out.splitlines()[:2] == [
        "2027-01-15T08:00:00+00:00 ml/large main",
        "  passed over: its record was cut, as it would have had 243512 bytes",
    ]
    assert done.out.endswith(
        "  passed over: 4 in all were left out of the file, as the pod had its share of it\n"
        "3 decisions, none differs, 5 passed over\n"
    )
    document = replay("-o", "json").document
    assert (document["decisions"], [each["decisions"] for each in document["passed_over"]]) == (3, [1, 1, 1, 2])


def test_what_cannot_be_read_is_78(replay: Replayed, recorded: Path) -> None:
    done = replay(policy="colour = 1\n")
    assert (done.code, "colour" in done.err) == (Exit.CONFIGURATION, True)
    recorded.unlink()
    done = replay()
    assert (done.code, "no such file" in done.err) == (Exit.CONFIGURATION, True)
