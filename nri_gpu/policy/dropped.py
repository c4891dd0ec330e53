"""Keys and words of policy files that an earlier version knew: they are read and ignored, for one release.

What is ignored here never lets more be granted: a key that would has to be a fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from nri_gpu.domain.edits import FORMER_EXTRAS

_STRAY: Final = "stray use is reported, and nothing is stopped for it"
_EXTRAS: Final = ("extras.allowed", "defaults.extras", "rule.extras", "rule.default_extras")
# Key path without indices, and behind `=` one word of its list -> what is the case now.
DROPPED: Final[Mapping[str, str]] = {
    "stray.action": _STRAY,
    "stray.namespaces": _STRAY,
    **{f"{path}={each}": f"{each} is no longer an extra" for path in _EXTRAS for each in FORMER_EXTRAS},
}
_INDEX: Final = re.compile(r"\[\d+\]")


def without_dropped(value: object, found: dict[str, str], path: str = "") -> object:
    """Return a raw policy, or the part of it at a key path, without what DROPPED names.

    found: gets the key path of each, and what is the case now.
    """
    if isinstance(value, Mapping):
        below = {key: f"{path}.{key}" if path else key for key in value}
        keys = [key for key in value if not _is_dropped(below[key], "", found)]
        return {key: without_dropped(value[key], found, below[key]) for key in keys}
    if isinstance(value, list):
        each = ((item, f"{path}[{index}]") for index, item in enumerate(value))
        return [without_dropped(item, found, at) for item, at in each if not _is_dropped(at, _word(item), found)]
    return value


def _word(item: object) -> str:
    return f"={item}" if isinstance(item, str) else "="


def _is_dropped(path: str, word: str, found: dict[str, str]) -> bool:
    why = DROPPED.get(_INDEX.sub("", path) + word)
    if why:
        found[path] = why
    return why is not None
