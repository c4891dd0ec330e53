"""How a GPU or a MIG device is named in a request. Only the spelling.

A GPU by NVML index, UUID or the beginning of one, PCI bus id; a MIG device by both indices, UUID or the beginning.
"""

from __future__ import annotations

from typing import Final

from nri_gpu.request.text import Piece, quoted

INDEX_DIGITS_MAX: Final = 3  # the kernel module has 248 minors
UUID_PREFIX: Final = "GPU-"
MIG_PREFIX: Final = "MIG-"
MIG_INDEX_DIGITS_MAX: Final = 2  # a GPU has at most 8 MIG devices now
UUID_DIGITS_MIN: Final = 4  # hexadecimal digits of a beginning: fewer would match by accident

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
    """What is wrong with a name of no known kind, in the words of its likely meaning."""
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
