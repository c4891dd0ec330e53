from __future__ import annotations

import json
from pathlib import Path

import pytest

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.cli.main import main
from nri_gpu.decision.decide import decide
from nri_gpu.decision.replay import changed_record, decision_record, node_record, policy_record
from nri_gpu.domain.errors import Exit
from nri_gpu.policy.model import Policy
from tests.support import builders as make

POLICY = '[namespaces]\nallow = ["ml"]\n'


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two pods of namespace ml that each got a GPU, and one that asked for nonsense."""
    node, ledger, now = make.node(), Ledger(), 10.0
    lines = [node_record(node), policy_record("policy.toml", POLICY, "")]
    for name, claim in (("one", "device=0"), ("two", "device=1"), ("three", "nonsense")):
        container = make.container(claim, of=name)
        decision = decide(container, node, ledger, Policy.default())
        lines.append(decision_record(container, decision, 1_800_000_000.0, now))
        old, ledger = ledger, ledger.after(decision, now)
        if changed := changed_record(old, ledger):
            lines.append(changed)
    file = tmp_path / "audit.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def policy(folder: Path, text: str) -> str:
    file = folder / "new.toml"
    file.write_text(text)
    return str(file)


def test_unchanged_nothing_differs(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded)]) == Exit.OK
    assert capsys.readouterr().out == "3 decisions, none differs\n"


def test_another_policy_shows_who_would_be_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = policy(tmp_path, '[namespaces]\ndeny = ["ml"]\n')
    assert main(["replay", str(recorded), "--policy", new]) == Exit.FINDING
    said = capsys.readouterr().out
    assert "ml/one main" in said
    assert f"  - granted {make.uuid(0)} (exclusive, namespaces.allow[0])" in said
    assert "  + refused [not-allowed]: namespace " in said
    assert said.endswith("3 decisions, 2 differ\n")


def test_json_for_programs(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = policy(tmp_path, '[defaults]\nmode = "shared"\n')
    assert main(["replay", str(recorded), "--policy", new, "-o", "json"]) == Exit.FINDING
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "nri-gpu/replay/v1"
    assert [each["now"]["mode"] for each in said["different"]] == ["shared", "shared"]


def test_a_line_that_is_no_record_is_told_with_its_place(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.write_text(recorded.read_text() + '{"kind": "decision"}\n[]\nnot json\n')
    assert main(["replay", str(recorded)]) == Exit.FINDING
    said = capsys.readouterr()
    assert "3 decisions, none differs" in said.out
    places = [line.split(": ", 2)[1] for line in said.err.splitlines()]
    first = len(recorded.read_text().splitlines()) - 2
    assert places == [f"{recorded}:{first + more}" for more in range(3)]


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "gone")]) == Exit.CONFIGURATION
    assert "No such file" in capsys.readouterr().err


def test_a_broken_policy(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--policy", policy(tmp_path, "colour = 1\n")]) == Exit.CONFIGURATION
    assert "colour" in capsys.readouterr().err
