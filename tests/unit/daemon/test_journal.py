from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.allocation.grant import sign_grant
from nri_gpu.daemon import journal as module
from nri_gpu.daemon.journal import Journal
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.decision import Grant
from nri_gpu.plugin.dependencies import Remembered
from tests.support import builders as make

KEY = bytes(range(32))
ONE = make.grant(0, to=make.container(name="one"))
TWO = make.grant(1, to=make.container(name="two"))
SHARED = make.grant(2, 3, mode=Mode.SHARED, to=make.container(name="shared"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path, KEY)
    yield made
    made.close()


def grant(journal: Journal, granted: Grant, at: float) -> None:
    journal.granted(granted, sign_grant(granted, KEY), at)


def test_what_was_granted_is_remembered_in_its_order(journal: Journal) -> None:
    grant(journal, ONE, 10.0)
    grant(journal, SHARED, 11.5)
    assert journal.remembered(since=0) == (Remembered(ONE, 10.0), Remembered(SHARED, 11.5))


def test_names_for_people_are_remembered_too(journal: Journal) -> None:
    grant(journal, ONE, 1.0)
    (found,) = journal.remembered(since=0)
    assert (found.grant.namespace, found.grant.pod_name) == (ONE.namespace, ONE.pod_name)


def test_nothing_older_than_asked_for(journal: Journal) -> None:
    grant(journal, ONE, 10.0)
    grant(journal, TWO, 20.0)
    assert [each.grant for each in journal.remembered(since=20.0)] == [TWO]


def test_what_is_settled_is_forgotten(journal: Journal) -> None:
    grant(journal, ONE, 1.0)
    grant(journal, TWO, 2.0)
    journal.settled(ONE.container_id)
    assert [each.grant for each in journal.remembered(since=0)] == [TWO]


def test_settled_and_granted_again(journal: Journal) -> None:
    grant(journal, ONE, 1.0)
    journal.settled(ONE.container_id)
    grant(journal, ONE, 3.0)
    assert journal.remembered(since=0) == (Remembered(ONE, 3.0),)


def test_no_file_is_an_empty_journal(journal: Journal) -> None:
    assert journal.remembered(since=0) == ()


def test_another_process_reads_it(path: Path, journal: Journal) -> None:
    grant(journal, ONE, 1.0)
    assert Journal(path, KEY).remembered(since=0) == (Remembered(ONE, 1.0),)


def test_a_mark_under_another_key_is_worth_nothing(path: Path, journal: Journal) -> None:
    grant(journal, ONE, 1.0)
    assert Journal(path, bytes(32)).remembered(since=0) == ()


def test_it_is_for_root_alone(path: Path, journal: Journal) -> None:
    grant(journal, ONE, 1.0)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kept", range(1, 200, 7))
def test_a_line_cut_short_loses_itself_and_no_other(path: Path, journal: Journal, kept: int) -> None:
    grant(journal, ONE, 1.0)
    before = path.stat().st_size
    grant(journal, TWO, 2.0)
    os.truncate(path, before + kept)
    grant(journal, SHARED, 3.0)
    assert [each.grant for each in journal.remembered(since=0)] == [ONE, SHARED]


EDITED = {
    "not json": b"\nnonsense",
    "not text": b"\n\xff\xfe\x00",
    "a list": b"\n[1, 2]",
    "a number": b"\n7",
    "no mark": b'\n{"at": 1, "container_id": "x"}',
    "a null mark": b'\n{"at": 1, "container_id": null, "mark": null}',
    "deep": b"\n" + b"[" * 100_000,
}


@pytest.mark.parametrize("line", EDITED.values(), ids=EDITED)
def test_what_was_edited_by_hand_is_passed_over(path: Path, journal: Journal, line: bytes) -> None:
    grant(journal, ONE, 1.0)
    with path.open("ab") as file:
        file.write(line)
    grant(journal, TWO, 2.0)
    assert [each.grant for each in journal.remembered(since=0)] == [ONE, TWO]


@pytest.mark.parametrize("at", ['"soon"', "null", "true", "[]", "-1", "NaN", "Infinity", "9" * 400, "9" * 5000])
def test_a_time_that_is_none_is_passed_over(path: Path, journal: Journal, at: str) -> None:
    grant(journal, ONE, 1.25)
    path.write_text(path.read_text().replace("1.25", at))
    assert journal.remembered(since=0) == ()


def test_more_gpus_than_the_mark_says_are_not_believed(path: Path, journal: Journal) -> None:
    grant(journal, ONE, 1.0)
    path.write_text(path.read_text().replace(make.uuid(0), make.uuid(1)))
    assert journal.remembered(since=0) == ()


def test_compacted_it_tells_the_same_and_no_more(path: Path, journal: Journal) -> None:
    for at in range(50):
        grant(journal, ONE, float(at))
        journal.settled(ONE.container_id)
    grant(journal, TWO, 60.0)
    grant(journal, SHARED, 70.0)
    large = path.stat().st_size
    journal.compact(since=65.0)
    assert path.stat().st_size < large / 10
    grant(journal, ONE, 80.0)
    assert journal.remembered(since=0) == (Remembered(SHARED, 70.0), Remembered(ONE, 80.0))


def test_it_says_when_it_is_full(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 520)
    grant(journal, ONE, 1.0)
    assert not journal.full
    grant(journal, TWO, 2.0)
    assert journal.full
    journal.compact(since=2.0)
    assert not journal.full


def test_a_folder_that_is_gone_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        grant(Journal(tmp_path / "gone" / "journal", KEY), ONE, 1.0)
