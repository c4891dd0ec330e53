"""The file of the GPUs that root took out of use, and whose it has to be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nri_gpu.cordon.cordon_file import (
    BYTES_MAX,
    FILE,
    CordonError,
    CordonRecord,
    cordons_of,
    kept_cordons,
    read_cordons,
    write_cordons,
)
from nri_gpu.domain.cordons import NO_CORDONS, Cordons
from nri_gpu.health.resets import AwaitedReset
from tests.support.builders import uuid

RECORDS = {
    uuid(0): CordonRecord(at_s=1.5, by="alice", why="fan", given={uuid(0): frozenset({"uid-train"})}),
    uuid(1): CordonRecord(at_s=2.5, by="root", why="RMA", reset=AwaitedReset(boot_id="b", module="m", asked=True)),
}


def test_it_is_read_as_it_was_written_for_root_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_cordons(tmp_path, RECORDS)
    finally:
        os.umask(before)
    assert read_cordons(tmp_path) == RECORDS
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert cordons_of(RECORDS) == Cordons(frozenset(RECORDS), {uuid(0): frozenset({"uid-train"})})
    assert kept_cordons(tmp_path).gpus == RECORDS.keys()


def test_no_file_is_nothing_out_of_use(tmp_path: Path) -> None:
    assert read_cordons(tmp_path) == {}
    assert kept_cordons(tmp_path) == kept_cordons("there is no such folder") == NO_CORDONS


def test_a_later_version_may_have_written_more(tmp_path: Path) -> None:
    write_cordons(tmp_path, RECORDS)
    file = tmp_path / FILE
    file.write_text(file.read_text().replace('"by"', '"more":{"of":1},"by"').replace("{", '{"schema":"v2",', 1))
    assert read_cordons(tmp_path) == RECORDS


DAMAGED = {
    "cut": b'{"gpus":{"GPU-',
    "empty": b"",
    "another document": b'{"records":{}}',
    "of another type": b'{"gpus":{"GPU-1":{"at_s":"x","by":"","why":""}}}',
    "nested": b"[" * 100_000,
    "too large": b" " * BYTES_MAX + b'{"gpus":{}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_a_fault_and_none_is_in_use(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / FILE
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(CordonError, match=rf"{FILE} is not what nri-gpu wrote .*rm .*{FILE}"):
        read_cordons(tmp_path)
    assert kept_cordons(tmp_path) == Cordons(unknown=True)


def test_a_file_that_others_could_have_written_is_a_fault(tmp_path: Path) -> None:
    write_cordons(tmp_path, RECORDS)
    (tmp_path / FILE).chmod(0o644)
    with pytest.raises(CordonError, match="its mode 0644 lets users other than root use it") as found:
        read_cordons(tmp_path)
    assert not found.value.denied
    (tmp_path / FILE).rename(tmp_path / "other")
    (tmp_path / FILE).symlink_to(tmp_path / "other")
    with pytest.raises(CordonError, match="cannot be read"):
        read_cordons(tmp_path)


def test_whoever_may_not_read_it_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, _: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("nri_gpu.cordon.cordon_file.read_private", denied)
    with pytest.raises(CordonError) as found:
        kept_cordons(tmp_path)
    assert found.value.denied
