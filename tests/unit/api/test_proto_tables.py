"""Holds api/*.proto and what is generated of them against tables and bytes that were not made from them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

from nri_gpu._pb import deviceplugin_pb2, nri_pb2, pluginregistration_pb2, podresources_pb2, ttrpc_pb2

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "wire"
PROTO = ROOT / "api" / "nri.proto"
FIRST = "0.2.0"
FILE = nri_pb2.DESCRIPTOR
KUBELET = {
    "deviceplugin": deviceplugin_pb2.DESCRIPTOR,
    "pluginregistration": pluginregistration_pb2.DESCRIPTOR,
    "podresources": podresources_pb2.DESCRIPTOR,
}


def rows(kind: str, table: str = "nri") -> Iterator[tuple[str, str, list[str]]]:
    """Name, since, items of each line of this kind."""
    for line in (FIXTURES / f"{table}-fields.txt").read_text().splitlines():
        if line.startswith(kind + " "):
            head, body = line.removeprefix(kind + " ").split(":", 1)
            name, _, since = head.partition(" ^")
            yield name, since or FIRST, [item.strip() for item in body.split(";") if item.strip()]


def methods(file: FileDescriptor) -> set[tuple[str, str, str, str]]:
    return {
        (service.name, method.name, method.input_type.name, method.output_type.name)
        for service in file.services_by_name.values()
        for method in service.methods
    }


def split_since(item: str, inherited: str) -> tuple[str, str]:
    text, _, since = item.partition(" ^")
    return text, since or inherited


def expected_fields() -> set[tuple[str, int, str, str]]:
    fields = set()
    for message, since, items in rows("message"):
        for item in items:
            number, name, kind = split_since(item, since)[0].split(" ", 2)
            fields.add((message, int(number), name, kind))
    return fields


def expected_values() -> set[tuple[str, int, str]]:
    values = set()
    for enum, since, items in rows("enum"):
        for item in items:
            number, name = split_since(item, since)[0].split("=")
            values.add((enum, int(number), name))
    return values


def local_name(descriptor: Descriptor | EnumDescriptor) -> str:
    return str(descriptor.full_name).removeprefix("nri.pkg.api.v1alpha1.")


SCALARS = {3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}  # FieldDescriptor


def type_name(field: FieldDescriptor) -> str:
    message, enum = field.message_type, field.enum_type
    if message is not None and message.GetOptions().map_entry:
        key, value = (type_name(message.fields_by_name[part]) for part in ("key", "value"))
        return f"map<{key},{value}>"
    named = message or enum
    base = named.name if named is not None else SCALARS[field.type]
    return f"rep {base}" if field.is_repeated else base


def enums() -> Iterator[EnumDescriptor]:
    yield from FILE.enum_types_by_name.values()
    for message in FILE.message_types_by_name.values():
        yield from message.enum_types


def test_every_field_has_the_number_and_type_of_the_table() -> None:
    found = {
        (local_name(message), field.number, field.name, type_name(field))
        for message in FILE.message_types_by_name.values()
        for field in message.fields
    }
    assert found == expected_fields()


def test_every_message_is_in_the_table_and_no_other() -> None:
    assert set(FILE.message_types_by_name) == {name for name, _, _ in rows("message")}


def test_every_enum_value_has_the_number_of_the_table() -> None:
    assert {(local_name(enum), v.number, v.name) for enum in enums() for v in enum.values} == expected_values()


def test_every_method_takes_and_gives_what_the_table_says() -> None:
    assert methods(FILE) == {(name, *item.split()) for name, _, items in rows("service") for item in items}


def declared_since() -> dict[tuple[str, str], str]:
    """What the comments of the .proto say, by message or enum and member."""
    since: dict[tuple[str, str], str] = {}
    scopes: list[str] = []
    member = re.compile(r"\s*(?:[\w<>, ]+ )?(\w+) = \d+;(.*)")
    for line in PROTO.read_text().splitlines():
        if opened := re.match(r"\s*(?:message|enum|service) (\w+) \{(\})?", line):
            if not opened[2]:
                scopes.append(opened[1])
        elif line.strip() == "}":
            scopes.pop()
        elif found := member.match(line):
            said = re.search(r"since (\d+\.\d+\.\d+)$", found[2])
            since[".".join(scopes), found[1]] = said[1] if said else FIRST
    return since


def test_every_since_is_the_one_of_the_table() -> None:
    expected = {}
    for message, inherited, items in rows("message"):
        for item in items:
            text, since = split_since(item, inherited)
            expected[message, text.split(" ", 2)[1]] = since
    for enum, inherited, items in rows("enum"):
        for item in items:
            text, since = split_since(item, inherited)
            expected[enum, text.split("=")[1]] = since
    assert declared_since() == expected


def test_envelopes_have_ttrpcs_numbers() -> None:
    file = ttrpc_pb2.DESCRIPTOR
    found = {m.name: [(f.number, type_name(f)) for f in m.fields] for m in file.message_types_by_name.values()}
    assert found == {
        "Request": [(1, "string"), (2, "string"), (3, "bytes"), (4, "int64"), (5, "rep KeyValue")],
        "Response": [(1, "Status"), (2, "bytes")],
        "KeyValue": [(1, "string"), (2, "string")],
        "Status": [(1, "int32"), (2, "string"), (3, "rep Any")],
        "Any": [(1, "string"), (2, "bytes")],
    }


def test_no_import_travels_with_the_protocol() -> None:
    assert [len(file.dependencies) for file in (FILE, ttrpc_pb2.DESCRIPTOR)] == [0, 0]


@pytest.mark.parametrize("name", KUBELET)
def test_the_kubelets_apis_are_those_of_the_table(name: str) -> None:
    file = KUBELET[name]
    found = {
        (message.name, field.number, field.name, type_name(field))
        for message in file.message_types_by_name.values()
        for field in message.fields
    }
    expected, messages, services = set(), set(), set()
    for full, _, items in rows("message", "kubelet"):
        if full.startswith(f"{name}."):
            messages.add(message := full.removeprefix(f"{name}."))
            # "!": we have no such field.
            numbered = (item.split(" ", 2) for item in items)
            expected |= {(message, int(number), field, kind) for number, field, kind in numbered if field[-1] != "!"}
    for full, _, items in rows("service", "kubelet"):
        if full.startswith(f"{name}."):
            services |= {(full.removeprefix(f"{name}."), *item.split()) for item in items}
    assert found == expected
    assert set(file.message_types_by_name) == messages
    assert methods(file) == services
    assert file.package == {"deviceplugin": "v1beta1", "podresources": "v1"}.get(name, name)


# Written by hand: a tag is the field's number times 8, plus 2 for text and messages, 0 for numbers; then its length.
BYTES: dict[str, tuple[Message, bytes]] = {
    "register": (
        deviceplugin_pb2.RegisterRequest(
            version="v1beta1",
            endpoint="a.sock",
            resource_name="n/g",
            options=deviceplugin_pb2.DevicePluginOptions(get_preferred_allocation_available=True),
        ),
        b"\x0a\x07v1beta1\x12\x06a.sock\x1a\x03n/g\x22\x02\x10\x01",
    ),
    "pre-start": (deviceplugin_pb2.DevicePluginOptions(pre_start_required=True), b"\x08\x01"),
    "list": (
        deviceplugin_pb2.ListAndWatchResponse(
            devices=[
                deviceplugin_pb2.Device(
                    ID="GPU-1",
                    health="Healthy",
                    topology=deviceplugin_pb2.TopologyInfo(nodes=[deviceplugin_pb2.NUMANode(ID=1)]),
                )
            ]
        ),
        b"\x0a\x16\x0a\x05GPU-1\x12\x07Healthy\x1a\x04\x0a\x02\x08\x01",
    ),
    "preferred": (
        deviceplugin_pb2.PreferredAllocationRequest(
            container_requests=[
                deviceplugin_pb2.ContainerPreferredAllocationRequest(
                    available_deviceIDs=["a", "b"], must_include_deviceIDs=["b"], allocation_size=2
                )
            ]
        ),
        b"\x0a\x0b\x0a\x01a\x0a\x01b\x12\x01b\x18\x02",
    ),
    "hint": (
        deviceplugin_pb2.PreferredAllocationResponse(
            container_responses=[deviceplugin_pb2.ContainerPreferredAllocationResponse(deviceIDs=["a", "b"])]
        ),
        b"\x0a\x06\x0a\x01a\x0a\x01b",
    ),
    "allocate": (
        deviceplugin_pb2.AllocateRequest(
            container_requests=[deviceplugin_pb2.ContainerAllocateRequest(devices_ids=["a"])]
        ),
        b"\x0a\x03\x0a\x01a",
    ),
    "answer": (
        deviceplugin_pb2.AllocateResponse(
            container_responses=[deviceplugin_pb2.ContainerAllocateResponse(annotations={"k": "v"})]
        ),
        b"\x0a\x08\x22\x06\x0a\x01k\x12\x01v",
    ),
    "info": (
        pluginregistration_pb2.PluginInfo(
            type="DevicePlugin", name="n/g", endpoint="/a", supported_versions=["v1beta1"]
        ),
        b"\x0a\x0cDevicePlugin\x12\x03n/g\x1a\x02/a\x22\x07v1beta1",
    ),
    "verdict": (pluginregistration_pb2.RegistrationStatus(plugin_registered=True, error="e"), b"\x08\x01\x12\x01e"),
}


@pytest.mark.parametrize(("message", "encoded"), BYTES.values(), ids=BYTES)
def test_bytes_written_by_hand_are_read_and_written(message: Message, encoded: bytes) -> None:
    assert message.SerializeToString(deterministic=True) == encoded
    assert type(message).FromString(encoded) == message


OTHERS = """
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
    done = subprocess.run([sys.executable, "-c", OTHERS], cwd=ROOT, check=False, timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert not [file.name for file in KUBELET.values() if file.name.rpartition("/")[2] == "api.proto"]


@pytest.mark.parametrize("name", ["nri_pb2.py", "ttrpc_pb2.py"])
def test_the_protobuf_floor_is_no_older_than_the_generator(name: str) -> None:
    made_with = re.search(r"Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", (ROOT / "nri_gpu/_pb" / name).read_text())
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floor = re.search(r"protobuf>=(\d+)\.(\d+)\.(\d+)", " ".join(dependencies))
    assert made_with and floor
    assert tuple(map(int, floor.groups())) >= tuple(map(int, made_with.groups()))
