"""The GPU that a given device is, by each form of name that plugins, drivers and CDI have for it."""

from __future__ import annotations

import pytest

from nri_gpu.observe.given import GivenDevice
from nri_gpu.observe.resolve import NONE, resolved, resolved_cdi
from tests.support import builders as make
from tests.support.daemon import UUIDS
from tests.support.former_plugin import ANSWERS

# Two GPUs whose minors run against their indices (7, 6), the second in MIG mode; its first part is instance 7.
NODE = make.inventory([make.gpu(0), make.mig_gpu(1)])
GPU, MIG_GPU = make.uuid(0), make.uuid(1)
FIRST, SECOND = make.mig_uuid(1, 0), make.mig_uuid(1, 1)
CLAIM = "8c5e0f3a-1111-4222-8333-0123456789ab"


@pytest.mark.parametrize(
    ("id_", "found"),
    [
        (GPU, {GPU}),
        (f"{GPU}::3", {GPU}),  # a replica of NVIDIA's device plugin
        (f"{GPU}-7", {GPU}),  # of HAMi's
        (FIRST, {FIRST}),
        (f"{SECOND}::0", {SECOND}),
        ("0", {GPU}),
        ("1:1", {SECOND}),
        ("0::2", {GPU}),
        ("/dev/nvidia7", {GPU}),  # its minor, not its index
        ("nvidia7/vgpu0", {GPU}),  # GKE's
        ("nvidia6/gi8", {SECOND}),
        ("nvidia6/gi8/vgpu2", {SECOND}),
        ("nvidia6/gi99", NONE),
        ("/dev/nvidia0", NONE),
        ("9", NONE),
        (make.uuid(3), NONE),
        ("GPU-", NONE),
        ("0000:3b:00.0", NONE),
        ("99999999999999999999", NONE),
    ],
)
def test_the_id_of_a_device_plugin(id_: str, found: frozenset[str]) -> None:
    assert resolved(GivenDevice(resource="nvidia.com/gpu", id=id_), NODE) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nvidia.com/gpu=0", {GPU}),
        ("nvidia.com/gpu=1:0", {FIRST}),
        (f"nvidia.com/gpu={GPU}", {GPU}),
        (f"nvidia.com/mig={SECOND}", {SECOND}),
        ("nvidia.com/gpu=all", {GPU, MIG_GPU, FIRST, SECOND}),
        ("management.nvidia.com/gpu=all", {GPU, MIG_GPU, FIRST, SECOND}),
        (f"k8s.device-plugin.nvidia.com/gpu={GPU}", {GPU}),
        ("k8s.gpu.nvidia.com/device=gpu-7", {GPU}),
        (f"k8s.gpu.nvidia.com/claim={CLAIM}-gpu-7", {GPU}),
        (f"k8s.gpu.nvidia.com/claim={CLAIM}-gpu-6-mig-1g5gb-19-0", {FIRST, SECOND}),  # of unknown place
        (f"example.com/thing={GPU}", {GPU}),
        ("example.com/gpu=0", NONE),  # whose numbers these are is not known
        ("nvidia.com/imex-channel=0", NONE),
        ("nvidia.com.example.org/gpu=0", NONE),
        ("nvidia.com/gpu", NONE),
        ("", NONE),
    ],
)
def test_a_qualified_cdi_name(name: str, found: frozenset[str]) -> None:
    assert resolved_cdi(name, NODE) == found


@pytest.mark.parametrize("name", ANSWERS)
def test_what_nvidias_device_plugin_really_answers(name: str) -> None:
    """Whatever it is told to name devices by, and however it hands them over."""
    recorded = ANSWERS[name]
    node = make.inventory([make.gpu(index, uuid=uuid) for index, uuid in enumerate(UUIDS)])
    ids = {id_.partition("::")[0] for id_ in recorded.ids}
    assert NONE.union(*(resolved(GivenDevice(id=each), node) for each in recorded.ids)) == ids
    annotated = (name for text in recorded.answer.annotations.values() for name in text.split(","))
    names = [*(each.name for each in recorded.answer.cdi_devices), *annotated]
    assert not names or NONE.union(*(resolved_cdi(each, node) for each in names)) == ids


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (GivenDevice(driver="gpu.nvidia.com", device="gpu-7"), {GPU}),
        (GivenDevice(driver="gpu.nvidia.com", device="gpu-0", cdi=("k8s.gpu.nvidia.com/device=gpu-0",)), NONE),
        (GivenDevice(driver="gpu.example.com", device="gpu-7"), NONE),  # its numbers are its own
        (GivenDevice(driver="gpu.example.com", device="x", cdi=(f"nvidia.com/gpu={GPU}", "nvidia.com/gpu=1")), None),
        (GivenDevice(driver="dra.net", device="eth1"), NONE),
    ],
)
def test_the_device_of_a_claim(device: GivenDevice, found: frozenset[str] | None) -> None:
    assert resolved(device, NODE) == ({GPU, MIG_GPU} if found is None else found)
