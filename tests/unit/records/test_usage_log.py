"""The record of who had which GPU: over restarts, reboots, damage, full disks, and as much of it as may be kept."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nri_gpu.domain.gpu import Gpu, MigPart, compute_share
from nri_gpu.ledger.holds import End
from nri_gpu.ledger.ledger import Entry, Ledger
from nri_gpu.records import usage_log
from nri_gpu.records.usage_file import Ending, UsageReader
from nri_gpu.records.usage_lines import Begun
from nri_gpu.records.usage_log import FILE, PARTS
from tests.support import builders as make
from tests.support.holds import Followed
from tests.support.log import Log

NOBODY = 65534
ONE = make.ledger(make.entry(0))
FAULT = "usage not recorded; nothing else depends on it"


def held(index: int, of: str) -> Entry:
    return make.entry(index, to=make.container(of=of))


def told(folder: Path) -> list[tuple[str, float, End | None]]:
    """Of each hold that is over: its pod, how long it was, and what ended it."""
    begun, found = dict[str, Begun](), []
    for event in UsageReader(folder).events():
        if isinstance(event, Ending):
            hold = begun.pop(event.hold)
            found.append((hold.pod, event.now.mono_s - hold.began.mono_s, event.why))
        else:
            begun[event.hold] = event
    return found


def lived(folder: Path, *, begins: float, boot: str = "boot") -> Followed:
    """A daemon that began then, and found what is there."""
    node = Followed(folder, boot, begins)
    node.begin(Ledger())
    return node


def test_a_hold_goes_on_over_a_restart_and_what_ended_meanwhile_ends_where_it_was_last_known(tmp_path: Path) -> None:
    first = lived(tmp_path, begins=100.0)
    first.commit(make.ledger(make.entry(0), held(1, "other")), 0.0)
    first.commit(make.ledger(make.entry(0), held(1, "other"), held(2, "third")), 50.0)
    first.write()  # and is killed
    second = lived(tmp_path, begins=400.0)
    second.commit(ONE, 0.0)
    second.commit(Ledger(), 10.0)
    second.write()
    assert sorted(told(tmp_path)) == [("other", 50.0, None), ("third", 0.0, None), ("train", 310.0, End.ENDED)]


def test_a_reboot_ends_what_was_held_where_it_was_last_known(tmp_path: Path) -> None:
    first = lived(tmp_path, begins=100.0)
    first.commit(ONE, 0.0)
    first.commit(make.ledger(make.entry(0), held(1, "other")), 20.0)
    first.write()
    second = lived(tmp_path, begins=5.0, boot="next")
    second.commit(make.ledger(held(1, "other")), 1.0)
    second.write()
    assert sorted(told(tmp_path)) == [("other", 0.0, None), ("train", 20.0, None)]


def test_a_clock_that_is_set_back_changes_no_length(tmp_path: Path) -> None:
    node = lived(tmp_path, begins=100.0)
    node.commit(ONE, 0.0)
    node.shift_s = -86_400.0
    node.commit(Ledger(), 60.0)
    node.write()
    assert told(tmp_path) == [("train", 60.0, End.ENDED)]


def test_a_device_of_the_kubelet_that_passes_to_another_pod_is_another_hold(tmp_path: Path) -> None:
    for pod, begins in (("one", 100.0), ("two", 300.0)):
        node = lived(tmp_path, begins=begins)
        same = make.entry(0, to=make.container(of=make.pod(pod), id="same"))
        node.commit(make.ledger(same), 0.0)
        node.write()
    assert told(tmp_path) == [("one", 0.0, None)]


@pytest.mark.parametrize(
    "rubbish", [b"\0\xff{", b'{"kind":"begun","boot":"x"', b'{"kind":"of a later version"}\n', b"\n[]\n"]
)
def test_lines_that_are_none_of_ours_are_passed_over_and_counted(tmp_path: Path, rubbish: bytes) -> None:
    node = lived(tmp_path, begins=100.0)
    node.commit(ONE, 0.0)
    node.write()
    with (tmp_path / FILE).open("ab") as file:
        file.write(rubbish)
    node.commit(Ledger(), 5.0)
    node.write()
    assert told(tmp_path) == [("train", 5.0, End.ENDED)]
    reader = UsageReader(tmp_path)
    assert [*reader.events()]
    assert reader.skipped == 1


def test_what_is_too_much_goes_from_the_oldest_and_what_is_held_stays_known(tmp_path: Path) -> None:
    node = lived(tmp_path, begins=100.0)
    for number in range(4000):
        node.commit(make.ledger(make.entry(0), held(1, f"pod-{number}")), 1.0)
        if not number % 50:
            node.write()
    node.commit(Ledger(), 1.0)
    node.write()
    files = sorted(tmp_path.iterdir())
    assert len(files) == PARTS
    assert sum(each.stat().st_size for each in files) < 2**20 * (PARTS + 1) / PARTS
    assert told(tmp_path)[-2:] == [("train", 4000.0, End.ENDED), ("pod-3999", 1.0, End.ENDED)]


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    node = lived(tmp_path, begins=100.0)
    for _ in range(20):
        node.commit(ONE, 0.0)
        node.write()
        for file in tmp_path.iterdir():
            os.utime(file, (node.now().at_s, min(file.stat().st_mtime, node.now().at_s)))
        node.commit(Ledger(), 86_400 / PARTS + 1)
        node.write()
    assert len([*tmp_path.iterdir()]) <= PARTS


def test_a_fault_of_the_disk_is_an_error_once_and_what_is_held_is_written_when_it_is_over(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    node = lived(tmp_path, begins=100.0)
    with monkeypatch.context() as patch:
        patch.setattr(usage_log, "open_to_append", full)
        for ledger in (ONE, make.ledger(make.entry(0), held(1, "other"))):
            node.commit(ledger, 1.0)
            node.write()
    assert [(line.level, line.fields["fault"]) for line in log.said(FAULT)] == [("ERROR", "No space left on device")]
    node.commit(Ledger(), 10.0)
    node.write()
    assert sorted(told(tmp_path)) == [("other", 10.0, End.ENDED), ("train", 11.0, End.ENDED)]


def test_others_can_neither_read_nor_replace_it(tmp_path: Path, log: Log) -> None:
    before = os.umask(0)
    try:
        node = lived(tmp_path, begins=100.0)
        node.commit(ONE, 0.0)
        node.write()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    (tmp_path / FILE).rename(tmp_path / "theirs")
    (tmp_path / FILE).symlink_to(tmp_path / "theirs")
    size = (tmp_path / "theirs").stat().st_size
    node.commit(Ledger(), 5.0)
    node.write()
    assert (tmp_path / "theirs").stat().st_size == size
    assert log.one(FAULT)


@pytest.mark.parametrize(
    ("unit", "share"),
    [
        (make.gpu(0), 1.0),
        (MigPart(make.mig_gpu(0), make.mig(profile="3g.40gb")), 3 / 7),
        (MigPart(make.mig_gpu(0), make.mig(profile="1c.3g.40gb")), 1 / 7),
        (MigPart(make.mig_gpu(0, model="NVIDIA A30"), make.mig(profile="2g.12gb")), 2 / 4),
    ],
)
def test_a_mig_device_counts_as_its_part_of_the_compute_slices(unit: Gpu | MigPart, share: float) -> None:
    assert compute_share(unit) == share
