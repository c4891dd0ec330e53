"""Holds what verbs print with `-o json` against its published schema."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]  # it ships no types

SCHEMAS: Final = Path(__file__).parents[2] / "api" / "schemas"


def published(word: str) -> Any:  # noqa: ANN401 - parsed JSON
    return json.loads((SCHEMAS / f"{word}.json").read_text())


def conforming(document: Any) -> Any:  # noqa: ANN401 - parsed JSON
    """The document, which has exactly the fields of its schema. Raises: jsonschema.ValidationError."""
    _, word, version = document["schema"].split("/")
    assert version == "v1"
    _validator(word).validate(document)
    return document


@cache
def _validator(word: str) -> Any:  # noqa: ANN401 - it has no types
    return jsonschema.Draft202012Validator(_closed(published(word)))


def _closed(schema: Any) -> Any:  # noqa: ANN401 - a piece of a schema
    """The schema without room for fields that it does not name: readers allow more, but what we print is published."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(each) for key, each in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(schema.get("properties"), dict) else inner
