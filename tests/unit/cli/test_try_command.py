"""`nri-gpu try` as a command: what it needs, and what it says where that is missing."""

from __future__ import annotations

import pytest

from nri_gpu.cli.main import main
from nri_gpu.domain.errors import Exit


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), Exit.USAGE, "--pod"),
        (("--pod", "a", "--observers", "b=c"), Exit.USAGE, "--observers"),
        (("--pod", "a", "--place", "[]"), Exit.USAGE, "--place is no part of a pod's spec"),
        (("--pod", "a"), Exit.CONFIGURATION, "this is no pod with a service account"),
    ],
)
def test_it_says_what_it_lacks(
    options: tuple[str, ...],
    code: Exit,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["try", "--namespace", "ns", *options]) == code
    assert said in capsys.readouterr().err
