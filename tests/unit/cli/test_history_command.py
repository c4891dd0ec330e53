"""`nri-gpu history` and `nri-gpu usage`: what they print of a record, and what they say where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.records.usage_lines import HeldDevice
from nri_gpu.records.usage_log import FILE
from tests.support import builders as make
from tests.support.holds import EPOCH, Followed
from tests.unit.cli.conftest import Done, NriGpuCall

DAY_S = 86_400
Asked = Callable[..., Done]


@pytest.fixture
def asked(tmp_path: Path, nri_gpu: NriGpuCall, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A verb about a record: `train` and `other` share GPU 0 for a day, and `train` goes on; a claim has GPU 1."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    folder = tmp_path / "kept"
    folder.mkdir()
    node = Followed(folder, mono_s=0.0)
    node.begin(Ledger())
    alone = make.ledger(make.entry(0))
    both = make.ledger(make.entry(0), make.entry(0, to=make.container(of=make.pod("other", namespace="web"))))
    node.commit(both, 0.0)
    node.commit(alone, DAY_S)
    node.commit(make.ledger(make.entry(0), others=[make.foreign(1)]), DAY_S)
    node.commit(alone, DAY_S)
    fans = HeldDevice(uuid=make.uuid(3), gpu_uuid=make.uuid(3), place="3")
    node.record.cordoned(fans, "ada", "its fan is loud", EPOCH + DAY_S, "")
    node.record.cordoned(fans, "ada", "its fan is loud", EPOCH + DAY_S, "by ada")
    node.record.cordoned(fans, "ada", "again", EPOCH + 3 * DAY_S, "")
    node.write()
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[usage]\ndir = "{folder}"\n')
    return lambda verb, *words: nri_gpu(verb, "--policy", policy, "--state-dir", tmp_path, *words)


def test_history_has_each_hold_with_its_end(asked: Asked) -> None:
    done = asked("history", "-o", "json")
    assert done.code == Exit.OK
    held = [
        (each["pod"], each["way"], each["from_s"] - EPOCH, each["held_s"], each["ended"])
        for each in done.document["holds"]
    ]
    assert sorted(held) == [
        ("other", "granted", 0.0, DAY_S, "ended"),
        ("plugin", "external", 2 * DAY_S, DAY_S, "ended"),
        ("train", "granted", 0.0, 3 * DAY_S, None),
    ]


@pytest.mark.parametrize(
    ("words", "pods"),
    [
        (["0"], ["other", "train"]),
        ([make.uuid(1)], ["plugin"]),
        (["web"], ["other"]),
        (["ml/train"], ["train"]),
        (["--since", "2023-11-16"], ["plugin", "train"]),
        (["--until", "2023-11-15"], ["other", "train"]),
        (["elsewhere"], []),
    ],
)
def test_history_of_a_gpu_a_pod_or_a_time(asked: Asked, words: list[str], pods: list[str]) -> None:
    assert sorted(each["pod"] for each in asked("history", *words, "-o", "json").document["holds"]) == pods


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ([], ["its fan is loud", "again"]),
        (["3", "--until", "2023-11-16"], ["its fan is loud"]),
        (["0"], []),
        (["ml"], []),
    ],
)
def test_history_has_who_took_a_gpu_out_of_use(asked: Asked, words: list[str], reasons: list[str]) -> None:
    cordons = asked("history", *words, "-o", "json").document["cordons"]
    assert [each["why"] for each in cordons] == reasons
    assert all((each["ended"], each["to_s"]) in (("by ada", EPOCH + 3 * DAY_S), (None, None)) for each in cordons)
    assert ("OUT OF USE" in asked("history", *words).out) == bool(reasons)


def test_history_as_a_table_says_what_nobody_saw_end(asked: Asked) -> None:
    done = asked("history")
    assert done.out.splitlines()[0].split() == ["GPU", "MODEL", "HELD", "BY", "CONTAINER", "MODE", "FROM", "TO", "FOR"]
    (train,) = (line for line in done.out.splitlines() if "ml/train" in line)
    assert "2023-11-17 22:13:20 UTC or later" in train
    assert train.endswith("3d")


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ([], ["ml,216000,0,86400", "web,43200,0,0"]),
        (["--since", "2023-11-16"], ["ml,166400,0,86400"]),
        (["--by", "pod", "--until", "2023-11-15"], ["ml/train,3200,0,0", "web/other,3200,0,0"]),
    ],
)
def test_usage_divides_a_gpu_by_its_holders(asked: Asked, words: list[str], rows: list[str]) -> None:
    done = asked("usage", *words, "--csv")
    assert done.code == Exit.OK
    assert done.out.splitlines()[1:] == rows


def test_a_damaged_line_is_told(asked: Asked, tmp_path: Path) -> None:
    with (tmp_path / "kept" / FILE).open("a") as file:
        file.write("{nonsense\n")
    assert "1 line is damaged, or of a later version, and not counted" in asked("usage").out


@pytest.mark.parametrize("words", [["--since", "yesterday"], ["--since", "2023-13"], ["--until", "3y"]])
def test_a_time_that_is_none_is_wrong_usage(asked: Asked, words: list[str]) -> None:
    done = asked("history", *words)
    assert done.code == Exit.USAGE
    assert f"{' '.join(words)}: write an age such as 12h or 2d" in done.err


@pytest.mark.parametrize("verb", ["history", "usage"])
def test_where_nothing_is_kept_it_says_why(
    nri_gpu: NriGpuCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = nri_gpu(verb, "--state-dir", tmp_path)
    assert (done.code, "run it with sudo" in done.err) == (Exit.PERMISSION, True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    policy = tmp_path / "policy.toml"
    for setting, why in (("off", 'usage.dir = "off"'), (str(tmp_path), f"there is no {tmp_path / FILE}")):
        policy.write_text(f'[usage]\ndir = "{setting}"\n')
        done = nri_gpu(verb, "--policy", policy, "--state-dir", tmp_path)
        assert (done.code, why in done.err) == (Exit.UNAVAILABLE, True), done.err
    (tmp_path / FILE).write_text("")
    (tmp_path / FILE).chmod(0o666)
    done = nri_gpu(verb, "--policy", policy, "--state-dir", tmp_path)
    assert (done.code, "mode 0666" in done.err) == (Exit.CONFIGURATION, True)
