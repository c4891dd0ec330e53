"""The specification's file: whole or not there, and others of its kind beside it are seen."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.cdi.spec_file import SpecFile, SpecFileError

KIND: Final = "nvidia.com/gpu"
OURS: Final = json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": []}, indent=1)

RIVALS = {
    "compact JSON": ("nvidia.json", '{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[]}', False),
    "YAML": ("nvidia.yaml", "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n", False),
    "YAML, quoted": ("nvidia.yaml", 'cdiVersion: "0.5.0"\nkind: "nvidia.com/gpu"\n', False),
    "with hooks": (
        "nvidia.yaml",
        "kind: nvidia.com/gpu\ncontainerEdits:\n  hooks:\n  - hookName: createContainer\n",
        True,
    ),
}
NO_RIVALS = {
    "another kind": ("other.json", '{"kind": "nvidia.com/gpu.shared"}'),
    "another vendor": ("other.yaml", "kind: example.com/gpu\n"),
    "nested": ("other.yaml", "annotations:\n  kind: nvidia.com/gpu\n"),
    "read by nobody": ("nvidia.json.bak", OURS),
    "not JSON": ("nvidia.json", "{"),
    "no object": ("nvidia.json", "[]"),
    "not text": ("nvidia.json", "\0\xff"),
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
    file.write('{"kind": "example.com/gpu"}')
    assert not file.remove()
    assert file.path.exists()


@pytest.mark.parametrize(("name", "text", "hooks"), RIVALS.values(), ids=RIVALS)
@pytest.mark.parametrize("beside", [True, False], ids=["same folder", "another folder"])
def test_another_of_its_kind_is_seen(
    file: SpecFile, tmp_path: Path, name: str, text: str, hooks: bool, beside: bool
) -> None:
    folder = file.path.parent if beside else tmp_path / "etc"
    folder.mkdir()
    (folder / name).write_text(text)
    file.write(OURS)
    (said,) = file.conflicts((tmp_path / "etc",))
    assert said.startswith(f"{folder / name} describes {KIND} too" + (", with hooks: " if hooks else ": "))
    assert ("of one folder" in said) is beside


@pytest.mark.parametrize(("name", "text"), NO_RIVALS.values(), ids=NO_RIVALS)
def test_what_is_no_rival(file: SpecFile, name: str, text: str) -> None:
    file.write(OURS)
    (file.path.parent / name).write_bytes(text.encode("latin-1"))
    (file.path.parent / "folder.json").mkdir()
    (file.path.parent / "unreadable.json").symlink_to("/proc/self/mem")
    assert [*file.conflicts(())] == []
