"""What an earlier version knew in a policy file: an upgrade refuses none of it, and says once what it ignores."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.policy.dropped import DROPPED
from nri_gpu.policy.findings import advise
from nri_gpu.records.policy_file import PolicyFile, first_policy
from tests.support.log import Log
from tests.unit.policy.samples import OLD


@pytest.mark.parametrize(("text", "meant", "named"), OLD.values(), ids=OLD)
def test_it_is_ignored_with_one_warning(
    tmp_path: Path, log: Log, text: str, meant: str, named: tuple[str, ...]
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(meant)
    without = PolicyFile(str(path), {}, tmp_path).load()
    assert (without.ignored, log.warnings()) == ((), [])
    path.write_text(text)
    file = PolicyFile(str(path), {}, tmp_path)
    policy = first_policy(file)
    assert policy == without
    (line,) = log.warnings()
    assert (line.text, line.fields["fault"]) == (
        "policy has settings that are ignored",
        "; ".join(each.meaning for each in policy.ignored),
    )
    assert [each.meaning.partition(" is ignored: ")[0] for each in policy.ignored] == [*named]
    assert advise(policy)[: len(named)] == policy.ignored
    assert file.load(again=True) == policy


def test_each_is_tried_here() -> None:
    everything = "".join(text for text, _, _ in OLD.values())
    assert [path for path in DROPPED if path.partition("=")[0].rpartition(".")[2] not in everything] == []
