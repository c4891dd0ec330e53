"""The values of clauses, read from pieces of an annotation's value that know their position.

A GPU is named by NVML index, UUID or the beginning of one, or PCI bus id; a MIG device by both indices, UUID or the
beginning of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from nri_gpu.domain.bounds import PROFILE
from nri_gpu.domain.edits import CHANNEL_MAX, FORMER_EXTRAS, Extra, Extras
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import Capabilities, Capability, spelled
from nri_gpu.domain.gpu_request import (
    ArchSelector,
    Count,
    Devices,
    MemorySelector,
    MigProfile,
    MigProfiles,
    Mode,
    ModelSelector,
    Operator,
)
from nri_gpu.domain.mps import MIB, WHOLE_PERCENT, MpsLimits
from nri_gpu.domain.text import SIZE_UNITS, did_you_mean, quoted, shown

BLANKS: Final = " \t"
_KEY_SHOWN_MAX: Final = 90  # characters; a Kubernetes key of ours has at most 11 + 63


class Piece(NamedTuple):
    """A part of an annotation's value without the blanks around it.

    key: the annotation it stands in. at: 0-based offset into the value.
    """

    key: str
    text: str
    at: int

    def error(self, message: str) -> RequestError:
        """Return a fault at this very place."""
        return RequestError(shown_key(self.key), message, self.at)

    def cut(self, start: int, end: int | None = None) -> Piece:
        """Return the part from start to end, without the blanks around it."""
        raw = self.text[start:end]
        text = raw.lstrip(BLANKS)
        return Piece(self.key, text.rstrip(BLANKS), self.at + start + len(raw) - len(text))

    def split(self, separator: str) -> Iterator[Piece]:
        """Yield the parts between separators; an empty text has one empty part."""
        start = 0
        while (end := self.text.find(separator, start)) >= 0:
            yield self.cut(start, end)
            start = end + 1
        yield self.cut(start)


def shown_key(key: str) -> str:
    """Return an annotation's key, fit for a sentence: the pod's creator chose it."""
    return shown(key, _KEY_SHOWN_MAX)


def listed(words: Iterable[str]) -> str:
    """Return `a, b, c`, as it follows "known:"."""
    return ", ".join(words)


UUID_PREFIX: Final = "GPU-"
MIG_PREFIX: Final = "MIG-"
UUID_LENGTH: Final = 36
_UUID_DIGITS_MIN: Final = 4  # hexadecimal digits of a beginning; fewer would match by accident
_UUID_DASHES: Final = (8, 13, 18, 23)
_HEX: Final = frozenset("0123456789abcdef")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,2}")  # the kernel module has 248 minors
_MIG_INDEX: Final = re.compile(rf"(?:{_INDEX.pattern}):(?:0|[1-9][0-9]?)")  # a GPU has at most 8 MIG devices now
_BUS_ID: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_KNOWN: Final = "write an index (0), a UUID or its beginning (GPU-8f3a...) or a PCI bus id (0000:3b:00.0)"


def read_id(item: Piece) -> str:
    """Return the name of a GPU or a MIG device in the inventory's spelling.

    Raises: RequestError: it is none that we know.
    """
    text = item.text
    if text.isdecimal():
        if not _INDEX.fullmatch(text):
            raise item.error(f"{quoted(text)} is not an index: write it without leading zeros, at most 999")
        return text
    for prefix in (UUID_PREFIX, MIG_PREFIX):
        if text.startswith(prefix):
            return _uuid(item, prefix)
    if text.replace(":", "", 1).isdecimal():
        if not _MIG_INDEX.fullmatch(text):
            how = "write the GPU's index and the MIG device's, such as 0:1"
            raise item.error(f"{quoted(text)} is not a MIG device: {how}")
        return text
    if not _BUS_ID.fullmatch(text.lower()):
        raise item.error(_why(text))
    return spelled(text)


def _uuid(item: Piece, prefix: str) -> str:
    digits = item.text[len(prefix) :].lower()
    if prefix == MIG_PREFIX and digits.startswith("gpu-"):
        raise item.error(f"{quoted(item.text)} is a MIG name of drivers before 470: write 0:1, or MIG- and a UUID")
    shaped = all((char == "-") if at in _UUID_DASHES else (char in _HEX) for at, char in enumerate(digits))
    if not shaped or len(digits) > UUID_LENGTH:
        raise item.error(f"{quoted(item.text)} is not a UUID: {prefix} and then 8-4-4-4-12 hexadecimal digits")
    if len(digits) < _UUID_DIGITS_MIN:
        raise item.error(f"{quoted(item.text)} is too short: at least {_UUID_DIGITS_MIN} digits after {prefix}")
    return prefix + digits


def _why(text: str) -> str:
    """Say what is wrong with an unknown name, by what it probably means."""
    if not text:
        return f"a GPU is missing here: {_KNOWN}"
    if text in ("all", "none"):
        return f'"{text}" is not a GPU: write {text} by itself, without device='
    for prefix in (UUID_PREFIX, MIG_PREFIX):
        if text.lower().startswith(prefix.lower()):
            return f"{quoted(text)} is not a UUID: it begins with {prefix} in capitals"
    if text.count(":") == 1 and "." in text:
        return f"{quoted(text)} lacks the PCI domain: write 0000:{quoted(text)[1:-1]}"
    return f"{quoted(text)} does not name a GPU: {_KNOWN}"


COUNT_MAX: Final = 128  # GPUs; the largest machines hold 16, and a typing error should not pass
DEVICES_MAX: Final = COUNT_MAX
# A glob is compiled to a pattern that stays in a cache of the standard library: hostile ones must stay small.
GLOB_MAX: Final = 64  # characters; NVML's own limit for a name is 96, real ones stay below 50
MEMORY_MAX: Final = 10**18 - 1  # bytes
ARCH_MAX: Final = 99
_DIGITS_MAX: Final = 18
_SHARE_MAX: Final = 2**50  # bytes; more than any GPU has
_SHARE_EXAMPLES: Final = ("memory:10Gi", "threads:50")
_MODES: Final = tuple(each.value for each in Mode)
_CAPABILITIES: Final = tuple(each.value for each in Capability)
_EXTRAS: Final = tuple(each.value for each in Extra)
_SHOWN_EXTRAS: Final = tuple("imex:N" if each is Extra.IMEX else each.value for each in Extra)
# NVIDIA's own words for extras, in its variables and CDI classes.
_OTHER_NAMES: Final = {"mofed": Extra.RDMA, "infiniband": Extra.RDMA, "gdr": Extra.GDRCOPY, "imex-channel": Extra.IMEX}


def read_count(piece: Piece, _: Operator = Operator.EQUAL) -> Count:
    """Read `2`."""
    number = _decimal(piece.text)
    if number == 0:
        raise piece.error("0 GPUs are no request; to ask for no GPU on purpose write none")
    if number is None:
        raise piece.error(
            f"{quoted(piece.text)} is not a number of GPUs: write 1 to {COUNT_MAX} without sign or leading zeros"
        )
    if number > COUNT_MAX:
        raise piece.error(f"{number} GPUs are more than any machine has; at most {COUNT_MAX}")
    return Count(number)


def read_devices(piece: Piece, _: Operator) -> Devices:
    """Read `0,GPU-8f3a,0000:3b:00.0`."""
    ids: dict[str, Piece] = {}
    for item in piece.split(","):
        name = read_id(item)
        if name in ids:
            raise item.error(f"{quoted(item.text)} is named twice")
        ids[name] = item
        if len(ids) > DEVICES_MAX:
            raise item.error(f"at most {DEVICES_MAX} GPUs can be named")
    return Devices(tuple(ids))


def read_mig(piece: Piece, __: Operator) -> MigProfiles:
    """Read `1g.10gb:2,3g.40gb`."""
    profiles: dict[str, int] = {}
    for item in piece.split(","):
        profile, colon, _ = item.text.partition(":")
        profile = profile.rstrip(BLANKS)
        if not PROFILE.matches(profile):
            raise item.error(f"{quoted(profile)} is not a MIG profile: write one such as 1g.10gb (`nri-gpu gpus`)")
        if profile in profiles:
            raise item.error(f"{quoted(profile)} is named twice: write {profile}:2")
        profiles[profile] = read_count(item.cut(item.text.find(":") + 1)).gpus if colon else 1
        if sum(profiles.values()) > DEVICES_MAX:
            raise item.error(f"at most {DEVICES_MAX} MIG devices can be asked for")
    return MigProfiles(tuple(MigProfile(profile, devices) for profile, devices in profiles.items()))


def read_mode(piece: Piece, _: Operator) -> Mode:
    """Read `shared`."""
    if piece.text not in _MODES:
        raise piece.error(_unknown(piece.text, "a mode", _MODES))
    return Mode(piece.text)


def read_capabilities(piece: Piece, _: Operator) -> Capabilities:
    """Read `compute,utility`."""
    found: set[Capability] = set()
    for item in piece.split(","):
        if item.text not in _CAPABILITIES:
            raise item.error(_unknown(item.text, "a capability", _CAPABILITIES))
        if item.text in found:
            raise item.error(f"{quoted(item.text)} is named twice")
        found.add(Capability(item.text))
    return frozenset(found)


def read_extras(piece: Piece, _: Operator) -> Extras:
    """Read `rdma,gds,imex:0`: words, each once, and IMEX channels by number."""
    asked: set[Extra] = set()
    channels: set[int] = set()
    words = tuple(piece.split(","))
    for item in (each for each in words if each.text not in FORMER_EXTRAS):
        extra, channel = _extra(item)
        if channel in channels or (channel is None and extra in asked):
            raise item.error(f"{quoted(item.text)} is named twice")
        asked.add(extra)
        if channel is not None:
            channels.add(channel)
    ignored = tuple(each for each in FORMER_EXTRAS if any(each == item.text for item in words))
    return Extras(frozenset(asked), tuple(sorted(channels)), ignored)


def _extra(item: Piece) -> tuple[Extra, int | None]:
    """Return the extra, and of IMEX which channel."""
    word, colon, number = item.text.partition(":")
    name = word.rstrip(BLANKS)
    if name not in _EXTRAS:
        raise item.error(_unknown(name, "an extra", _EXTRAS, _SHOWN_EXTRAS))
    if name == Extra.IMEX:
        channel = _decimal(number.lstrip(BLANKS))
        if channel is None or channel > CHANNEL_MAX:
            how = f"write imex:N, with N from 0 to {CHANNEL_MAX} without sign or leading zeros"
            raise item.error(f"{quoted(item.text)} names no IMEX channel: {how}")
        return Extra.IMEX, channel
    if colon:
        raise item.error(f'"{name}" takes no number: write {name} by itself')
    return Extra(name), None


def _unknown(name: str, what: str, words: Iterable[str], written: Iterable[str] = ()) -> str:
    """Say why a word is not in a list. what: `a mode`. written: how the words of the list are written."""
    known = listed(written or words)
    if not name:
        return f"{what} is missing here, known: {known}"
    if name == "all":
        return f'"all" is not accepted, because it would mean more with each version: name {known}'
    hint = f' (did you mean "{_OTHER_NAMES[name]}"?)' if name in _OTHER_NAMES else did_you_mean(name, words)
    return f"unknown {what.partition(' ')[2]} {quoted(name)}, known: {known}{hint}"


def read_sharing(piece: Piece, _: Operator) -> MpsLimits:
    """Read `memory:10Gi,threads:50`."""
    found: dict[str, int] = {}
    for item in piece.split(","):
        start = item.text.find(":")
        name = item.cut(0, start).text if start >= 0 else item.text
        if name not in _SHARES:
            raise item.error(_unknown(name, "a share", _SHARES, _SHARE_EXAMPLES))
        if start < 0:
            raise item.error(f'"{name}" needs a value, such as in {listed(_SHARE_EXAMPLES)}')
        if name in found:
            raise item.error(f"{quoted(name)} is named twice")
        found[name] = _SHARES[name](item.cut(start + 1))
    return MpsLimits(found.get("memory", 0), found.get("threads", 0))


def _memory_share(piece: Piece) -> int:
    number, unit = _decimal(piece.text[:-2]), piece.text[-2:]
    if not number or unit not in ("Ki", "Mi", "Gi"):
        raise piece.error(f"{quoted(piece.text)} is not a share of memory: write a whole number with Ki, Mi or Gi")
    size = number * SIZE_UNITS[unit]
    if not MIB <= size <= _SHARE_MAX or size % MIB:
        raise piece.error(
            f"{quoted(piece.text)} is not a whole number of Mi that a GPU could have: write one, 1Mi or more"
        )
    return size // MIB


def _threads_share(piece: Piece) -> int:
    number = _decimal(piece.text)
    if number is None or not 1 <= number <= WHOLE_PERCENT:
        raise piece.error(
            f"{quoted(piece.text)} is not a share of threads: write a percentage from 1 to {WHOLE_PERCENT}"
        )
    return number


_SHARES: Final[Mapping[str, Callable[[Piece], int]]] = {"memory": _memory_share, "threads": _threads_share}


def read_model(piece: Piece, _: Operator) -> ModelSelector:
    """Read `*H100*`."""
    if "," in piece.text:
        raise piece.cut(piece.text.find(",")).error("one glob only: several models are not supported by this version")
    if len(piece.text) > GLOB_MAX:
        raise piece.error(f"a glob of {len(piece.text)} characters is over the limit of {GLOB_MAX}")
    return ModelSelector(piece.text)


def read_memory(piece: Piece, operator: Operator) -> MemorySelector:
    """Read `40Gi`, `80G`, or bytes."""
    digits = len(piece.text) - len(piece.text.lstrip("0123456789"))
    number, unit = _decimal(piece.text[:digits]), SIZE_UNITS.get(piece.text[digits:])
    if number is None or unit is None:
        raise piece.error(
            f"{quoted(piece.text)} is not a size: write a whole number of bytes, or one with "
            f"{listed(name for name in SIZE_UNITS if name)} right behind it, such as 40Gi"
        )
    if number * unit > MEMORY_MAX:
        raise piece.error(f"{quoted(piece.text)} is more memory than any GPU has")
    return MemorySelector(operator, number * unit)


def read_arch(piece: Piece, operator: Operator) -> ArchSelector:
    """Read `9.0`."""
    left, _, right = piece.text.partition(".")
    major, minor = _decimal(left), _decimal(right)
    if major is None or minor is None or max(major, minor) > ARCH_MAX:
        raise piece.error(
            f"{quoted(piece.text)} is not a compute capability: write major.minor, such as 8.0 (A100) or 9.0 (H100)"
        )
    return ArchSelector(operator, (major, minor))


def _decimal(text: str) -> int | None:
    """Read a number written the one way we take: ASCII digits, no sign, no leading zeros; else return None."""
    plain = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return int(text) if plain and (text == "0" or text[0] != "0") else None
