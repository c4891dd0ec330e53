"""The chart rendered without Helm: the few constructs that its templates keep to, and an error for any other.

    {{ .Values.a.b }}   {{ .Release.Name }}   {{ .Chart.AppVersion }}   {{ "text" }}
    | quote   | default X   | toYaml   | nindent N   and in front: toYaml X
    {{ if X }} {{ if eq A B }} {{ if or A B }} {{ else }} {{ end }}, one inside another
    {{ if .Capabilities.APIVersions.Has "group/version/Kind" }}   whether the cluster has it
    {{ fail "text" }}   an installation refused, where it is shown
    a dash on either side of the braces eats blanks there

What these mean is read off Helm's documentation and Go's text/template; whatever is not in this list may mean something
else there, so it is refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from msgspec import Struct

CHART: Final = Path(__file__).parents[2] / "deploy" / "helm" / "nri-gpu"

_TAG: Final = re.compile(r"\{\{(-?)[ ]*(.*?)[ ]*(-?)\}\}")
_WORD: Final = re.compile(r'"[^"]*"|\S+')
_PATH: Final = re.compile(r"(?:\.[A-Za-z][A-Za-z0-9]*)+")


class ChartError(Exception):
    """A template uses what this renderer does not know, or a value that is not there."""


class RefusedError(Exception):
    """What a template's `fail` says, as `helm install` prints it."""


class Release(Struct, frozen=True):
    """What Helm knows of an installation. apis: of those that templates ask for, what the cluster has."""

    name: str = "nri-gpu"
    namespace: str = "nri-gpu"
    apis: frozenset[str] = frozenset({"admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"})


def values(**changed: object) -> dict[str, Any]:
    """The chart's defaults with tables merged over them, as `--set` and `-f` do."""
    return merged(_parsed((CHART / "values.yaml").read_text())[0], changed)


def render(given: Mapping[str, Any], release: Release | None = None) -> dict[str, str]:
    """Template's file name -> text, of every template that renders to something."""
    scope = scope_of(given, release)
    texts = {path.name: render_text(path.read_text(), scope) for path in sorted((CHART / "templates").iterdir())}
    return {name: text for name, text in texts.items() if text.strip()}


def scope_of(given: Mapping[str, Any], release: Release | None = None) -> dict[str, Any]:
    """What templates can name."""
    chosen = release or Release()
    (chart,) = _parsed((CHART / "Chart.yaml").read_text())
    return {
        "Values": given,
        "Release": {"Name": chosen.name, "Namespace": chosen.namespace, "Service": "Helm"},
        "Capabilities": {"APIVersions": chosen.apis},
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
    }


def documents(given: Mapping[str, Any], release: Release | None = None) -> list[dict[str, Any]]:
    """The same, parsed."""
    found = [each for text in render(given, release).values() for each in _parsed(text)]
    return [each for each in found if each]


def _parsed(text: str) -> list[Any]:
    """By libyaml, where PyYAML has it: hundreds of documents are read in one run of the tests."""
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def render_text(template: str, scope: Mapping[str, Any]) -> str:
    """One template. Raises: ChartError, RefusedError."""
    out: list[str] = []
    shown = [True]  # of the conditions around this place, the innermost last
    for text, action in _pieces(template):
        if all(shown):
            out.append(text)
        match action.split(" ", 1):
            case [""]:
                pass
            case ["if", condition]:
                shown.append(_condition(condition, scope) and all(shown))  # asked where it is not shown, too
            case ["fail", message]:
                said = _text(_operand(message, scope))
                if all(shown):
                    raise RefusedError(said)
            case ["else"] if len(shown) > 1:
                shown[-1] = not shown[-1] and all(shown[:-1])
            case ["end"] if len(shown) > 1:
                shown.pop()
            case _:
                value = _text(_pipeline(action, scope))  # where it is not shown, too: it may use what we do not know
                out.append(value if all(shown) else "")
    if len(shown) > 1:
        raise ChartError("an if without its end")
    return "".join(out)


def _pieces(template: str) -> Iterator[tuple[str, str]]:
    """Text, and the action behind it; the last has none."""
    place, trim = 0, False
    for tag in _TAG.finditer(template):
        text = template[place : tag.start()]
        text = text.lstrip() if trim else text
        yield (text.rstrip() if tag[1] else text), tag[2]
        place, trim = tag.end(), bool(tag[3])
    rest = template[place:]
    if "{{" in rest or "}}" in rest:
        raise ChartError(f"braces without a partner in {rest[:60]!r}")
    yield (rest.lstrip() if trim else rest), ""


def _condition(source: str, scope: Mapping[str, Any]) -> bool:
    match _WORD.findall(source):
        case ["eq", one, other]:
            return bool(_operand(one, scope) == _operand(other, scope))
        case [".Capabilities.APIVersions.Has", kind]:
            return _operand(kind, scope) in scope["Capabilities"]["APIVersions"]
        case ["or", *several]:
            return any([_operand(each, scope) for each in several])
        case _:
            return bool(_pipeline(source, scope))


def _pipeline(source: str, scope: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any value
    first, *stages = [_WORD.findall(stage) for stage in source.split("|")]
    match first:
        case ["toYaml", operand]:
            value: Any = _to_yaml(_operand(operand, scope))
        case [operand]:
            value = _operand(operand, scope)
        case _:
            raise ChartError(f"{source!r} is none of the expressions that this chart keeps to")
    for stage in stages:
        match stage:
            case ["quote"]:
                value = json.dumps(_text(value))
            case ["default", other]:
                value = value or _operand(other, scope)
            case ["toYaml"]:
                value = _to_yaml(value)
            case ["nindent", number]:
                pad = " " * int(number)
                value = f"\n{pad}" + _text(value).replace("\n", f"\n{pad}")
            case _:
                raise ChartError(f"{' '.join(stage)!r} is none of the functions that this chart keeps to")
    return value


def _operand(word: str, scope: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any value
    if word.startswith('"'):
        return word[1:-1]
    if not _PATH.fullmatch(word):
        raise ChartError(f"{word!r} is neither a text nor a path such as .Values.image.tag")
    found: Any = scope
    for key in word[1:].split("."):
        # Helm would go on with nothing; here every value that a template names must be in values.yaml.
        if not isinstance(found, Mapping) or key not in found:
            raise ChartError(f"{word} is not there")
        found = found[key]
    return found


def _text(value: object) -> str:
    """As Go prints it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int):
        raise ChartError(f"a {type(value).__name__} needs toYaml")
    return str(value)


def _to_yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=False, sort_keys=True, width=1 << 16)
    return text.removesuffix("...\n").rstrip("\n")


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm does it: an empty table changes nothing, and null takes a key out."""
    both = {key: merged(below[key], above[key]) for key in below.keys() & above.keys() if _tables(below, above, key)}
    return {key: value for key, value in {**below, **above, **both}.items() if value is not None}


def _tables(below: Mapping[str, Any], above: Mapping[str, Any], key: str) -> bool:
    return isinstance(below[key], Mapping) and isinstance(above[key], Mapping)
