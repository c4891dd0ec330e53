"""JSON Schemas of what the verbs print with `-o json`, made of the types that they print: api/schemas/<verb>.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import msgspec

from nri_gpu.blockers.blocker import BlockersReport
from nri_gpu.cli.check_command import CheckDocument
from nri_gpu.cli.driver_command import DriverDocument
from nri_gpu.cli.explain_command import ExplainDocument
from nri_gpu.cli.gpus_command import GpusDocument
from nri_gpu.cli.history_command import HistoryDocument
from nri_gpu.cli.prepare_command import PrepareDocument
from nri_gpu.cli.replay_command import ReplayDocument
from nri_gpu.cli.usage_command import UsageDocument
from nri_gpu.cli.watch import WatchLine
from nri_gpu.daemon.answers import DaemonStatus, ProcessesAnswer
from nri_gpu.doctor.examine import DoctorDocument
from nri_gpu.verify.container_report import Report
from tools.files import ROOT, Files

FOLDER: Final = ROOT / "api" / "schemas"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
# By the word in a document's `schema`, nri-gpu/WORD/v1: what is printed, one of these.
DOCUMENTS: Final[dict[str, tuple[object, ...]]] = {
    "blockers": (BlockersReport,),
    "check": (CheckDocument,),
    "doctor": (DoctorDocument,),
    "driver": (DriverDocument,),
    "explain": (ExplainDocument,),
    "gpus": (GpusDocument,),
    "history": (HistoryDocument,),
    "prepare": (PrepareDocument,),
    "processes": (ProcessesAnswer,),
    "replay": (ReplayDocument,),
    "status": (DaemonStatus,),
    "status-watch": (WatchLine[DaemonStatus],),
    "usage": (UsageDocument,),
    "verify": (Report,),
}
Schema = dict[str, object]


def schema_text(word: str) -> str:
    """Return the JSON Schema of one document, as its file has it."""
    kinds, parts = msgspec.json.schema_components(DOCUMENTS[word], ref_template="#/$defs/{name}")
    partly = {kind.__name__ for kind in _structs() if kind.__struct_config__.omit_defaults}
    for name, part in parts.items():
        _as_written(part, whole=name not in partly)
    schema = {"$schema": DIALECT, "title": f"nri-gpu/{word}/v1", "anyOf": [*kinds], "$defs": parts}
    return json.dumps(schema, indent=1) + "\n"


def _as_written(part: Schema, *, whole: bool) -> None:
    """Turn a schema for readers into one of what is written.

    Fields with a default are there, too, unless the type leaves them out (not whole). Readers must be ready for more:
    they are promised no bounds of what a report or a topology file may say.
    """
    if isinstance(text := part.get("description"), str):
        part["description"] = " ".join(text.split()).replace("None", "null")
    if part.get("additionalProperties") is False:
        del part["additionalProperties"]
    match part:
        case {"properties": dict(fields), "required": list(required)}:
            optional = {name for name, field in fields.items() if "default" not in field or not whole}
            part["required"] = [name for name in fields if name in required or name not in optional]
            for each in (one for field in fields.values() for one in (field, *field.get("anyOf", ()))):
                for bound in ("default", "minimum", "maximum"):
                    each.pop(bound, None)
                if each.get("pattern", "").startswith(r"\A"):  # a domain.bounds.Format, in Python's spelling
                    del each["pattern"], each["description"]


def _structs(kind: type[msgspec.Struct] = msgspec.Struct) -> Iterator[type[msgspec.Struct]]:
    """Yield every struct of this program."""
    for each in kind.__subclasses__():
        yield each
        yield from _structs(each)


def documents() -> Files:
    """Return all schemas."""
    return {FOLDER / f"{word}.json": schema_text(word) for word in DOCUMENTS}
