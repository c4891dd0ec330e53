"""Lists of the reference that are written by hand: each has what the code has, and no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from nri_gpu.domain.names import CONTROL_SOCKET
from tests.support.daemon import Launch, NriGpu
from tests.support.waiting import wait_for

ROOT: Final = Path(__file__).parents[3]
CODE: Final = ROOT / "nri_gpu"
FILES: Final = ROOT / "docs" / "reference" / "files.md"
# `environ.get("X"`, `environment["X"]`, `"X" in os.environ`. What is set for a library of ours is not read by us.
READ: Final = re.compile(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z_]+)"|"([A-Z_]+)" in os\.environ')


def names(section: str) -> set[str]:
    """What the first column of a section's table has between backquotes."""
    text = FILES.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {
        name for line in text.splitlines() if line.startswith("| `") for name in re.findall("`([^`]+)`", cell(line))
    }


def cell(line: str) -> str:
    return line.split("|")[1]


def test_it_has_each_variable_that_is_read() -> None:
    found = {a or b for path in CODE.rglob("*.py") for a, b in READ.findall(path.read_text())}
    assert names("Environment") == found


def test_it_has_each_file_of_a_running_daemon_and_none_that_the_code_does_not_name(tmp_path: Path) -> None:
    listed = names("State folder")
    code = "".join(path.read_text() for path in CODE.rglob("*.py"))
    assert not [name for name in listed if f'"{name}"' not in code]
    launch = Launch(tmp_path / "d", tmp_path / "nri.sock")
    with NriGpu(launch):
        wait_for("the audit log", lambda: (launch.state / "audit.jsonl").exists(), 20)
        found = {path.name for path in launch.state.iterdir()}
    assert CONTROL_SOCKET in found
    assert found <= listed


def test_each_other_path_is_one_of_the_code() -> None:
    """By the constant part before what differs; a file in a folder that the policy names by that folder."""
    code = "".join(path.read_text() for path in CODE.rglob("*.py"))
    constant = [re.split("[<*]", name)[0] for name in names("Other files")]
    assert constant
    assert not [path for path in constant if f'"{path}"' not in code and f'"{path.rpartition("/")[0]}"' not in code]


def test_each_schema_is_in_the_table_of_json() -> None:
    page = FILES.read_text()
    schemas = {path.stem for path in (ROOT / "api" / "schemas").glob("*.json")}
    assert set(re.findall(r"\[([a-z-]+)\]\(\.\./\.\./api/schemas/\1\.json\)", page)) == schemas
