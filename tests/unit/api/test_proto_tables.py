"""Holds api/*.proto and what is generated of them against tables that were not made from them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor, FileDescriptor

from nri_gpu._pb import deviceplugin_pb2, nri_pb2, pluginregistration_pb2, podresources_pb2, ttrpc_pb2

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "wire"
PROTO = ROOT / "api" / "nri.proto"
FIRST = "0.2.0"
FILES: dict[str, FileDescriptor] = {
    "nri": nri_pb2.DESCRIPTOR,
    "deviceplugin": deviceplugin_pb2.DESCRIPTOR,
    "pluginregistration": pluginregistration_pb2.DESCRIPTOR,
    "podresources": podresources_pb2.DESCRIPTOR,
}
PACKAGES = {"nri": "nri.pkg.api.v1alpha1", "deviceplugin": "v1beta1", "podresources": "v1"}
SCALARS = {3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}  # FieldDescriptor


def rows(kind: str, api: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Of each line of this kind its name, and its items with the release that each came with."""
    table, prefix = ("nri", "") if api == "nri" else ("kubelet", f"{api}.")
    for line in (FIXTURES / f"{table}-fields.txt").read_text().splitlines():
        if line.startswith(f"{kind} {prefix}"):
            head, body = line.removeprefix(f"{kind} {prefix}").split(":", 1)
            name, _, since = head.partition(" ^")
            items = (item.strip().partition(" ^") for item in body.split(";") if item.strip())
            yield name, [(text, own or since or FIRST) for text, _, own in items]


def type_name(field: FieldDescriptor) -> str:
    message, enum = field.message_type, field.enum_type
    if message is not None and message.GetOptions().map_entry:
        key, value = (type_name(message.fields_by_name[part]) for part in ("key", "value"))
        return f"map<{key},{value}>"
    named = message or enum
    base = named.name if named is not None else SCALARS[field.type]
    return f"rep {base}" if field.is_repeated else base


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in file.message_types_by_name.values():
        yield from message.enum_types


@pytest.mark.parametrize("api", FILES)
def test_each_api_is_that_of_the_table(api: str) -> None:
    file = FILES[api]
    assert (file.package, list(file.dependencies)) == (PACKAGES.get(api, api), [])
    assert set(file.message_types_by_name) == {name for name, _ in rows("message", api)}
    fields = {
        (message.name, str(field.number), field.name, type_name(field))
        for message in file.message_types_by_name.values()
        for field in message.fields
    }
    # "!": we have no such field.
    listed = ((name, *item.split(" ", 2)) for name, items in rows("message", api) for item, _ in items)
    assert fields == {each for each in listed if not each[2].endswith("!")}
    values = {
        (enum.full_name.removeprefix(f"{file.package}."), f"{value.number}={value.name}")
        for enum in enums(file)
        for value in enum.values
    }
    assert values == {(name, item) for name, items in rows("enum", api) for item, _ in items}
    methods = {
        (service.name, f"{method.name} {method.input_type.name} {method.output_type.name}")
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods == {(name, item) for name, items in rows("service", api) for item, _ in items}


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
    fields = {(name, item.split(" ", 2)[1]): since for name, items in rows("message", "nri") for item, since in items}
    values = {(name, item.split("=")[1]): since for name, items in rows("enum", "nri") for item, since in items}
    assert declared_since() == fields | values


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
    assert not file.dependencies


OTHERS = """
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from nri_gpu._pb import cri_pb2, deviceplugin_pb2, nri_pb2, pluginregistration_pb2, podresources_pb2, ttrpc_pb2
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


@pytest.mark.parametrize("name", ["nri_pb2.py", "ttrpc_pb2.py"])
def test_the_protobuf_floor_is_no_older_than_the_generator(name: str) -> None:
    made_with = re.search(r"Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", (ROOT / "nri_gpu/_pb" / name).read_text())
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floor = re.search(r"protobuf>=(\d+)\.(\d+)\.(\d+)", " ".join(dependencies))
    assert made_with and floor
    assert tuple(map(int, floor.groups())) >= tuple(map(int, made_with.groups()))
