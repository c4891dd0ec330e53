"""Where what outlives a boot is kept, or why nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.policy.usage_settings import UsageSettings
from nri_gpu.records.kept_folder import kept_folder


def test_the_named_folder_else_the_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_folder(UsageSettings(dir=str(tmp_path))) == tmp_path
    assert kept_folder(UsageSettings(dir=str(tmp_path)), simulated=True) == tmp_path
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    assert kept_folder(UsageSettings()) == tmp_path


def test_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(setting: str = str(tmp_path), *, simulated: bool = False) -> str:
        return str(kept_folder(UsageSettings(dir=setting), simulated=simulated))

    assert 'usage.dir = "off"' in why("off")
    assert "simulated" in why("", simulated=True)
    assert "is missing" in why(str(tmp_path / "gone"))
    assert "cannot be looked at" in why(f"/{'x' * 300}")
    tmp_path.chmod(0o777)
    assert "users other than root can change it" in why()
    tmp_path.chmod(0o755)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert "no mount" in why("")
    assert why() == str(tmp_path)
