"""The installation that runs: what its units may start, and who else could change that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.enable.features import FEATURES, SERVICE
from nri_gpu.enable.installation import Installation, exec_word, running_installation
from nri_gpu.enable.unit_plan import UnitFile
from tests.support import systemd_analyze
from tests.support.unit_file import OURS

PYTHON: Final = Path("/usr/bin/python3")
CODE: Final = Path("/opt/nri-gpu/lib")
CDI: Final = "/etc/systemd/system/nri-gpu-cdi.service"


def starts(program: str, root: Path, python: Path = PYTHON, code: Path = CODE) -> str:
    """The line by which the copied unit starts the program."""
    file = Installation(Path(program), OURS.parent, python, code).wanted(FEATURES["cdi"], SERVICE, root)[CDI]
    assert file
    return next(line for line in file.text.splitlines() if line.startswith("ExecStart="))


def test_this_tree_is_a_checkout() -> None:
    assert running_installation().units == OURS.parent
    assert running_installation().program.name == "nri-gpu"


@pytest.mark.parametrize(
    ("program", "written"),
    [
        ("/opt/nri-gpu/bin/nri-gpu", "/opt/nri-gpu/bin/nri-gpu"),
        ("/srv/my gpus/bin/nri-gpu", '"/srv/my gpus/bin/nri-gpu"'),
        ("/srv/50%n/bin/nri-gpu", '"/srv/50%%n/bin/nri-gpu"'),
    ],
)
def test_a_program_as_systemd_reads_it(tmp_path: Path, program: str, written: str) -> None:
    assert starts(program, tmp_path) == f"ExecStart={written} cdi generate --output /run/cdi/nri-gpu.json"


@pytest.mark.parametrize(
    "program",
    ["/srv/a\nUser=x/nri-gpu", '/srv/"/nri-gpu', "/srv/$HOME/nri-gpu", r"/srv/\x/nri-gpu", os.fsdecode(b"/srv/\xff/a")],
)
def test_a_program_that_systemd_would_read_otherwise(tmp_path: Path, program: str) -> None:
    with pytest.raises(CommandError, match="systemd cannot start"):
        starts(program, tmp_path)


def test_systemd_itself_finds_a_program_below_blanks(tmp_path: Path) -> None:
    program = tmp_path / "my 100% gpus" / "nri-gpu"
    unit = tmp_path / "test.service"
    unit.write_text(f"[Service]\nExecStart={exec_word(str(program))} run\n")
    program.parent.mkdir()
    assert f"{program} is not executable" in systemd_analyze.run("verify", "--man=no", str(unit)).stderr
    program.touch(0o755)
    assert systemd_analyze.run("verify", "--man=no", str(unit)).returncode == 0


@pytest.mark.parametrize("folder", ["/root/nri-gpu", "/home/ann/nri-gpu", "/tmp/nri-gpu"])
def test_a_program_that_the_units_hide(tmp_path: Path, folder: str) -> None:
    with pytest.raises(CommandError, match=r"so they cannot start .*: install below /opt") as refused:
        starts(f"{folder}/bin/nri-gpu", tmp_path)
    assert refused.value.code == Exit.UNAVAILABLE


@pytest.mark.parametrize("part", ["python", "code"])
def test_a_part_of_the_program_that_the_units_hide(tmp_path: Path, part: str) -> None:
    """As an interpreter of uv's or pyenv's, or the checkout that an environment below /opt has installed."""
    parts = {"python": PYTHON, "code": CODE, part: Path("/root/nri-gpu")}
    with pytest.raises(CommandError, match=r"the units hide /root, so they cannot start /root/nri-gpu"):
        starts("/opt/nri-gpu/bin/nri-gpu", tmp_path, **parts)


def test_a_link_that_another_user_can_lead_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leads to is root's today, and what the user likes once the unit is there."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    (ours / "bin").mkdir(parents=True)
    (ours / "bin/nri-gpu").touch()
    theirs.mkdir()
    (theirs / "env").symlink_to(ours)
    (tmp_path / "opt").symlink_to("theirs/env")
    installation = Installation(tmp_path / "opt/bin/nri-gpu", OURS.parent, PYTHON, ours, ())
    monkeypatch.setattr("nri_gpu.enable.installation.why_untrusted", trusts_all_but(theirs))
    assert installation.why_unsafe() == f"{theirs}: another user's"


@pytest.mark.parametrize("part", ["code/nri_gpu/a.py", "libraries/msgspec/a.py", "units/nri-gpu.service", "python"])
def test_a_file_that_another_user_can_write_in_folders_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    file = tmp_path / part
    for each in (tmp_path / "code", tmp_path / "libraries", tmp_path / "units", file.parent):
        each.mkdir(parents=True, exist_ok=True)
    program, python = tmp_path / "program", tmp_path / "python"
    for path in (program, python, file):
        path.touch()
    (tmp_path / "code/old").symlink_to("nowhere")
    installation = Installation(program, tmp_path / "units", python, tmp_path / "code", (tmp_path / "libraries",))
    monkeypatch.setattr("nri_gpu.enable.installation.why_untrusted", trusts_all_but())
    assert installation.why_unsafe() == ""
    monkeypatch.setattr("nri_gpu.enable.installation.why_untrusted", trusts_all_but(file))
    assert installation.why_unsafe() == f"{file}: another user's"


def trusts_all_but(*theirs: Path) -> Callable[[os.stat_result, Path], str]:
    """As `why_untrusted`, which would find pytest's folders below /tmp at fault."""
    return lambda _, path: "another user's" if path in theirs else ""


def test_links_in_a_circle(tmp_path: Path) -> None:
    program = tmp_path / "nri-gpu"
    program.symlink_to(program)
    assert Installation(program, OURS.parent).why_unsafe() == f"{program}: Too many levels of symbolic links"


def test_an_installation_that_others_can_change(tmp_path: Path) -> None:
    program = tmp_path / "nri-gpu"
    ours = Installation(program, OURS.parent)
    assert ours.why_unsafe() == f"{program}: no such file"
    program.touch(0o666)
    program.chmod(0o666)
    assert ours.why_unsafe().startswith(f"{program}: owner ")
    assert Installation(program).why_unsafe() == ""  # a package's is dpkg's to look after


def test_a_copy_is_known_until_it_is_changed() -> None:
    made = UnitFile.made("[Service]\n")
    assert made.ours
    assert not UnitFile(made.text + "User=x\n").ours
    assert not UnitFile("[Service]\n").ours
    assert not UnitFile(target="/dev/null").ours  # masked
