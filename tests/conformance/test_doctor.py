"""`nri-gpu doctor` beside a real containerd: it names the runtime that runs, and tells when NRI is off or gone."""

import json
import time
from typing import Any

import pytest

from tests.support.containerd import Containerd
from tests.support.daemon import NriGpu
from tests.support.schemas import conforming


def doctor(daemon: NriGpu) -> dict[str, dict[str, Any]]:
    """The findings by subject."""
    began = time.monotonic()
    done = daemon.verb("doctor", "-o", "json")
    assert time.monotonic() - began < 10  # it starts Python, beside a loaded runtime
    sections = conforming(json.loads(done.stdout))["sections"]
    return {each["subject"]: each for section in sections for each in section["findings"]}


@pytest.mark.short
def test_it_sees_the_runtime_and_the_registration(node: Containerd, daemon: NriGpu) -> None:
    node.cri.run_asking("device=1", "trainer")
    found = doctor(daemon)
    said = {subject: each["level"] for subject, each in found.items()}
    subjects = ("driver", "container runtime", "NRI", "NRI timeouts", "daemon", "registration", "Synchronize")
    assert {each: said[each] for each in subjects} == dict.fromkeys(subjects, "ok")
    version = daemon.status()["runtime"]["version"]
    assert f"containerd {version}, pid " in found["container runtime"]["meaning"]
    assert str(node.layout.base) in found["container runtime"]["meaning"]
    assert f"registered with containerd {version}" in found["registration"]["meaning"]
