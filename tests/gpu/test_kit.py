"""The kit for machines with a GPU, where there is none: it is whole, runs, and says in its report why no test ran."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.errors import Exit
from tests.gpu import kit, programs, report
from tests.gpu.report import Outcome, Report, Row
from tests.support.errors import HarnessError

HERE: Final = Path(__file__).parent
PYTHON: Final = f"3.{sys.version_info.minor}"
NO_DRIVER: Final = "no NVIDIA driver is loaded on this machine"
JUNIT: Final = """<testsuites><testsuite name="pytest">
<testcase classname="tests.gpu.test_real_gpu" name="test_a_cuda_program_computes" time="1.26">
  <properties><property name="found" value="vector add ok on NVIDIA H200" /></properties></testcase>
<testcase classname="tests.gpu.test_real_gpu" name="test_nvidia_smi_sees_what_was_granted" time="2">
  <failure message="AssertionError: assert 1 == 0&#10; where 1 = a | b">the traceback</failure></testcase>
<testcase classname="tests.gpu.test_mps" name="test_ten_and_thirty_gib_of_one_gpu" time="0.01">
  <skipped type="pytest.skip" message="MIG is off">where</skipped></testcase>
</testsuite></testsuites>"""
MACHINE: Final = {"GPUs": "1 x NVIDIA H200", "driver": "580.95.05"}


def made(*outcomes: Outcome) -> Report:
    return Report(report.SCHEMA, "2026-11-22", MACHINE, [Row(f"a {each} test", each, "", 0.1) for each in outcomes])


def run_kit(
    folder: Path, *arguments: str | Path, program: Path = HERE / "run_kit.py"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a GPU: `make test-gpu` is the test")
def test_the_kit_is_whole_and_says_that_there_is_no_driver(tmp_path: Path) -> None:
    # For one Python, and not packed: other wheels and xz cost a minute.
    tree = tmp_path / kit.NAME
    kit.lay_out(tree, [PYTHON])
    names = {str(each.relative_to(tree)) for each in tree.rglob("*") if each.is_file()}
    assert {f"checkout/{name}" for name in kit.tracked()} == {name for name in names if name.startswith("checkout/")}
    assert {f"programs/{name}" for name in programs.NAMES} <= names
    assert {"run.py", "cache/sid/containerd/usr/bin/containerd"} <= names

    done = run_kit(tmp_path, program=tree / "run.py")
    assert done.returncode == Exit.UNAVAILABLE, done.stderr
    assert "No module named" not in done.stderr  # of a process of nri-gpu's, which asks NVML
    found = json.loads((tmp_path / "build" / "real-gpu.json").read_text())
    assert {(row["outcome"], row["said"]) for row in found["rows"]} == {("skipped", NO_DRIVER)}
    assert (found["machine"]["GPUs"], found["machine"]["containerd"][:2]) == ("none", "2.")
    assert "| a cuda program computes | skipped |" in done.stdout
    assert (tmp_path / "build" / "real-gpu.md").read_text() in done.stdout


def test_a_kit_is_packed_and_unpacked(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "wheels").mkdir(parents=True)
    (tree / "wheels" / "some-1-cp39-cp39-any.whl").write_bytes(b"")
    (tree / "run.py").write_text("")
    done = run_kit(tmp_path, kit.pack(tree, tmp_path / "dist"))
    assert (done.returncode, "the kit has wheels for Python 3.9, and this is" in done.stderr) == (
        Exit.UNAVAILABLE,
        True,
    )
    assert (tmp_path / "build" / "gpu-kit" / kit.NAME / "run.py").exists()
    python = f"cp3{sys.version_info.minor}"
    (tree / "wheels" / f"some-1-{python}-{python}-any.whl").write_bytes(b"")
    done = run_kit(tmp_path, kit.pack(tree, tmp_path / "dist"))
    assert done.returncode == Exit.UNAVAILABLE
    assert done.stderr.startswith("the kit's packages cannot be installed in "), done.stderr
    with pytest.raises(HarnessError, match="may have"):
        kit.pack(tree, tmp_path / "dist", max_bytes=100)
    assert not [*(tmp_path / "dist").iterdir()]


def test_what_is_no_kit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.tar.xz").write_text("text")
    (tmp_path / "run.py").write_bytes(random.Random(1).randbytes(1 << 20))
    with tarfile.open(tmp_path / "whole.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "run.py", "kit/run.py")
    packed = bytearray((tmp_path / "whole.tar.xz").read_bytes())
    packed[len(packed) // 2] ^= 1
    (tmp_path / "damaged.tar.xz").write_bytes(packed)
    (tmp_path / "short.tar.xz").write_bytes(packed[:-100])
    for name in ("missing.tar.xz", "text.tar.xz", "whole.tar.xz", "damaged.tar.xz", "short.tar.xz"):
        done = run_kit(tmp_path, tmp_path / name)
        assert (done.returncode, "is not a kit of `make gpu-kit`" in done.stderr) == (Exit.USAGE, True), done
    assert run_kit(tmp_path).returncode == Exit.USAGE


def test_a_report_has_a_row_for_each_test() -> None:
    rows = list(report.rows_of(JUNIT))
    assert [(row.test, row.outcome, row.said, row.took_s) for row in rows] == [
        ("a cuda program computes", "passed", "vector add ok on NVIDIA H200", 1.3),
        ("nvidia smi sees what was granted", "failed", "AssertionError: assert 1 == 0 where 1 = a | b", 2.0),
        ("ten and thirty gib of one gpu", "skipped", "MIG is off", 0.0),
    ]
    table = report.markdown(Report(report.SCHEMA, "2026-11-22", MACHINE, rows))
    assert table.startswith("Run on 2026-11-22: 1 passed, 1 failed, 1 skipped.\n")
    assert (
        "| nvidia smi sees what was granted | **failed** | 2 | AssertionError: assert 1 == 0 where 1 = a \\| b |"
        in table
    )
    assert "| ten and thirty gib of one gpu | skipped | 0 | MIG is off |" in table


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((Outcome.PASSED, Outcome.SKIPPED), Exit.OK),
        ((Outcome.PASSED, Outcome.FAILED), Exit.FINDING),
        ((Outcome.SKIPPED,), Exit.UNAVAILABLE),
        ((), Exit.UNAVAILABLE),
    ],
)
def test_the_exit_code_tells_whether_something_was_proven(outcomes: tuple[Outcome, ...], code: Exit) -> None:
    assert report.code_of(made(*outcomes)) is code


def test_a_report_that_is_brought_back_becomes_the_record(tmp_path: Path) -> None:
    brought, record, page = (tmp_path / name for name in ("brought.json", "record.json", "page.md"))
    page.write_text(report.PAGE.read_text())
    assert report.NONE_YET in report.rendered(page.read_text(), record)
    report.write(made(Outcome.PASSED, Outcome.FAILED), brought)
    report.take(brought, record, page)
    assert "| a failed test | **failed** | 0.1 |" in page.read_text()
    assert report.NONE_YET not in page.read_text()
    assert report.rendered(page.read_text(), record) == page.read_text()

    report.write(made(Outcome.SKIPPED), brought)
    with pytest.raises(ValueError, match="every test was skipped"):
        report.take(brought, record, page)
    brought.write_text('{"schema": "other/v1", "date": "", "machine": {}, "rows": []}')
    with pytest.raises(ValueError, match="has schema other/v1"):
        report.take(brought, record, page)
