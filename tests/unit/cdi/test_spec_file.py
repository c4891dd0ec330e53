"""The specification's file: whole or not there, and others with names of it are seen."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.cdi.spec_file import Overlap, SpecFile, SpecFileError, overlaps
from nri_gpu.system.storage import draft_of

KIND: Final = "nvidia.com/gpu"
OURS: Final = json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": []}, indent=1)
RIVAL: Final = json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": [{"name": "0"}, {"name": "1"}]})

NAMES: Final = {"0", "1:0", "GPU-1", "all"}
# Texts of other files -> the names of ours that they have.
TEXTS: Final[dict[str, tuple[str, set[str]]]] = {
    "compact JSON": ('{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0"},{"name":"9"}]}', {"0"}),
    "YAML as nvidia-ctk has it": (
        '---\ncdiVersion: 0.5.0\ndevices:\n- name: "0"\n- name: all\nkind: nvidia.com/gpu\n',
        {"0", "all"},
    ),
    "YAML with a comment": ("kind: nvidia.com/gpu  # ours\ndevices:\n- name: GPU-1\n", {"GPU-1"}),
    "a number without quotes": ("kind: 'nvidia.com/gpu'\ndevices: [{name: 0}]\n", {"0"}),
    "what YAML has other values for": ("kind: nvidia.com/gpu\ndevices:\n- name: 1:0\n- name: true\n", {"1:0"}),
    "a device that takes over another's": (
        "kind: nvidia.com/gpu\ndevices: [&one {name: all}, {<<: *one, name: GPU-1}]\n",
        {"all", "GPU-1"},
    ),
    "JSON in a file for YAML": (
        '{"kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": {}}, {"name": 0}]}',
        {"all", "0"},
    ),
    "names of MIG devices alone": ('kind: nvidia.com/gpu\ndevices:\n- name: "0:0"\n', set()),
    "no devices": ("kind: nvidia.com/gpu\n", set()),
    "another class": ('{"kind": "nvidia.com/gpu.shared", "devices": [{"name": "0"}]}', set()),
    "another vendor": ('kind: management.nvidia.com/gpu\ndevices:\n- name: "0"\n', set()),
    "nested": ('annotations:\n  kind: nvidia.com/gpu\ndevices:\n- name: "0"\n', set()),
    "not JSON": ("{", set()),
    "no object": ("[]", set()),
    "not text": ("\0\xff", set()),
    "nothing": ("", set()),
    "deep": ("[" * 100_000, set()),
}


@pytest.fixture
def file(tmp_path: Path) -> SpecFile:
    return SpecFile(tmp_path / "cdi" / "nri-gpu.json")


def test_it_is_written_with_its_folder_for_everybody_to_read(file: SpecFile) -> None:
    before = os.umask(0o077)
    try:
        assert file.write(OURS)
    finally:
        os.umask(before)
    assert file.path.read_text() == OURS
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o644
    assert [*file.path.parent.iterdir()] == [file.path]


def test_the_same_again_touches_nothing(file: SpecFile) -> None:
    file.write(OURS)
    first = file.path.stat()
    assert not file.write(OURS)
    assert (file.path.stat().st_ino, file.path.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


def test_where_it_cannot_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("a file")
    with pytest.raises(SpecFileError, match=r"nri-gpu\.json cannot be written: File exists"):
        SpecFile(tmp_path / "cdi" / "nri-gpu.json").write(OURS)


def test_it_is_removed_if_it_is_one(file: SpecFile) -> None:
    assert not file.remove()
    file.write(OURS)
    assert file.remove()
    assert not file.path.exists()
    (draft := draft_of(file.path)).touch()  # of a process that was killed as it wrote
    assert not file.remove()
    assert not draft.exists()
    file.write('{"kind": "example.com/gpu"}')
    assert not file.remove()
    assert file.path.exists()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """As runtimes list them; the second counts."""
    first, second = tmp_path / "etc", tmp_path / "run"
    first.mkdir()
    second.mkdir()
    return first, second


@pytest.mark.parametrize(("text", "names"), TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["nvidia.yaml", "nvidia.json"])
def test_names_that_two_files_of_a_folder_have_count_in_neither(
    folders: tuple[Path, Path], name: str, text: str, names: set[str]
) -> None:
    own, other = (folders[1] / each for each in ("nri-gpu.json", name))
    other.write_bytes(text.encode("latin-1"))
    found = [*overlaps(own, NAMES, folders)]
    assert found == [Overlap((own, other), frozenset(names), None)] * bool(names)


@pytest.mark.parametrize("place", [0, 1])
def test_of_two_folders_the_later_one_counts(folders: tuple[Path, Path], place: int) -> None:
    own, other = folders[place] / "nri-gpu.json", folders[1 - place] / "nvidia.yaml"
    other.write_text(RIVAL)
    (found,) = overlaps(own, NAMES, folders)
    counts = (other, own)[place]
    assert found == Overlap((own, other), frozenset({"0"}), counts)
    assert str(found) == (
        f"{own} and {other} both name {KIND}=0: runtimes take what {counts} says, since its folder comes later"
    )


def test_a_folder_by_another_name_is_the_same(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """/var/run is a link to /run."""
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "link/nri-gpu.json").write_text(RIVAL)
    (tmp_path / "link/nvidia.yaml").write_text(RIVAL)
    own = folders[1] / "nri-gpu.json"
    assert [*overlaps(own, NAMES, (tmp_path / "link",))] == [
        Overlap((own, folders[1] / "nvidia.yaml"), frozenset({"0"}), None)
    ]


def test_two_files_of_an_earlier_folder_cancel_ours(folders: tuple[Path, Path]) -> None:
    early, late = folders
    for name in ("a.yaml", "b.json"):
        (early / name).write_text(RIVAL)
    own = late / "nri-gpu.json"
    lost, *covered = overlaps(own, NAMES, folders)
    assert lost == Overlap((early / "a.yaml", early / "b.json"), frozenset({"0"}), None)
    assert [each.counts for each in covered] == [own, own]


def test_what_no_runtime_reads_overlaps_with_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    here, elsewhere = folders[1], tmp_path / "elsewhere"
    (here / "nvidia.json.bak").write_text(RIVAL)
    (here / "folder.json").mkdir()
    (here / "unreadable.json").symlink_to("/proc/self/mem")
    (folders[0] / "nvidia.yaml").write_text(RIVAL)
    assert [*overlaps(here / "nri-gpu.json", NAMES, (here,))] == []
    assert [*overlaps(elsewhere / "nri-gpu.json", NAMES, folders)] == []
