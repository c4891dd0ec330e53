"""The declaration of settings: types and bounds as msgspec has them, and the form in the file if it differs.

Modules that declare settings do not postpone their annotations: they are read at every start.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase, translate
from functools import cache, reduce
from operator import or_
from types import NoneType
from typing import Annotated, Final, Literal, get_args, get_type_hints

from msgspec import NODEFAULT, UNSET, Meta, Struct, convert, defstruct, to_builtins
from msgspec.structs import fields, force_setattr

from nri_gpu.domain.edits import Extra
from nri_gpu.domain.text import SIZE_UNITS

_WILD: Final = frozenset("*?[")
SOCKET_PATH_MAX: Final = 107  # bytes: sun_path of a Unix socket holds 108 with its NUL (Linux: unix(7))
UNLIMITED: Final = 2**31  # stands for the word; more than any machine has of anything we count


class Globs(Struct, frozen=True):
    """Shell-style patterns in the operator's order; `*`, `?`, `[a-z]`, `[!a-z]`; whole names, case matters.

    They are compiled when a policy is read, so that no container waits for it.
    """

    patterns: tuple[str, ...]
    _literals: frozenset[str] = frozenset()
    _prefixes: tuple[str, ...] = ()  # `team-*` needs no regular expression, and thousands of rules may be of that kind
    _wild: re.Pattern[str] | None = None

    def __post_init__(self) -> None:
        wild = [pattern for pattern in self.patterns if not is_literal(pattern)]
        prefixes = tuple(pattern[:-1] for pattern in wild if pattern[-1] == "*" and is_literal(pattern[:-1]))
        force_setattr(self, "_literals", frozenset(filter(is_literal, self.patterns)))
        force_setattr(self, "_prefixes", prefixes)
        if len(wild) > len(prefixes):
            force_setattr(self, "_wild", re.compile("|".join(map(translate, wild))))

    def match(self, name: str) -> bool:
        if name in self._literals or (self._prefixes and name.startswith(self._prefixes)):
            return True
        return self._wild is not None and self._wild.match(name) is not None

    def first(self, name: str) -> int | None:
        """Return the index of the first pattern that matches, or None."""
        return next((index for index, each in enumerate(self.patterns) if fnmatchcase(name, each)), None)


def is_literal(pattern: str) -> bool:
    """Return whether a pattern can only match itself."""
    return _WILD.isdisjoint(pattern)


EVERYTHING: Final = Globs(("*",))
NOTHING: Final = Globs(())


def _builtin(value: object) -> object:
    return list(value) if isinstance(value, tuple) else to_builtins(value, order="sorted")


class Form(Struct, frozen=True):
    """The form of a setting in the file if it differs from the value; it stands in the setting's annotation."""

    type: object  # what msgspec checks
    read: Callable[..., object] = lambda value: value  # from that to the value
    write: Callable[..., object] = _builtin  # the inverse of `read`, for defaults


class Setting(Struct, frozen=True):
    """A key of a table of the file, as its class declares it."""

    key: str
    type: object  # msgspec's, with everything the declaration says
    form: Form
    default: object  # NODEFAULT if the key must be there, None if it may be left out
    help: str
    flag: str  # the command line option that overrides it, or empty

    @property
    def written_default(self) -> object:
        """Return the default as the file has it."""
        return self.form.write(self.default)

    def read(self, raw: object) -> object:
        """Return the value of a valid raw value."""
        return self.form.read(convert(raw, self.type))


@cache
def settings_of(cls: type) -> Mapping[str, Setting]:
    """Return the keys that a class declares, in its order."""
    hints = get_type_hints(cls, include_extras=True)
    return {each.name: _setting(each.name, hints[each.name], each.default) for each in fields(cls)}


def _setting(key: str, hint: object, default: object) -> Setting:
    of, *metadata, help_text = get_args(hint)  # Annotated
    form = next((each for each in metadata if isinstance(each, Form)), None) or _plain_form(of)
    bounds = (each for each in (*metadata, help_text) if isinstance(each, Meta))
    return Setting(key, Annotated[(form.type, *bounds)], form, default, help_text.description, help_text.extra["flag"])


def _plain_form(hint: object) -> Form:
    """Return the form of a plain setting. hint: a type, or that and None if the key may be left out."""
    types = [each for each in get_args(hint) if each is not NoneType] if NoneType in get_args(hint) else [hint]
    return Form(reduce(or_, types))


@cache
def table_of(cls: type, name: str, *, defaults: bool = False) -> type[Struct]:
    """Return the class as a strict table of the file, whose left-out keys are UNSET.

    defaults: the JSON Schema tells them.
    """
    keys: list[tuple[str, object] | tuple[str, object, object]] = []
    for field in settings_of(cls).values():
        default = Meta(extra_json_schema={"default": field.written_default} if defaults else {})
        required = field.default is NODEFAULT
        keys.append((field.key, field.type) if required else (field.key, Annotated[field.type, default], UNSET))
    return defstruct(name, keys, namespace={"__doc__": cls.__doc__}, kw_only=True, forbid_unknown_fields=True)


def given(cls: type, table: Struct) -> dict[str, object]:
    """Return the keys that a table has, with their values in our types."""
    each = ((key, field, getattr(table, key)) for key, field in settings_of(cls).items())
    return {key: field.form.read(value) for key, field, value in each if value is not UNSET}


def about(help_text: str, flag: str = "") -> Meta:
    """Describe a setting: the last word of its declaration."""
    return Meta(description=help_text, extra={"flag": flag})


_EMPTY: Final = {"empty": ": leave the key out to match everything"}


def text(pattern: str, rule: str, max_length: int) -> Meta:
    """Describe a string that a pattern matches as a whole. rule: the pattern in words."""
    # Not msgspec's own pattern: in a union with an array it makes msgspec 0.22 crash. `policy/document.py` checks it.
    rules = {"pattern": pattern, "rule": rule}
    return Meta(max_length=max_length, extra=rules, extra_json_schema={"pattern": f"^(?:{pattern})$"})


def unique(maximum: int, minimum: int | None = None) -> Meta:
    """Describe a list of different items, and how many."""
    return Meta(min_length=minimum, max_length=maximum, extra_json_schema={"uniqueItems": True})


def patterns(item: Meta) -> Form:
    """Declare a list, maybe empty, of shell-style patterns."""
    return Form(
        Annotated[tuple[Annotated[str, item], ...], unique(_PATTERNS_MAX)], Globs, lambda globs: list(globs.patterns)
    )


def pattern_or_more(item: Meta) -> Form:
    """Declare one shell-style pattern, or a list of at least one."""
    return Form(
        Annotated[str, item]
        | Annotated[tuple[Annotated[str, item], ...], unique(_PATTERNS_MAX, 1), Meta(extra=_EMPTY)],
        lambda raw: Globs((raw,) if isinstance(raw, str) else raw),
    )


def word_or_more(words: type[StrEnum]) -> Form:
    """Declare a word of a closed set, or a list of at least one."""
    return Form(
        words | Annotated[frozenset[words], Meta(min_length=1)],  # type: ignore[valid-type]
        lambda raw: raw if isinstance(raw, frozenset) else frozenset({raw}),
    )


def labels(key: Meta, value: Meta) -> Form:
    """Declare a table of label keys, each with a pattern for its value."""
    return Form(
        Annotated[dict[Annotated[str, key], Annotated[str, value]], Meta(min_length=1, max_length=16, extra=_EMPTY)],
        lambda table: tuple((name, Globs((pattern,))) for name, pattern in table.items()),
    )


def names(key: Meta, value: Meta, entry: str) -> Form:
    """Declare a table, maybe empty, of names. entry: what it maps to what, `resource = pool`."""
    bounds = Meta(max_length=16, extra={"entry": entry})
    return Form(
        Annotated[dict[Annotated[str, key], Annotated[str, value]], bounds], lambda table: (*table.items(),), dict
    )


def changes(cls: type) -> Form:
    """Declare a table that changes some keys of another table: kept as pairs of key and value."""
    return Form(table_of(cls, "changes"), lambda table: tuple(given(cls, table).items()))


def limit(minimum: int = 0) -> Form:
    """Declare a whole number from a minimum up, or the word `unlimited`."""
    return Form(
        Annotated[int, Meta(ge=minimum, le=100_000)] | Literal["unlimited"],
        lambda raw: UNLIMITED if raw == "unlimited" else raw,
        lambda value: "unlimited" if value == UNLIMITED else value,
    )


class Otherwise(StrEnum):
    """The fate of a container that asks and may not."""

    REFUSE = "refuse"
    IGNORE = "ignore"


_PATTERNS_MAX: Final = 256  # each is compiled when the file is read
NAME_PATTERN: Final = text(r"[!-~]+", "a pattern of printable ASCII without blanks", 253)
NAMESPACES: Final = patterns(NAME_PATTERN)
_POOL: Final = r"[A-Za-z0-9_.-]+"
POOL_NAME: Final = text(_POOL, "a pool's name: letters, digits and _ . -", 64)
POOL_OR_NONE: Final = text(rf"(?:{_POOL})?", "empty or the name of a [[pool]]", 64)
# All but imex, which takes a number.
_DEFAULT_EXTRAS = StrEnum("DefaultExtra", {each.name: each.value for each in Extra if each != Extra.IMEX})  # type: ignore[misc]
DEFAULT_EXTRAS: Final = Form(frozenset[_DEFAULT_EXTRAS], lambda words: frozenset(map(Extra, words)))

# Printable ASCII without blanks, because these paths are shown in refusals; no part of a path is "." or "..".
_PATH: Final = r"(?:/(?!\.\.?(?:/|$))[!-.0-~]+)+"
_RULE: Final = 'without blanks, "." or ".."'
SOCKET: Final = text(_PATH, f"an absolute path to a socket {_RULE}", SOCKET_PATH_MAX)
SOCKET_OR_NONE: Final = text(rf"|{_PATH}", "empty or an absolute path to a socket", SOCKET_PATH_MAX)
FILE_OR_NONE: Final = text(rf"|{_PATH}", f"empty or an absolute path {_RULE}", 1024)


def _folder(path: str) -> str:
    """Strip the slash in which paths of folders may end, as shells complete them."""
    return path.rstrip("/") or path[:1]


Folder = Annotated[str, text(rf"{_PATH}/?", f"an absolute path below / {_RULE}", 1024)]
FOLDER: Final = Form(Folder, _folder)
ANY_FOLDER: Final = Form(Annotated[str, text(rf"/|{_PATH}/?", f"an absolute path {_RULE}", 1024)], _folder)
FOLDER_OR_NONE: Final = Form(
    Annotated[str, text(rf"|{_PATH}/?", f"empty or an absolute path below / {_RULE}", 1024)], _folder
)
ROOT_OR_NONE: Final = Form(Annotated[str, text(rf"|/|{_PATH}/?", f"empty or an absolute path {_RULE}", 1024)], _folder)
FOLDERS: Final = Form(Annotated[tuple[Folder, ...], unique(16)], lambda paths: tuple(map(_folder, paths)))


def _bytes(size: str) -> int:
    number = size.rstrip("KMGTi")
    return int(number) * SIZE_UNITS[size[len(number) :]]


# Written as requests write them: `40Gi`, `80G`.
SIZE: Final = Form(Annotated[str, text(r"[1-9][0-9]{0,14}(?:[KMGT]i?)?", 'a size such as "40Gi"', 17)], _bytes)
