"""`make demo` and `make demo-faults` from beginning to end, and killed in the middle."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import film
from tests.support import cleanup
from tests.support.daemon import TOPOLOGIES
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

PROJECT = TOPOLOGIES.parents[1]
COMMAND = [sys.executable, "-u", "-m", "tests.demo"]
BASE = re.compile(rf"{re.escape(str(cleanup.PARENT))}/{re.escape(cleanup.PREFIX)}\w+")


def test_it_shows_the_picture_as_it_is_recorded() -> None:
    shown = film.demonstrated()
    text = "\n".join(shown.lines)
    assert shown.code == 0, text
    assert re.search(r"^0 .* shared +default/a .*\n +default/b ", text, re.MULTILINE)
    assert "Operation not permitted" in text
    assert "the same 3 as before" in text
    assert "never happen" not in text
    if "SIMULATION" in text:  # no real GPU is here, as where it was recorded
        made = film.film(shown.raw)
        if os.environ.get("NRI_GPU_GOLDENS") == "write":
            film.FILE.write_text(made)
        assert film.lasting(film.FILE.read_text()) == film.lasting(made), "run `make generate WHAT=pictures`"


def test_it_shows_what_becomes_of_containers_when_gpus_fail() -> None:
    command = [sys.executable, "-u", "-m", "tests.demo.faults"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (
        'log WARNING container stopped reason="its GPU is bad: GPU is lost',
        "pod patient runs, and has /dev/nvidia",
        "libcuda.so libcuda.so.1 libcuda.so.590.10",
        "crw-rw-rw- 1 root root 1520, 1",
    ):
        assert any(line in each for each in said), line
    before, after = (re.search(r"\d+$", line) for line in said if line.startswith("pod train runs"))
    assert before
    assert after
    assert before[0] != after[0]
    assert "-> nri-gpu [gpu-unavailable]: GPU " in done.stdout
    assert "never happen" not in done.stdout


def test_killed_in_the_middle_it_leaves_nothing() -> None:
    process = subprocess.Popen(COMMAND, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    base = ""
    for line in process.stdout:
        match = BASE.search(line)
        base = match[0] if match else base
        if "device cgroup allows" in line or "nvidia-smi" in line:  # containers are running
            break
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert base
    wait_for("everything of it to be gone", lambda: not _left(base), 30, lambda: "\n".join(_left(base)))


def _left(base: str) -> list[str]:
    """Its folder, its mounts, and processes that name it."""
    left = [base] if Path(base).exists() else []
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if base in line]
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = cmdline.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if base in text:
            left.append(text)
    return left
