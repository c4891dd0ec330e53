from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.system.liveness import LivenessFile, alive_age_s
from tests.support.log import Log


def test_each_word_takes_as_many_bytes_in_one_file(tmp_path: Path) -> None:
    liveness, file = LivenessFile(tmp_path / "run"), tmp_path / "run" / "alive"
    seen = set()
    for ready in (False, True, False):
        liveness.write(ready)
        age_s = alive_age_s(file.parent)
        assert age_s is not None
        assert 0 <= age_s < 2
        assert file.read_text().split()[1] == ("ready" if ready else "waits")
        seen.add((file.stat().st_ino, file.stat().st_size))
    assert len(seen) == 1


def test_what_a_process_before_said_is_gone_before_anything_is_written(tmp_path: Path) -> None:
    LivenessFile(tmp_path).write(ready=True)
    LivenessFile(tmp_path)
    assert alive_age_s(tmp_path) is None


def test_a_link_leads_nowhere_and_a_fault_is_logged_once(tmp_path: Path, log: Log) -> None:
    liveness = LivenessFile(tmp_path)
    (tmp_path / "alive").symlink_to(tmp_path / "other")
    for _ in range(3):
        liveness.write(ready=True)
    assert not (tmp_path / "other").exists()
    assert log.one("liveness file not written").level == "WARNING"
    (tmp_path / "alive").unlink()
    liveness.write(ready=True)
    assert alive_age_s(tmp_path) is not None


def test_without_a_folder_nothing_is_asked_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LivenessFile(None).keep(lambda: pytest.fail("asked"))
    LivenessFile(None).write(ready=True)
    assert not list(tmp_path.iterdir())
