"""`nri-gpu dra` as a command: what it needs, and what it says where that is missing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from nri_gpu.system.packages import PACKAGES

BLOCKED = "import sys; sys.modules[{!r}] = None; from nri_gpu.cli.main import main; sys.exit(main({!r}))"


def told(*arguments: str, without: str = "nothing") -> tuple[int, str]:
    """Exit code and standard error. without: a library that is not installed."""
    words = ["dra", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(without, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stderr


def test_outside_of_a_pod_it_asks_for_a_kubeconfig() -> None:
    code, said = told()
    assert code == Exit.CONFIGURATION
    assert said.startswith("nri-gpu: this is no pod with a service account")
    assert "--kubeconfig" in said


def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[]")
    code, said = told("--kubeconfig", str(config))
    assert code == Exit.CONFIGURATION
    assert f"{config} is no kubeconfig" in said


@pytest.mark.parametrize("library", ["grpc", "urllib3"])
def test_without_its_libraries_it_says_what_to_install(library: str) -> None:
    code, said = told(without=library)
    assert code == Exit.UNAVAILABLE
    assert library in said
    assert f"{shlex.quote(sys.executable)} -m pip install {PACKAGES[library]}" in said
    assert len(said.splitlines()) == 1
