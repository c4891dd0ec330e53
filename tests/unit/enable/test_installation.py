"""The installation that runs: what its units may start, and who else could change that."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.enable.features import FEATURES, SERVICE
from nri_gpu.enable.installation import Installation, exec_word, running_installation
from nri_gpu.enable.unit_plan import UnitFile
from tests.support import systemd_analyze
from tests.support.unit_file import OURS

CDI: Final = "/etc/systemd/system/nri-gpu-cdi.service"


def starts(program: str, root: Path) -> str:
    """The line by which the copied unit starts the program."""
    file = Installation(Path(program), OURS.parent).wanted(FEATURES["cdi"], SERVICE, root)[CDI]
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
    "program", ["/srv/a\nUser=x/nri-gpu", '/srv/"/nri-gpu', "/srv/$HOME/nri-gpu", r"/srv/\x/nri-gpu"]
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
