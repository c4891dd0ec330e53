"""The quick starts for clusters, without one: the shell runs, the chart takes the values, what is applied is valid."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pages

ROOT = pages.FOLDER.parents[1]


@pytest.mark.parametrize("page", ["kubernetes", "dra"])
def test_what_they_install_and_apply_is_valid(page: str, tmp_path: Path) -> None:
    for name, command in {"kubectl": 'kubectl_check "$@"', "helm": 'helm_cli "$@" | kubectl apply -f -'}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\nset -o pipefail\n{sys.executable} -m tests.support.{command}\n")
        program.chmod(0o755)

    def shell(script: str) -> str:
        return subprocess.run(
            ["bash", "-c", f"cd {tmp_path}\n{script}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
            timeout=120,
        ).stdout

    pages.follow(pages.FOLDER / f"{page}.md", shell, compare=False)
