"""Holds api/nri.proto and what is generated of it against a table that was not made from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from nri_gpu._pb import nri_pb2, ttrpc_pb2

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "tests" / "fixtures" / "wire" / "nri-fields.txt"
PROTO = ROOT / "api" / "nri.proto"
FIRST = "0.2.0"

FILE = nri_pb2.DESCRIPTOR


def rows(kind: str) -> Iterator[tuple[str, str, list[str]]]:
    """Name, since, items of each line of this kind."""
    for line in TABLE.read_text().splitlines():
        if line.startswith(kind + " "):
            head, body = line.removeprefix(kind + " ").split(":", 1)
            name, _, since = head.partition(" ^")
            yield name, since or FIRST, [item.strip() for item in body.split(";") if item.strip()]


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
    found = {
        (service.name, method.name, method.input_type.name, method.output_type.name)
        for service in FILE.services_by_name.values()
        for method in service.methods
    }
    assert found == {(name, *item.split()) for name, _, items in rows("service") for item in items}


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
