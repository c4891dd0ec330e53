"""What may stand behind a clause's key: one reader per kind of value, each turning a piece into its part of a claim."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.claim import (
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
from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.domain.profile import MIG_PROFILE
from nri_gpu.request.ids import read_id
from nri_gpu.request.text import BLANKS, Piece, guess, listed, quoted

COUNT_MAX: Final = 128  # GPUs; the largest machines sold hold 16, and a slip of the finger should not pass
DEVICES_MAX: Final = COUNT_MAX
# A glob is compiled to a pattern that stays in a cache of the standard library: hostile ones must stay small.
GLOB_MAX: Final = 64  # characters; NVML's own limit for a name is 96, real ones stay below 50
MEMORY_MAX: Final = 10**18 - 1  # bytes
ARCH_MAX: Final = 99
_DIGITS_MAX: Final = 18

_SIZE_UNITS: Final = {
    "": 1,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
}


def read_count(piece: Piece, _: Operator = Operator.EQUAL) -> Count:
    """`2`."""
    number = _decimal(piece.text)
    if number == 0:
        raise piece.error("0 GPUs are no request; to ask for none on purpose write none")
    if number is None:
        raise piece.error(
            f"{quoted(piece.text)} is not a number of GPUs: write 1 to {COUNT_MAX} without sign or leading zeros"
        )
    if number > COUNT_MAX:
        raise piece.error(f"{number} GPUs are more than any machine has; at most {COUNT_MAX}")
    return Count(number)


def read_devices(piece: Piece, _: Operator) -> Devices:
    """`0,GPU-8f3a,0000:3b:00.0`."""
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
    """`1g.10gb:2,3g.40gb`."""
    profiles: dict[str, int] = {}
    for item in piece.split(","):
        profile, colon, _ = item.text.partition(":")
        profile = profile.rstrip(BLANKS)
        if not MIG_PROFILE.fullmatch(profile):
            raise item.error(f"{quoted(profile)} is not a MIG profile: write one such as 1g.10gb (`nri-gpu gpus`)")
        if profile in profiles:
            raise item.error(f"{quoted(profile)} is named twice: write {profile}:2")
        profiles[profile] = read_count(item.cut(item.text.find(":") + 1)).gpus if colon else 1
        if sum(profiles.values()) > DEVICES_MAX:
            raise item.error(f"at most {DEVICES_MAX} MIG devices can be asked for")
    return MigProfiles(tuple(MigProfile(profile, devices) for profile, devices in profiles.items()))


def read_mode(piece: Piece, _: Operator) -> Mode:
    """`shared`."""
    try:
        return Mode(piece.text)
    except ValueError:
        known = [mode.value for mode in Mode]
        message = f"unknown mode {quoted(piece.text)}, known: {listed(known)}{guess(piece.text, known)}"
        raise piece.error(message) from None


def read_capabilities(piece: Piece, _: Operator) -> Capabilities:
    """`compute,utility`."""
    found: set[Capability] = set()
    for item in piece.split(","):
        capability = _capability(item)
        if capability in found:
            raise item.error(f"{quoted(item.text)} is named twice")
        found.add(capability)
    return frozenset(found)


def _capability(item: Piece) -> Capability:
    known = [capability.value for capability in Capability]
    if not item.text:
        raise item.error(f"a capability is missing here, known: {listed(known)}")
    if item.text == "all":
        raise item.error(f'"all" is not accepted, because it would mean more with each version: name {listed(known)}')
    try:
        return Capability(item.text)
    except ValueError:
        message = f"unknown capability {quoted(item.text)}, known: {listed(known)}{guess(item.text, known)}"
        raise item.error(message) from None


def read_model(piece: Piece, _: Operator) -> ModelSelector:
    """`*H100*`."""
    if "," in piece.text:
        raise piece.cut(piece.text.find(",")).error("one glob only: several models are not supported by this version")
    if len(piece.text) > GLOB_MAX:
        raise piece.error(f"a glob of {len(piece.text)} characters is over the limit of {GLOB_MAX}")
    return ModelSelector(piece.text)


def read_memory(piece: Piece, operator: Operator) -> MemorySelector:
    """`40Gi`, `80G`, or bytes."""
    digits = len(piece.text) - len(piece.text.lstrip("0123456789"))
    number, unit = _decimal(piece.text[:digits]), _SIZE_UNITS.get(piece.text[digits:])
    if number is None or unit is None:
        raise piece.error(
            f"{quoted(piece.text)} is not a size: write a whole number of bytes, or one with "
            f"{listed(name for name in _SIZE_UNITS if name)} right behind it, such as 40Gi"
        )
    if number * unit > MEMORY_MAX:
        raise piece.error(f"{quoted(piece.text)} is more memory than any GPU has")
    return MemorySelector(operator, number * unit)


def read_arch(piece: Piece, operator: Operator) -> ArchSelector:
    """`9.0`."""
    left, _, right = piece.text.partition(".")
    major, minor = _decimal(left), _decimal(right)
    if major is None or minor is None or max(major, minor) > ARCH_MAX:
        raise piece.error(
            f"{quoted(piece.text)} is not a compute capability: write major.minor, such as 8.0 (A100) or 9.0 (H100)"
        )
    return ArchSelector(operator, (major, minor))


def _decimal(text: str) -> int | None:
    """A number written the one way we take: ASCII digits, no sign, no leading zeros."""
    plain = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return int(text) if plain and (text == "0" or text[0] != "0") else None
