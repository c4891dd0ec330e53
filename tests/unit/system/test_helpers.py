"""What every feature shares: one atomic write, one back-off, one way to log a fault that lasts."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from nri_gpu.system.storage import signature, write_whole
from nri_gpu.system.tasks import Backoff, LogOnce, first_done
from tests.support.log import Log


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_whole_and_whoever_has_the_old_one_keeps_it(tmp_path: Path, *, sync: bool) -> None:
    file = tmp_path / "note"
    file.write_text("old")
    (tmp_path / ".note.new").symlink_to(tmp_path / "elsewhere")  # left behind, or laid as a trap
    umask = os.umask(0o077)
    try:
        with file.open() as opened:
            write_whole(file, b"new", 0o644, sync=sync)
            assert opened.read() == "old"
    finally:
        os.umask(umask)
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "gone" / "note", b"")


def test_the_signature_differs_once_the_content_does(tmp_path: Path) -> None:
    file = tmp_path / "note"
    assert signature(file) is None
    write_whole(file, b"one")
    first = signature(file)
    assert first == signature(file)
    write_whole(file, b"two")
    assert signature(file) != first
    (tmp_path / "link").symlink_to(file)
    assert signature(tmp_path / "link") == signature(file) != signature(tmp_path / "link", follow=False)


def test_pauses_double_up_to_the_longest_and_start_again() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.next_s() == 0.5
    jittered = Backoff(1.0, 1.0, jitter=0.9)
    assert all(0.1 <= jittered.next_s() <= 1.0 for _ in range(100))


def test_a_fault_that_lasts_is_logged_once() -> None:
    faults = LogOnce()
    with Log() as log:
        for fault in ("full", "full", "gone", "full"):
            faults.warning("not written", fault, path="/x")
        faults.clear()
        faults.warning("not written", "full", path="/x")
    assert [line.fields["fault"] for line in log.said("not written")] == ["full", "gone", "full", "full"]
    assert faults.fault == "full"


def test_the_first_that_is_done_ends_the_wait_for_the_others() -> None:
    async def run() -> bool:
        forever = asyncio.ensure_future(asyncio.Event().wait())
        await first_done(asyncio.sleep(0), forever)
        await first_done(asyncio.Event().wait(), timeout_s=0.01)
        return forever.cancelled()

    assert asyncio.run(run())
