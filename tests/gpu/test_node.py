"""On a machine with an NVIDIA GPU: what `nri-gpu` says of the node is true, and an application's error harms nobody.

`make test-gpu`, as test_real_gpu.py.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.gpu.conftest import IMAGE, ON_GPU, Record
from tests.support.containerd import Containerd
from tests.support.daemon import NriGpu
from tests.support.schemas import conforming
from tests.support.waiting import wait_for

pytestmark = ON_GPU
EVENT_S = 30.0
# Of an application that stores where it may not: a page fault of the GPU, or an exception of its engine.
APPLICATION_XIDS = {13, 31}


def test_verify_finds_two_containers_with_what_they_were_granted(
    gpu_node: Containerd, real: NriGpu, whole: int, record: Record
) -> None:
    for name in ("one", "two"):
        gpu_node.cri.run_asking(f"device={whole}; mode=shared", name, image=IMAGE)
    real.wait_grants(2)
    done = real.verb("verify", "--containerd-state", str(gpu_node.base / "state"), "-o", "json")
    assert done.returncode == 0, done
    found = conforming(json.loads(done.stdout))["containers"]
    verdicts = {each["pod"]: each["verdict"] for each in found if each["gpu_uuids"]}
    assert list(verdicts.values()) == ["ok", "ok"], found
    record(f"{len(found)} containers, 2 ok")


def test_doctor_finds_no_error_in_driver_and_gpus(real: NriGpu, record: Record) -> None:
    """The rest is about what this machine has installed beside the driver."""
    document = conforming(json.loads(real.verb("doctor", "-o", "json").stdout))
    [found] = [section["findings"] for section in document["sections"] if section["name"] == "driver"]
    assert found
    assert [each for each in found if each["level"] == "error"] == []
    record("; ".join(f"{each['level']}: {each['subject']}" for each in found))


def test_an_xid_of_an_application_leaves_its_gpu_granted_and_healthy(
    gpu_node: Containerd, real: NriGpu, whole: int, record: Record
) -> None:
    container = gpu_node.cri.run_asking(f"device={whole}", "faulty", image=IMAGE)
    real.wait_grants(1)
    [[uuid]] = real.held().values()
    if "gpus=0" in real.wait_logged("listening for GPU errors", EVENT_S):
        pytest.skip("this driver reports no error events of this GPU")

    said = gpu_node.cri.execute(container, "/bin/bad_access", timeout_s=120)
    assert said.code == 0, said

    def xids() -> set[int]:
        lines = [line for line in real.log().splitlines() if "GPU event" in line and uuid in line]
        return {int(xid) for line in lines for xid in re.findall(r"xid=(\d+)", line)}

    wait_for("an application's XID", lambda: bool(xids() & APPLICATION_XIDS), EVENT_S, lambda: f"logged: {xids()}")
    [gpu] = [each for each in real.status()["gpus"] if each["uuid"] == uuid]
    assert (gpu["health"]["state"], list(real.held().values())) == ("healthy", [[uuid]])
    computed = gpu_node.cri.execute(container, "/bin/vector_add", timeout_s=120)
    assert computed.code == 0, computed
    record(f"{said.stdout.strip()}, XID {', '.join(map(str, sorted(xids())))}; then {computed.stdout.splitlines()[-1]}")
