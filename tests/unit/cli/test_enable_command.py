"""`nri-gpu enable` and `disable`: who may, where, and what they print about the policy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_gpu.cli import enable_command
from nri_gpu.cli.main import parse
from nri_gpu.domain.errors import Exit
from nri_gpu.enable.features import FEATURES
from tests.unit.cli.conftest import Done, NriGpuCall

VERBS = pytest.mark.parametrize("verb", ["enable", "disable"])


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it runs, and this process is a user's: no test changes this machine's units."""
    monkeypatch.setattr(enable_command, "SYSTEMD", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@VERBS
def test_in_a_pod(nri_gpu: NriGpuCall, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    sentence = "nri-gpu: a pod has no units: set the chart's values instead\n"
    assert nri_gpu(verb, "cdi") == Done(Exit.UNAVAILABLE, "", sentence)


@VERBS
def test_without_systemd(nri_gpu: NriGpuCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(enable_command, "SYSTEMD", tmp_path / "none")
    sentence = "nri-gpu: systemd does not run here, and the units are for it\n"
    assert nri_gpu(verb, "cdi", "--dry-run") == Done(Exit.UNAVAILABLE, "", sentence)


@VERBS
@pytest.mark.usefixtures("systemd")
def test_as_a_user(nri_gpu: NriGpuCall, verb: str) -> None:
    sentence = "nri-gpu: only root can change units; anybody can use --dry-run\n"
    assert nri_gpu(verb, "cdi") == Done(Exit.PERMISSION, "", sentence)


@pytest.mark.usefixtures("systemd")
def test_a_policy_with_a_fault_is_told_first(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[cdi\n")
    done = nri_gpu("enable", "cdi", "--dry-run", "--policy", str(policy))
    assert (done.code, done.out) == (Exit.CONFIGURATION, "")
    assert str(policy) in done.err


@pytest.mark.usefixtures("systemd")
@pytest.mark.parametrize(("text", "told"), [("", False), ("[dra]\nenabled = true\n", True)])
def test_disable_names_what_the_policy_still_has(nri_gpu: NriGpuCall, tmp_path: Path, text: str, *, told: bool) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(text)
    done = nri_gpu("disable", "dra", "--dry-run", "--policy", str(policy))
    assert done.code == Exit.OK
    assert done.out.startswith("nothing to do: dra is disabled\n")
    assert ("advice: the policy still has dra.enabled" in done.out) is told
    assert policy.read_text() == text


def test_every_feature_is_a_word_of_the_verbs() -> None:
    for name in FEATURES:
        assert parse("enable", name).feature == parse("disable", name).feature == name
