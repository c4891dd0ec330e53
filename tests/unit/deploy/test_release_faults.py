"""A release that cannot be built: a sentence and exit code 1, no traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy import bundle, sbom


@pytest.mark.parametrize("time", ["yesterday", "-1", "1795384800.5"])
def test_a_time_that_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], time: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", time)
    assert sbom.main(["--output", str(tmp_path)]) == 1
    sentence = f"SOURCE_DATE_EPOCH is '{time}': give seconds since 1970, or unset it\n"
    assert (capsys.readouterr().err, list(tmp_path.iterdir())) == (sentence, [])


@pytest.mark.parametrize(
    ("program", "sentence"),
    [("no-rpmbuild", "no-rpmbuild is missing: install it\n"), ("false", "false failed with code 1\n")],
)
def test_a_program_that_is_missing_or_fails(capsys: pytest.CaptureFixture[str], program: str, sentence: str) -> None:
    def build() -> tuple[Path, ...]:
        subprocess.run([program], check=True)
        return ()

    assert bundle.tell(build) == 1
    assert capsys.readouterr() == ("", sentence)
