"""PodResources asked by a child, of a real gRPC server, of servers that are none, and of nobody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from nri_gpu._pb import podresources_pb2 as pb
from nri_gpu.observe.given import NO_KUBELET, GivenDevice
from nri_gpu.observe.kubelet_devices import (
    CDI_MAX,
    DEVICES_MAX,
    LIST_BYTES_MAX,
    TEXT_MAX,
    given_devices,
    given_of,
    printed,
)
from tests.support import builders as make
from tests.support.podresources import PodResourcesServer

GPU = "nvidia.com/gpu"
NAMES = ("ml", "train", "main")


def answer(*devices: tuple[str, str], claims: tuple[pb.ClaimResource, ...] = ()) -> pb.ListPodResourcesResponse:
    """One container with these resources and ids, and with devices of one claim."""
    found = pb.ListPodResourcesResponse()
    container = found.pod_resources.add(namespace=NAMES[0], name=NAMES[1]).containers.add(name=NAMES[2])
    for resource, id_ in devices:
        container.devices.add(resource_name=resource, device_ids=[id_])
    container.dynamic_resources.add(claim_name="big", claim_namespace="ml", claim_resources=claims)
    return found


async def test_devices_of_plugins_and_of_claims_by_container(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.give("train", {"main": {GPU: [f"{make.uuid(0)}::3"]}, "side": {"example.com/nic": ["eth1"]}}, "ml")
        server.prepared["ml", "train"] = {"side": [("node1", "gpu-2")]}
        server.twice.add(("ml", "train"))  # the pod before it
        given = await given_devices(str(server.socket))
    assert (given.kubelet, given.fault, given.at is None) == (True, "", False)
    assert given.devices["ml", "train", "main"][0] == GivenDevice(resource=GPU, id=f"{make.uuid(0)}::3")
    assert given.devices["ml", "train", "side"][-1] == GivenDevice(
        driver="gpu.nvidia.com",
        pool="node1",
        device="gpu-2",
        claim="ml/theirs-0",
        cdi=("k8s.gpu.nvidia.com/claim=8c5e-gpu-2",),
    )


@pytest.mark.parametrize(
    ("resource", "id_", "kept"),
    [
        ("nvidia.com/gpu.shared", "0", True),
        ("nvidia.com/mig-1g.5gb", "0:1", True),
        ("example.org/a100", "GPU-1::0", True),  # renamed by the plugin's configuration
        ("cloud.example/accelerator", "nvidia0/gi1", True),
        ("nvidia.com/hostdev", "0000:3b:00.2", False),  # a network card
        ("nvidia.com/GA102GL_A10", "12", False),  # of a virtual machine: an IOMMU group
        ("example.com/nic", "eth0", False),
    ],
)
def test_only_devices_that_may_be_gpus_are_kept(resource: str, id_: str, kept: bool) -> None:
    expected = {NAMES: (GivenDevice(resource=resource, id=id_),)} if kept else {}
    assert given_of(printed(answer((resource, id_))), 1.0).devices == expected


def test_a_compute_domain_is_no_gpu_and_any_other_driver_may_be_one() -> None:
    drivers = ("compute-domain.nvidia.com", "gpu.example.com")
    claims = tuple(pb.ClaimResource(driver_name=each, device_name="a") for each in drivers)
    (device,) = given_of(printed(answer(claims=claims)), 1.0).devices[NAMES]
    assert device.by == "DRA driver gpu.example.com"


@pytest.mark.parametrize(
    "found",
    [
        answer((GPU, "GPU-" + "x" * TEXT_MAX)),
        answer(claims=(pb.ClaimResource(driver_name="a", cdi_devices=[pb.CDIDevice(name="x")] * (CDI_MAX + 1)),)),
        answer(*((GPU, f"GPU-{number}") for number in range(DEVICES_MAX + 1))),
    ],
)
def test_what_is_beyond_the_limits_is_counted_and_left_out(found: pb.ListPodResourcesResponse) -> None:
    given = given_of(printed(found), 1.0)
    assert "1 device" in given.fault
    assert len(given.devices.get(NAMES, ())) in (0, DEVICES_MAX)


def test_a_pods_many_devices_leave_room_for_other_pods() -> None:
    found = answer(*((GPU, f"GPU-{number}") for number in range(DEVICES_MAX + 1)))
    found.pod_resources.add(namespace="ml", name="small").containers.add(name="main").devices.add(
        resource_name=GPU, device_ids=["GPU-0"]
    )
    given = given_of(printed(found), 1.0)
    assert ("ml", "small", "main") in given.devices
    assert "2 devices" in given.fault


def test_devices_of_long_names_take_no_more_memory() -> None:
    ids = ("GPU-" + f"{number:08}" * (TEXT_MAX // 8 - 1) for number in range(DEVICES_MAX))
    assert len(printed(answer(*((GPU, each) for each in ids)))) <= LIST_BYTES_MAX + DEVICES_MAX


async def test_devices_that_are_left_out_are_a_fault_beside_the_others(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.give("train", {"main": {GPU: [make.uuid(0), "GPU-" + "x" * TEXT_MAX]}})
        given = await given_devices(str(server.socket))
    assert "1 device" in given.fault
    assert [each.id for each in given.devices["default", "train", "main"] if each.resource] == [make.uuid(0)]


async def test_without_a_socket_there_is_no_kubelet_and_no_fault(folder: Path) -> None:
    assert await given_devices("") == NO_KUBELET
    assert await given_devices(str(folder / "kubelet.sock")) == NO_KUBELET


async def test_a_file_that_is_no_socket_is_a_fault(folder: Path) -> None:
    (folder / "kubelet.sock").touch()
    given = await given_devices(str(folder / "kubelet.sock"))
    assert not given.kubelet
    assert "is no socket" in given.fault


async def test_a_path_that_cannot_be_looked_at_is_a_fault(folder: Path) -> None:
    assert (await given_devices(str(folder / ("x" * 300)))).fault


async def test_a_kubelet_that_is_down_is_a_fault(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "kubelet.sock"))
    given = await given_devices(str(folder / "kubelet.sock"))
    assert given.kubelet
    assert "does not answer" in given.fault


@contextlib.asynccontextmanager
async def serving(path: Path, text: bytes | None) -> AsyncIterator[str]:
    """Serve something that is no kubelet: text at once, or with None silence."""

    async def answer_with(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if text is not None:
                writer.write(text)
            else:
                await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(answer_with, path):
        yield str(path)


@pytest.mark.parametrize("text", [b"HTTP/1.1 200 OK\r\n\r\n", b"\xff" * 100_000, b"", None])
async def test_a_socket_of_something_else_is_a_fault(folder: Path, text: bytes | None) -> None:
    async with serving(folder / "kubelet.sock", text) as path, asyncio.timeout(10):
        given = await given_devices(path)
    assert given.kubelet
    assert "the kubelet does not answer at" in given.fault
    assert not given.devices


async def test_a_kubelet_that_hangs_is_a_fault_within_seconds(folder: Path) -> None:
    async with PodResourcesServer(folder) as server, asyncio.timeout(10):
        server.delay_s = 60.0
        assert "DEADLINE_EXCEEDED" in (await given_devices(str(server.socket))).fault


class _Flood(PodResourcesServer):
    async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> pb.ListPodResourcesResponse:  # noqa: ANN401
        del request, context
        return answer((GPU, "GPU-" + "x" * (50 << 20)))


async def test_an_answer_of_50_mib_is_a_fault(folder: Path) -> None:
    async with _Flood(folder) as server:
        given = await given_devices(str(server.socket))
    assert "RESOURCE_EXHAUSTED" in given.fault


async def test_a_refusal_is_told_without_control_characters(folder: Path) -> None:
    async with PodResourcesServer(folder) as server:
        server.fault = (grpc.StatusCode.UNAVAILABLE, "not\x1b[31m today")
        given = await given_devices(str(server.socket))
    assert "today" in given.fault
    assert given.fault.isprintable()
