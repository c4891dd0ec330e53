"""Holds the kubelet's two protocols against a table and against bytes that were not made from them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from nri_gpu._pb import deviceplugin_pb2 as pb
from nri_gpu._pb import pluginregistration_pb2 as watcher
from tests.unit.api.test_proto_tables import ROOT, type_name

TABLE = ROOT / "tests" / "fixtures" / "wire" / "kubelet-fields.txt"
FILES = {"deviceplugin": pb.DESCRIPTOR, "pluginregistration": watcher.DESCRIPTOR}
PACKAGES = {"deviceplugin": "v1beta1", "pluginregistration": "pluginregistration"}


def rows(kind: str) -> Iterator[tuple[str, str, list[str]]]:
    """File, name, items of each line of this kind."""
    for line in TABLE.read_text().splitlines():
        if line.startswith(kind + " "):
            head, _, body = line.removeprefix(kind + " ").partition(":")
            file, _, name = head.partition(".")
            yield file, name, [item.strip() for item in body.split(";") if item.strip()]


def messages() -> Iterator[tuple[str, Descriptor]]:
    for file, descriptor in FILES.items():
        for message in descriptor.message_types_by_name.values():
            yield file, message


def test_every_field_has_the_number_and_type_of_the_table() -> None:
    found = {(file, m.name, f.number, f.name, type_name(f)) for file, m in messages() for f in m.fields}
    expected = set()
    for file, message, items in rows("message"):
        for number, name, kind in (item.split(" ", 2) for item in items):
            if not name.endswith("!"):
                expected.add((file, message, int(number), name, kind))
    assert found == expected


def test_every_message_is_in_the_table_and_no_other() -> None:
    assert {(file, m.name) for file, m in messages()} == {(file, name) for file, name, _ in rows("message")}


def test_every_method_takes_and_gives_what_the_table_says() -> None:
    found = {
        (file, service.full_name, method.name, method.input_type.name, method.output_type.name)
        for file, descriptor in FILES.items()
        for service in descriptor.services_by_name.values()
        for method in service.methods
    }
    assert found == {
        (file, f"{PACKAGES[file]}.{name}", *item.split()) for file, name, items in rows("service") for item in items
    }


# Written by hand: a tag is the field's number times 8, plus 2 for text and messages, 0 for numbers; then its length.
BYTES: dict[str, tuple[Message, bytes]] = {
    "register": (
        pb.RegisterRequest(
            version="v1beta1",
            endpoint="a.sock",
            resource_name="n/g",
            options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
        ),
        b"\x0a\x07v1beta1\x12\x06a.sock\x1a\x03n/g\x22\x02\x10\x01",
    ),
    "pre-start": (pb.DevicePluginOptions(pre_start_required=True), b"\x08\x01"),
    "list": (
        pb.ListAndWatchResponse(
            devices=[pb.Device(ID="GPU-1", health="Healthy", topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=1)]))]
        ),
        b"\x0a\x16\x0a\x05GPU-1\x12\x07Healthy\x1a\x04\x0a\x02\x08\x01",
    ),
    "preferred": (
        pb.PreferredAllocationRequest(
            container_requests=[
                pb.ContainerPreferredAllocationRequest(
                    available_deviceIDs=["a", "b"], must_include_deviceIDs=["b"], allocation_size=2
                )
            ]
        ),
        b"\x0a\x0b\x0a\x01a\x0a\x01b\x12\x01b\x18\x02",
    ),
    "hint": (
        pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=["a", "b"])]
        ),
        b"\x0a\x06\x0a\x01a\x0a\x01b",
    ),
    "allocate": (
        pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["a"])]),
        b"\x0a\x03\x0a\x01a",
    ),
    "answer": (
        pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse(annotations={"k": "v"})]),
        b"\x0a\x08\x22\x06\x0a\x01k\x12\x01v",
    ),
    "info": (
        watcher.PluginInfo(type="DevicePlugin", name="n/g", endpoint="/a", supported_versions=["v1beta1"]),
        b"\x0a\x0cDevicePlugin\x12\x03n/g\x1a\x02/a\x22\x07v1beta1",
    ),
    "verdict": (watcher.RegistrationStatus(plugin_registered=True, error="e"), b"\x08\x01\x12\x01e"),
}


@pytest.mark.parametrize(("message", "encoded"), BYTES.values(), ids=BYTES)
def test_bytes_written_by_hand_are_read_and_written(message: Message, encoded: bytes) -> None:
    assert message.SerializeToString(deterministic=True) == encoded
    assert type(message).FromString(encoded) == message


BESIDE = """
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from nri_gpu._pb import cri_pb2, deviceplugin_pb2, nri_pb2, pluginregistration_pb2, ttrpc_pb2
for name, package in (("api.proto", "v1"), ("pkg/apis/podresources/v1/api.proto", "v1"), ("cri-api/api.proto", "v2")):
    file = FileDescriptorProto(name=name, package=package, syntax="proto3")
    file.message_type.add(name="List" + str(len(name)))
    descriptor_pool.Default().Add(file)
    descriptor_pool.Default().FindFileByName(name)
"""


def test_other_apis_of_the_kubelet_load_beside_ours() -> None:
    """Upstream calls each of them api.proto, and of one name a process has one: so none of ours is called so."""
    done = subprocess.run([sys.executable, "-c", BESIDE], cwd=ROOT, check=False, timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert not [file.name for file in FILES.values() if file.name.rpartition("/")[2] == "api.proto"]
