"""The documents of a YAML file that anybody may have written, within bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from nri_gpu.domain.errors import CommandError, Exit

if TYPE_CHECKING:
    import yaml

BYTES_MAX: Final = 16_000_000
PODS_MAX: Final = 2_000
CONTAINERS_MAX: Final = 10_000
_MORE: Final = re.compile(r"\S")
_DEPTH_MAX: Final = 200  # PyYAML goes down into libyaml's values by recursion, and crashes some thousand levels deep
_MERGED_MAX: Final = 1_000_000  # keys that `<<` copies: copies of copies grow without an end
# Plain scalars that are text to Kubernetes: 2026-11-01, and the `=` in the enumerations of CustomResourceDefinitions.
_TEXT: Final = frozenset({"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"})
_MERGE: Final = "tag:yaml.org,2002:merge"


def read_documents(text: str, file: str, *, typed: bool = True) -> list[object]:
    """Return the values of the file's documents, without empty ones. Raises: CommandError.

    typed: false if all scalars of YAML are text, as where only fields of text are read.
    """
    if len(text) > BYTES_MAX:
        raise too_large(file)
    if text.lstrip()[:1] == "{" and (documents := _json(text)):
        return documents
    import yaml  # only this verb needs it

    loader = _loader(typed)
    try:
        _check(iter(loader(text).get_event, None), file)
        documents = [document for document in yaml.load_all(text, loader) if document is not None]
    except CommandError:
        raise
    except Exception as error:  # PyYAML lets through what its constructors raise: KeyError for `!!bool x`
        raise CommandError(Exit.CONFIGURATION, f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not documents:
        raise CommandError(Exit.CONFIGURATION, f"{file} is empty")
    return documents


def too_large(file: str) -> CommandError:
    return CommandError(
        Exit.CONFIGURATION, f"{file} is larger than {BYTES_MAX // 10**6} MB, the most that is read: split it"
    )


def too_many(file: str, what: str) -> CommandError:
    """Return the refusal of a file with too many things. what: `2,000 pods`."""
    return CommandError(Exit.CONFIGURATION, f"{file} holds more than {what}, the most that are explained: split it")


def _json(text: str) -> list[object]:
    """Return the values of JSON documents that follow each other, or none if it is no JSON or too deep.

    kubectl reads them so, too. YAML knows other escapes, and takes far longer.
    """
    documents: list[Any] = []
    decoder, end = json.JSONDecoder(), 0
    try:
        while begun := _MORE.search(text, end):
            _, end = decoder.raw_decode(text, begun.start())
            documents.append(msgspec.json.decode(text[begun.start() : end]))
    except (ValueError, RecursionError):
        return []
    level = documents
    for _ in range(_DEPTH_MAX):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in inner for value in values]
    return [] if level else documents


def _check(events: Iterable[yaml.Event], file: str) -> None:
    """Check before values are made, which takes ten times as long. Raises: CommandError: too deep, or too many pods."""
    import yaml

    depth = pods = 0
    before = ""
    for event in events:
        kind = type(event)
        if isinstance(event, yaml.ScalarEvent):  # first, since most are
            before = event.value
            continue
        if kind is yaml.SequenceStartEvent or kind is yaml.MappingStartEvent:
            depth += 1
            pods += kind is yaml.SequenceStartEvent and before == "containers"
        elif kind is yaml.SequenceEndEvent or kind is yaml.MappingEndEvent:
            depth -= 1
        if depth > _DEPTH_MAX:
            raise CommandError(Exit.CONFIGURATION, f"{file} nests values more than {_DEPTH_MAX} levels deep")
        if pods > PODS_MAX:
            raise too_many(file, f"{PODS_MAX:,} pods")
        before = ""


def _loader(typed: bool) -> type[yaml.SafeLoader]:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML can be built without libyaml

    class Loader(base):  # type: ignore[misc]
        merged = 0
        yaml_implicit_resolvers: Final = {
            first: [each for each in resolvers if (each[0] not in _TEXT if typed else each[0] == _MERGE)]
            for first, resolvers in base.yaml_implicit_resolvers.items()
        }

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            before = len(node.value)
            super().flatten_mapping(node)
            self.merged += max(0, len(node.value) - before)
            if self.merged > _MERGED_MAX:
                raise yaml.YAMLError(f"its merge keys (<<) copy more than {_MERGED_MAX:,} keys")

    return Loader
