"""The names that NVIDIA's DRA driver gives to devices, by the driver itself, as we read them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.prepared import prepared_uuids
from tests import ground
from tests.support import builders as make
from tests.support.driver_root import make_driver_root
from tests.support.nvidia_dra import SET
from tests.support.nvml import FakeFacts, FakeGpu, FakeMig, build_fake_nvml
from tests.support.waiting import wait_for

pytestmark = pytest.mark.ground(SET)

WITHIN_S = 20.0
ANNOUNCED = re.compile(r"About to announce device (\S+)")
# No API server: it has named its devices before it asks one.
KUBECONFIG = """
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
users: [{name: none, user: {}}]
current-context: none
"""


def announced(folder: Path, gpus: list[FakeGpu]) -> set[str]:
    """The names of the devices that the driver offers of these GPUs."""
    root = make_driver_root(folder / "root", layout="rhel")
    build_fake_nvml(root, gpus, lib_dir="usr/lib64")
    config, log = folder / "kubeconfig", folder / "log"
    config.write_text(KUBECONFIG)
    options = {
        "node-name": "node1",
        "image-name": "none",
        "kubeconfig": config,
        "cdi-root": folder / "cdi",
        "nvidia-driver-root": root,
        "container-driver-root": root,
        "nvidia-cdi-hook-path": "/none",
        "kubelet-registrar-directory-path": folder / "registry",
        "kubelet-plugins-directory-path": folder / "plugins",
        "v": 4,
    }
    (folder / "registry").mkdir()
    command = [str(ground.need(SET) / "gpu-kubelet-plugin"), *(f"--{name}={value}" for name, value in options.items())]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env={}) as driver:
        try:
            named = lambda: "Starting ResourceSlice informer" in log.read_text()  # noqa: E731
            wait_for("the driver to name its devices", named, WITHIN_S, lambda: log.read_text()[-2000:])
        finally:
            driver.kill()
    return set(ANNOUNCED.findall(log.read_text()))


def test_each_device_is_the_one_that_it_is_to_the_driver(folder: Path) -> None:
    """GPUs by minors that are not their indices, MIG devices by profile and placement."""
    uuids = [GpuUuid(f"MIG-{number}0000000-0000-5000-8000-000000000000") for number in range(3)]
    parts = (
        FakeMig(place=0, uuid=uuids[0], gi=9, start=4, profile="1g.10gb"),
        FakeMig(place=1, uuid=uuids[1], gi=7, start=6, profile="1g.10gb"),
        FakeMig(place=2, uuid=uuids[2], gi=1, start=0, slices=3, memory_mib=40192, profile="3g.40gb"),
    )
    fakes = [FakeGpu(minor=5, uuid=make.uuid(0), facts=FakeFacts())]
    fakes += [FakeGpu(minor=0, uuid=make.uuid(1), mig=(1, 1), facts=FakeFacts(), parts=parts)]
    mig = [make.mig(1, part.place, uuid=part.uuid, profile=part.profile, placement=part.start) for part in parts]
    known = make.inventory([make.gpu(0, minor_number=5), make.mig_gpu(1, minor_number=0, mig=tuple(mig))])

    found = {name: prepared_uuids(name, known) for name in announced(folder, fakes)}
    assert sorted(found.values(), key=sorted) == [{make.uuid(0)}, *({each} for each in uuids)], found
    assert found["gpu-5"] == {make.uuid(0)}
    assert {name for name, of in found.items() if of == {uuids[0]}} == {"gpu-0-mig-1g10gb-19-4"}
