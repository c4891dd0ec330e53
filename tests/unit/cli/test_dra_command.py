"""`nri-gpu dra` as a command: what it needs, and what it says where that is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nri_gpu.domain.errors import Exit


def told(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    done = subprocess.run(
        [sys.executable, "-m", "nri_gpu", "dra", *arguments],
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
