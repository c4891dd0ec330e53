"""The tables of a TOML file, and the line of each key: a small scanner, because the standard parser does not tell.

The scanner looks only for headings and keys and trusts nothing: what it cannot follow has no line, and never an error.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Final

from nri_gpu.domain.errors import Fault, PolicyError

_BARE: Final = r"[A-Za-z0-9_-]+"
_NAME: Final = rf"(?:{_BARE}|\"[^\"\\]*\"|'[^']*')"
_KEY: Final = rf"{_NAME}(?:[ \t]*\.[ \t]*{_NAME})*"
_NAMES: Final = re.compile(_NAME)
_HEADING: Final = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_KEY})[ \t]*\]")
_ASSIGNMENT: Final = re.compile(rf"[ \t]*({_KEY})[ \t]*=")
# The parts of a line that matter for where values end.
_TOKEN: Final = re.compile(r'"""|\'\'\'|"(?:[^"\\]|\\.)*"|\'[^\']*\'|#.*|[\[\]{}]|.')
_PLACE: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def read_toml(text: str, file: str) -> dict[str, object]:
    """Return the tables of a file's text. Raises: PolicyError: why it is no TOML, with the line."""
    if text.startswith("\ufeff"):
        message = "begins with a byte order mark, which TOML does not know: save it as UTF-8 without one"
        raise PolicyError((Fault(file, "", message, 1),))
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise PolicyError((Fault(file, "", "is nested too deeply"),)) from None
    except ValueError as error:  # TOMLDecodeError, and what int() says of a number with thousands of digits
        raise PolicyError((_syntax_fault(file, text, str(error)),)) from None


def _syntax_fault(file: str, text: str, message: str) -> Fault:
    place = _PLACE.search(message)
    sentence = _PLACE.sub("", message)
    line = text.count("\n") + 1 if place and place[1] is None else int(place[1]) if place else None
    shown = ascii(sentence)[1:-1][:200]
    return Fault(file, "", f"not TOML: {shown[:1].lower()}{shown[1:]}", line)


def key_lines(text: str) -> dict[str, int]:
    """Map key path to 1-based line: `plugin`, `plugin.socket`, and `rule[0].name` below the first `[[rule]]`.

    A list below a list counts for itself: `gpu[1].mig[0]` is the first below the second.
    """
    lines: dict[str, int] = {}
    tables: dict[str, int] = {}  # how often each [[heading]] was seen, by its path
    heading = ""
    depth, quotes = 0, ""
    for number, line in enumerate(text.split("\n"), 1):
        rest = line
        if not depth and not quotes:
            if found := _HEADING.match(line):
                heading = _heading(_path(found[2]), tables, many=found[1] == "[[")
                lines.setdefault(heading, number)
                continue
            if assigned := _ASSIGNMENT.match(line):
                path = _path(assigned[1])
                lines.setdefault(f"{heading}.{path}" if heading else path, number)
                rest = line[assigned.end() :]
        depth, quotes = _after(rest, depth, quotes)
    return lines


def line_of(lines: Mapping[str, int], path: str) -> int | None:
    """Return a key's own line, or that of the nearest thing around it, or None."""
    while path:
        if path in lines:
            return lines[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return None


def _heading(path: str, tables: dict[str, int], *, many: bool) -> str:
    """Return a heading with the number of each list of tables that it is in.

    many: it begins a table of the last list.
    """
    found = ""
    *above, last = path.split(".")
    for name in above:
        found = f"{found}.{name}" if found else name
        if found in tables:
            found = f"{found}[{tables[found]}]"
    found = f"{found}.{last}" if found else last
    if many:
        tables[found] = tables.get(found, -1) + 1
        found = f"{found}[{tables[found]}]"
    return found


def _path(key: str) -> str:
    """Return a dotted key without blanks and quotes."""
    return ".".join(name.strip("\"'") for name in _NAMES.findall(key))


def _after(line: str, depth: int, quotes: str) -> tuple[int, str]:
    """Return how many brackets are open at the end of a line, and which multi-line string."""
    at = 0
    while at < len(line):
        if quotes:
            end = _closing(line, quotes, at)
            if end < 0:
                return depth, quotes
            at, quotes = end, ""
            continue
        token = _TOKEN.match(line, at)
        if token is None:
            break
        at = token.end()
        match token[0]:
            case '"""' | "'''":
                quotes = token[0]
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth = max(depth - 1, 0)
    return depth, quotes


def _closing(line: str, quotes: str, at: int) -> int:
    """Return where a multi-line string ends on this line, past its quotes, or -1."""
    while (end := line.find(quotes, at)) >= 0:
        backslashes = len(line[at:end]) - len(line[at:end].rstrip("\\"))
        if quotes == "'''" or backslashes % 2 == 0:
            return end + len(quotes)
        at = end + 1
    return -1
