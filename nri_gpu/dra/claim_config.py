"""The opaque configuration of a claim or a DeviceClass, turned into the grammar of the annotation.

    apiVersion: gpu.nri.io/v1
    kind: GpuConfig
    mode: mps                                mode=mps
    capabilities: [compute, utility]         capabilities=compute,utility
    extras: [rdma, "imex:0"]                 extras=rdma,imex:0
    sharing: {memory: 10Gi, threads: 50}     sharing=memory:10Gi,threads:50

All but the first two may be left out. Each value is read by the reader of the annotation's clause, so that both ways
to ask take the same words and explain the same mistakes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Final

from nri_gpu.domain.errors import NriGpuError, RequestError
from nri_gpu.domain.gpu_request import Operator
from nri_gpu.domain.text import did_you_mean, quoted
from nri_gpu.request.annotation import CLAUSES, parse_claim
from nri_gpu.request.values import Piece, listed

API_VERSION: Final = "gpu.nri.io/v1"
KIND: Final = "GpuConfig"
FAULTS_MAX: Final = 16  # of a configuration; whoever may write a claim could have thousands looked into
BYTES_MAX: Final = 10 * 1024  # kubernetes: staging/src/k8s.io/api/resource/v1/types.go, OpaqueParametersMaxLength
_CLAUSES: Final = ("mode", "capabilities", "extras", "sharing")
_FIELDS: Final = ("apiVersion", "kind", *_CLAUSES)
_SHARES: Final[Mapping[str, type]] = {"memory": str, "threads": int}
_NAMES: Final[Mapping[type, str]] = {
    **{str: "a string", int: "a whole number", float: "a number", bool: "a boolean"},
    **{list: "a list", tuple: "an object", type(None): "null"},
}


class ConfigError(NriGpuError):
    """A configuration with faults: all of them at once, each with its field."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def parse_config(raw: bytes) -> str:
    """Write a configuration in the annotation's grammar; empty where it asks for nothing. Raises: ConfigError."""
    if len(raw) > BYTES_MAX:
        raise ConfigError((f"it has {len(raw)} bytes, over the limit of {BYTES_MAX}",))
    try:
        document: object = json.loads(raw, object_pairs_hook=tuple)  # objects are tuples of pairs, lists are lists
    except (ValueError, RecursionError) as error:
        raise ConfigError((f"it is not JSON: {error}",)) from None
    faults: list[str] = []
    fields = _object(document, "", _FIELDS, faults)
    for name, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        found = fields.get(name)
        if found != right:
            has = f"{_shown(found)} is not known" if name in fields else "it is missing"
            faults.append(f"{name}: {has}: write {right}")
    clauses = [_clause(name, fields[name], faults) for name in _CLAUSES if name in fields]
    text = ";".join(clauses)
    if text and not faults:
        try:
            parse_claim(KIND, text, given=True)
        except RequestError as error:
            faults.append(error.message)  # its position is in a text that nobody wrote
    if faults:
        raise ConfigError(tuple(faults[:FAULTS_MAX]))
    return text


def _object(value: object, path: str, known: tuple[str, ...], faults: list[str]) -> dict[str, object]:
    """Return the known fields of an object; add a fault for each field that is unknown, or comes twice."""
    if not isinstance(value, tuple):
        faults.append(f"{path or 'parameters'}: {_shown(value)} is not an object")
        return {}
    fields: dict[str, object] = {}
    for name, each in value:
        if len(faults) >= FAULTS_MAX:
            break
        place = f"{path}.{name}" if path else name
        if name not in known:
            hint = did_you_mean(name, known)
            faults.append(f"{quoted(place)} is no field, known: {listed(known)}{hint}")
        elif name in fields:
            faults.append(f"{place}: is given twice")
        else:
            fields[name] = each
    return fields


def _clause(name: str, value: object, faults: list[str]) -> str:
    """Write a field as the grammar has it; not to be used where there is a fault."""
    if name == "mode":
        words = [_word(name, name, value, faults)]
    elif name == "sharing":
        shares = _object(value, name, tuple(_SHARES), faults)
        words = [_word(f"{name}.{of}", name, shares[of], faults, of) for of in _SHARES if of in shares]
    elif isinstance(value, list):
        words = [_word(f"{name}[{at}]", name, each, faults) for at, each in enumerate(value)]
    else:
        faults.append(f"{name}: {_shown(value)} is not a list")
        return ""
    if value in ([], ()):
        faults.append(f"{name}: it is empty: leave the field out")
    faults += [f"{name}: {quoted(word)} is named twice" for word, times in Counter(words).items() if times > 1]
    return f"{name}={','.join(words)}"


def _word(path: str, clause: str, value: object, faults: list[str], share: str = "") -> str:
    """Write a value of a clause. share: the share that it is of, or empty."""
    kind = _SHARES.get(share, str)
    text = f"{share}:{value}" if share else f"{value}"
    if len(faults) >= FAULTS_MAX:
        return text
    if type(value) is not kind:  # a boolean is an int, too
        faults.append(f"{path}: {_shown(value)} is not {_NAMES[kind]}")
    elif not (text.isascii() and text.isprintable()) or set(",;") & set(text):
        faults.append(f"{path}: {_shown(value)} is not one word")
    else:
        try:
            CLAUSES[clause].read(Piece(path, text, 0), Operator.EQUAL)
        except RequestError as error:
            faults.append(f"{path}: {error.message}")
    return text


def _shown(value: object) -> str:
    return quoted(value) if isinstance(value, str) else _NAMES[type(value)]
