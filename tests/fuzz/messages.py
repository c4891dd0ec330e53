"""Mutations that know protobuf: a field of a message is changed, added, doubled or dropped, as its descriptor says.

What is inside a field (a text, bytes) is libFuzzer's to change, which knows the pieces of the target and what the code
compared before.
"""

from __future__ import annotations

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

NUMBERS: Final = (0, 1, 2, 3, 7, 63, 195, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
TEXT_MAX: Final = 300  # bytes, of one text that is changed; repeating fields makes large messages
REPEATS: Final = (1, 1, 1, 2, 10, 300)
_SIGNED: Final = frozenset({FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64})
_BITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: 32,
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_INT64: 64,
    FieldDescriptor.CPPTYPE_UINT64: 64,
}


def mutated_bytes(data: bytes, bytes_max: int) -> bytes:
    """As libFuzzer changes bytes; only inside a run of it."""
    import atheris  # replaying the corpus does not need it

    return bytes(atheris.Mutate(data, bytes_max))


def changed(kind: type[Message], data: bytes, dice: random.Random) -> bytes:
    """The message with one to three fields changed; an empty one where it cannot be read."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        message = kind()
    for _ in range(dice.randint(1, 3)):
        _change(message, dice)
    return bytes(message.SerializeToString())


def _change(message: Message, dice: random.Random) -> None:
    fields: list[Any] = list(message.DESCRIPTOR.fields)  # of one of two classes, by protobuf's implementation
    if not fields:
        return
    present: list[Any] = [field for field, _ in message.ListFields()]
    field = dice.choice(present if present and dice.random() < 0.7 else fields)
    if dice.random() < 0.08:
        message.ClearField(field.name)
    elif field.message_type and field.message_type.GetOptions().map_entry:
        _change_map(getattr(message, field.name), field, dice)
    elif field.is_repeated:
        _change_list(getattr(message, field.name), field, dice)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
        _change(getattr(message, field.name), dice)
    else:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), dice))


def _change_list(values: Any, field: FieldDescriptor, dice: random.Random) -> None:  # noqa: ANN401 - protobuf's own
    if len(values) and dice.random() < 0.2:
        del values[dice.randrange(len(values))]
        return
    many = dice.choice(REPEATS) if dice.random() < 0.3 else 0
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if not len(values):
            values.add()
        one = values[dice.randrange(len(values))]
        _change(one, dice)
        for _ in range(many):
            values.add().CopyFrom(one)
    elif not len(values) or many:
        values.extend([_scalar(field, values[-1] if len(values) else _zero(field), dice)] * max(1, many))
    else:
        at = dice.randrange(len(values))
        values[at] = _scalar(field, values[at], dice)


def _change_map(values: Any, field: FieldDescriptor, dice: random.Random) -> None:  # noqa: ANN401 - protobuf's own
    assert field.message_type
    of_key, of_value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    known = sorted(values)
    key = (
        dice.choice(known)
        if known and dice.random() < 0.6
        else _scalar(of_key, dice.choice([*known, _zero(of_key)]), dice)
    )
    if key in values and dice.random() < 0.2:
        del values[key]
    elif of_value.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        _change(values[key], dice)
    else:
        values[key] = _scalar(of_value, values[key] if key in values else _zero(of_value), dice)


def _zero(field: FieldDescriptor) -> object:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"" if field.type == FieldDescriptor.TYPE_BYTES else ""
    return 0


def _scalar(field: FieldDescriptor, value: Any, dice: random.Random) -> Any:  # noqa: ANN401 - of the field's own type
    if field.type == FieldDescriptor.TYPE_BYTES:
        return mutated_bytes(value[:TEXT_MAX], TEXT_MAX)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return mutated_bytes(value.encode()[:TEXT_MAX], TEXT_MAX).decode(errors="ignore")
        case FieldDescriptor.CPPTYPE_BOOL:
            return not value
        case FieldDescriptor.CPPTYPE_ENUM:
            return dice.choice([*(field.enum_type.values_by_number if field.enum_type else ()), 99])
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return dice.choice((0.0, -1.0, 1e300, float("nan"), float("inf")))
        case kind:
            bits = _BITS[kind]
            number = dice.choice((*NUMBERS, int(value) + 1, int(value) - 1)) & (2**bits - 1)
            return number - 2**bits if kind in _SIGNED and number >> (bits - 1) else number
