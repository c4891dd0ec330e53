"""The values of clauses: names of GPUs and MIG devices, counts, profiles, modes, capabilities and selectors.

A GPU is named by NVML index, UUID or the beginning of one, or PCI bus id; a MIG device by both indices, UUID or the
beginning of one.
"""

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
from nri_gpu.domain.gpu import MIG_PROFILE, Capabilities, Capability
from nri_gpu.domain.text import did_you_mean, quoted
from nri_gpu.request.text import BLANKS, Piece, listed

INDEX_DIGITS_MAX: Final = 3  # the kernel module has 248 minors
UUID_PREFIX: Final = "GPU-"
MIG_PREFIX: Final = "MIG-"
MIG_INDEX_DIGITS_MAX: Final = 2  # a GPU has at most 8 MIG devices now
UUID_DIGITS_MIN: Final = 4  # hexadecimal digits of a beginning; fewer would match by accident

_HEX: Final = frozenset("0123456789abcdef")
_UUID_LENGTH: Final = 36
_UUID_DASHES: Final = (8, 13, 18, 23)
_LONG_DOMAIN: Final = 8  # hexadecimal digits, as NVML and nvidia-smi print it
_KNOWN: Final = "write an index (0), a UUID or its beginning (GPU-8f3a...) or a PCI bus id (0000:3b:00.0)"


def read_id(item: Piece) -> str:
    """One name of a GPU or a MIG device in the inventory's spelling.

    Raises:
        RequestError: it is none that we know.

    """
    text = item.text
    if text.isdecimal():
        return _index(item)
    for prefix in (UUID_PREFIX, MIG_PREFIX):
        if text.startswith(prefix):
            return _uuid(item, prefix)
    if text.replace(":", "", 1).isdecimal():
        return _mig_index(item)
    if ":" in text:
        return _bus_id(item)
    raise item.error(_why(text))


def _index(item: Piece) -> str:
    text = item.text
    if len(text) > INDEX_DIGITS_MAX or (text[0] == "0" and text != "0"):
        raise item.error(f"{quoted(text)} is not an index: write it without leading zeros, at most 999")
    return text


def _mig_index(item: Piece) -> str:
    gpu, _, device = item.text.partition(":")
    short = 0 < len(gpu) <= INDEX_DIGITS_MAX and 0 < len(device) <= MIG_INDEX_DIGITS_MAX
    if not short or any(index[0] == "0" and index != "0" for index in (gpu, device)):
        raise item.error(
            f"{quoted(item.text)} is not a MIG device: write the GPU's index and the MIG device's, such as 0:1"
        )
    return item.text


def _uuid(item: Piece, prefix: str) -> str:
    digits = item.text[len(prefix) :].lower()
    if prefix == MIG_PREFIX and digits.startswith("gpu-"):
        raise item.error(f"{quoted(item.text)} is a MIG name of drivers before 470: write 0:1, or MIG- and a UUID")
    shaped = all((char == "-") if at in _UUID_DASHES else (char in _HEX) for at, char in enumerate(digits))
    if not shaped or len(digits) > _UUID_LENGTH:
        raise item.error(f"{quoted(item.text)} is not a UUID: {prefix} and then 8-4-4-4-12 hexadecimal digits")
    if len(digits) < UUID_DIGITS_MIN:
        raise item.error(f"{quoted(item.text)} is too short: at least {UUID_DIGITS_MIN} digits after {prefix}")
    return prefix + digits


def _bus_id(item: Piece) -> str:
    """Lower case, the domain in four digits where it fits.

    Source: NVML prints eight digits of domain, the kernel four (Linux: Documentation/ABI, /sys/bus/pci/devices).
    """
    lower = item.text.lower()
    domain, _, place = lower.partition(":")
    bus, _, slot = place.partition(":")
    device, _, function = slot.partition(".")
    parts = (domain, bus, device, function)
    shaped = all(part and _HEX.issuperset(part) for part in parts)
    if not shaped or (len(bus), len(device), len(function)) != (2, 2, 1) or len(domain) not in (4, _LONG_DOMAIN):
        raise item.error(_why(item.text))
    return lower[4:] if len(domain) == _LONG_DOMAIN and domain.startswith("0000") else lower


def _why(text: str) -> str:
    """What is wrong with an unknown name, by what it probably means."""
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
        raise piece.error("0 GPUs are no request; to ask for no GPU on purpose write none")
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
        message = f"unknown mode {quoted(piece.text)}, known: {listed(known)}{did_you_mean(piece.text, known)}"
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
        message = f"unknown capability {quoted(item.text)}, known: {listed(known)}{did_you_mean(item.text, known)}"
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
