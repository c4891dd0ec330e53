"""The schemas of what verbs print: made of today's types, one for each verb, and open to what is added."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest

from nri_gpu.cli.gpus_command import gpus_document
from nri_gpu.cli.main import VERBS
from nri_gpu.cli.page import json_text
from nri_gpu.inventory.topology_file import load_topology
from tests.support.daemon import TOPOLOGIES
from tests.support.schemas import SCHEMAS, conforming, published
from tools.schemas import DOCUMENTS, schema_text


def test_every_document_of_every_verb_has_one() -> None:
    forms = {verb.name: settings.get("choices") for verb in VERBS for flags, settings in verb.options if "-o" in flags}
    verbs = {name for name, choices in forms.items() if isinstance(choices, tuple) and "json" in choices}
    assert verbs | {"status-watch", "processes"} == DOCUMENTS.keys()
    assert {file.stem for file in SCHEMAS.glob("*.json")} == DOCUMENTS.keys()


@pytest.mark.parametrize("word", DOCUMENTS)
def test_it_is_a_schema_of_todays_types(word: str) -> None:
    schema = published(word)
    assert schema == json.loads(schema_text(word))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert all(part.get("description") for part in schema["$defs"].values())


@pytest.fixture
def document() -> Any:  # noqa: ANN401 - parsed JSON
    return json.loads(json_text(gpus_document(load_topology(TOPOLOGIES / "mig-a100.toml"))))


def without_one_field(value: Any, whole: Any) -> Iterator[Any]:  # noqa: ANN401 - parsed JSON
    """The whole, once without each of the fields of objects within a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from without_one_field(value[key], whole)
        if isinstance(value, dict):
            taken = value.pop(key)
            yield whole
            value[key] = taken


def test_every_field_is_promised(document: Any) -> None:  # noqa: ANN401 - parsed JSON
    validator = jsonschema.Draft202012Validator(published("gpus"))
    document["modules"] = {}
    cut = [validator.is_valid(each) for each in without_one_field(document, document)]
    assert (len(cut) > 200, any(cut)) == (True, False)
    assert conforming(document) is document


def test_fields_may_be_added(document: Any) -> None:  # noqa: ANN401 - parsed JSON
    for place in (document, document["majors"], document["gpus"][1]["mig"][0], document["links"][0]):
        place["of tomorrow"] = 1
    jsonschema.Draft202012Validator(published("gpus")).validate(document)
    with pytest.raises(jsonschema.ValidationError, match="of tomorrow"):
        conforming(document)  # what is printed today is published


@pytest.mark.parametrize(("field", "value"), [("index", "0"), ("minor_number", None), ("compute_mode", "off")])
def test_another_type_or_word_is_refused(document: Any, field: str, value: object) -> None:  # noqa: ANN401
    document["gpus"][0][field] = value
    with pytest.raises(jsonschema.ValidationError):
        conforming(document)
