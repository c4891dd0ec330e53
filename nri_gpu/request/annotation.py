"""A request: the annotation that applies to a container, and its value as a claim or an error with a position.

    value   = clause *( ";" clause ) [ ";" ]      blanks around ; , = < > do not count; at most 4 KiB of ASCII
    clause  = "all" | "none" | number | key op text

A clause's key is looked up in CLAUSES; a new clause is one entry there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.edits import NO_EXTRAS, Extras
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import Capabilities
from nri_gpu.domain.gpu_request import (
    ArchSelector,
    Claim,
    Count,
    Devices,
    Everything,
    MemorySelector,
    MigProfiles,
    Mode,
    ModelSelector,
    Nothing,
    Operator,
    Selector,
    Wanted,
)
from nri_gpu.domain.mps import NO_MPS_LIMITS, MpsLimits
from nri_gpu.domain.names import BASE_KEY, CONTAINER_PREFIX, GRANT_KEY, KEY_PREFIX, KUBELET_KEY, POD_KEY
from nri_gpu.domain.text import did_you_mean, quoted
from nri_gpu.request.values import (
    BLANKS,
    Piece,
    listed,
    read_arch,
    read_capabilities,
    read_count,
    read_devices,
    read_extras,
    read_memory,
    read_mig,
    read_mode,
    read_model,
    read_sharing,
    shown_key,
)

VALUE_MAX: Final = 4096  # bytes; Kubernetes lets all annotations of a pod together have 256 KiB
NAME_MAX: Final = 53  # characters of a container's name that Kubernetes lets stand in a key
POD_WIDE: Final = (POD_KEY, BASE_KEY)  # for all containers of the pod that have no annotation of their own

Part = Wanted | Mode | Capabilities | Selector | Extras | MpsLimits


class Clause(Struct, frozen=True):
    """A key of the grammar. ordered: it also compares with < <= > >=."""

    read: Callable[[Piece, Operator], Part]
    example: str
    ordered: bool = False


CLAUSES: Final[Mapping[str, Clause]] = {
    "count": Clause(read_count, "count=2"),
    "device": Clause(read_devices, "device=0,1"),
    "mig": Clause(read_mig, "mig=1g.10gb:2"),
    "mode": Clause(read_mode, "mode=shared"),
    "sharing": Clause(read_sharing, "sharing=memory:10Gi,threads:50"),
    "capabilities": Clause(read_capabilities, "capabilities=compute,utility"),
    "extras": Clause(read_extras, "extras=drm"),
    "model": Clause(read_model, "model=*H100*"),
    "memory": Clause(read_memory, "memory>=40Gi", ordered=True),
    "arch": Clause(read_arch, "arch>=9.0", ordered=True),
}
WORDS: Final[Mapping[str, Wanted]] = {"all": Everything(), "none": Nothing()}
# Other words for the same, beyond typing errors.
_OTHER_NAMES: Final = {"gpu": "count", "gpus": "count", "uuid": "device", "index": "device", "caps": "capabilities"}
_OPERATORS: Final = {operator.value: operator for operator in Operator}
_NUMBER: Final = "a number"  # what a bare one is called beside other keys
_ONE_OF: Final = "write one of all, none, a number, count=, device= or mig="
_MODES: Final = frozenset(mode.value for mode in Mode)


def parse_claim(key: str, value: str, *, given: bool = False, container: str = "") -> Claim:
    """Return the claim of one annotation's value.

    given: the kubelet chose the GPUs, so a value without a number or GPUs means all of those. container: its name, for
    what `opt_out` says.

    Raises: RequestError: it is not valid; the position is that of the first fault.
    """
    whole = Piece(key, value, 0)
    check_text(whole)
    parts: dict[str, tuple[Part, Piece]] = {}
    for clause in _clauses(whole):
        name, part = _read(clause)
        if name in parts:
            raise clause.error(f"{name} is given twice")
        parts[name] = (part, clause)
    return _assemble(whole, parts, Everything() if given else None, container)


def check_text(whole: Piece) -> None:
    """Check a whole value before anything is read from it.

    Raises: RequestError: it is too long, or no line of ASCII.
    """
    value = whole.text
    if len(value) > VALUE_MAX:
        raise whole.cut(VALUE_MAX).error(f"the value has {len(value)} characters, over the limit of {VALUE_MAX}")
    if value.isascii() and value.isprintable():
        return
    for at, char in enumerate(value):
        if not (char.isascii() and (char.isprintable() or char == "\t")):
            what = "a line break" if char in "\r\n" else f"the character {quoted(char)}"
            raise whole.cut(at).error(f"{what} is not allowed: write printable ASCII on one line")


def _clauses(whole: Piece) -> Iterator[Piece]:
    """Yield the value's clauses; a `;` may end the last of them, as in any list of declarations."""
    value = whole.text.rstrip(BLANKS).removesuffix(";")
    for clause in Piece(whole.key, value, 0).split(";"):
        if not clause.text:
            what = "a clause is missing here" if ";" in value else "the value is empty"
            raise clause.error(f"{what}: write a number of GPUs, all, none, or a clause such as device=0")
        yield clause


def _read(clause: Piece) -> tuple[str, Part]:
    """Return name and meaning of a clause."""
    start = next((at for at, char in enumerate(clause.text) if char in "=<>"), None)
    if start is None:
        return _read_word(clause)
    name = clause.text[:start].rstrip(BLANKS)
    rule = CLAUSES.get(name)
    if rule is None:
        raise clause.error(_unknown(name))
    end = start + 1
    while end < len(clause.text) and clause.text[end] in "=<>":
        end += 1
    operator = _OPERATORS.get(clause.text[start:end])
    if operator is None or not (rule.ordered or operator is Operator.EQUAL):
        allowed = listed(_OPERATORS) if rule.ordered else Operator.EQUAL.value
        found = quoted(clause.text[start:end])
        raise clause.cut(start).error(f'"{name}" does not take {found}, it takes: {allowed} (as in {rule.example})')
    value = clause.cut(end)
    if not value.text:
        raise value.error(f'"{name}" needs a value, such as {rule.example}')
    return name, rule.read(value, operator)


def _read_word(clause: Piece) -> tuple[str, Part]:
    """Read `all`, `none` or a bare number."""
    text = clause.text
    if text in WORDS:
        return text, WORDS[text]
    if text[0] in "+-0123456789" and not _names_gpus(text):
        return _NUMBER, read_count(clause)
    if text in CLAUSES:
        raise clause.error(f'"{text}" needs a value, such as {CLAUSES[text].example}')
    raise clause.error(_unknown(text))


def _names_gpus(text: str) -> bool:
    """Return whether a bare word is a list or an id that belongs after `device=`."""
    uuid = text[:4].lower() in ("gpu-", "mig-")
    return "," in text or uuid or (":" in text and text[0] in "0123456789")


def _unknown(name: str) -> str:
    """Say why a word is not valid, by what it probably means."""
    if name in WORDS:
        return f'"{name}" takes no value: write {name} by itself'
    if name in _MODES:
        return f'"{name}" is a mode: write mode={name}'
    if _names_gpus(name):
        return f"{quoted(name)} is not a clause: to name GPUs write device={quoted(name)[1:-1]}"
    if name.lower() in CLAUSES or name.lower() in WORDS:
        return f"{quoted(name)} must be in lower case: {name.lower()}"
    if name in _OTHER_NAMES:
        return f'unknown {quoted(name)} (did you mean "{_OTHER_NAMES[name]}"?)'
    known = [*WORDS, _NUMBER, *CLAUSES]
    return f"unknown {quoted(name)}, known: {listed(known)}{did_you_mean(name.partition(':')[0], [*WORDS, *CLAUSES])}"


def opt_out(key: str, container: str) -> str:
    """Return how a container is kept out of a pod-wide annotation, as the end of a cure; empty if it has its own."""
    if key not in POD_WIDE or not 0 < len(container) <= NAME_MAX:
        return ""
    return f"; if this container needs no GPU, annotate its pod with {shown_key(CONTAINER_PREFIX + container)}: none"


def _assemble(whole: Piece, parts: Mapping[str, tuple[Part, Piece]], otherwise: Wanted | None, container: str) -> Claim:
    """Put the parts of a claim together. otherwise: what is wanted if no clause says it."""
    mode: Mode | None = None
    capabilities: Capabilities | None = None
    wanted: list[tuple[str, Wanted]] = []
    selectors: list[Selector] = []
    extras, sharing = NO_EXTRAS, NO_MPS_LIMITS
    for name, (part, clause) in parts.items():
        match part:
            case Mode():
                mode = part
            case frozenset():
                capabilities = part
            case Extras():
                extras = part
            case MpsLimits():
                sharing = part
            case ModelSelector() | MemorySelector() | ArchSelector():
                selectors.append(part)
            case Everything() | Nothing() | Count() | Devices() | MigProfiles():
                wanted.append((name, part))
                if len(wanted) > 1:
                    raise clause.error(f"{name} and {wanted[0][0]} exclude one another: {_ONE_OF}")
    if not (wanted or selectors or otherwise):
        why = "the annotation sets only how GPUs are used, and the kubelet allocated none to this container"
        raise whole.cut(0).error(f"{why}: {_ONE_OF}{opt_out(whole.key, container)}")
    if wanted and isinstance(wanted[0][1], Nothing) and len(parts) > 1:
        other = next(clause for name, (_, clause) in parts.items() if name != "none")
        raise other.error('"none" stands alone: it asks for no GPU, so nothing can go with it')
    if sharing != NO_MPS_LIMITS and mode is not Mode.MPS:
        raise parts["sharing"][1].error('"sharing" goes with mode=mps only: in other modes nothing divides a GPU')
    return Claim(
        key=whole.key,
        text=whole.text,
        wanted=wanted[0][1] if wanted else otherwise or Count(1),
        mode=mode,
        capabilities=capabilities,
        selectors=tuple(selectors),
        extras=extras,
        sharing=sharing,
    )


WRITTEN_BY_US: Final = (
    "only nri-gpu writes this annotation; remove it from the container, or a second nri-gpu: see `nri-gpu doctor`"
)
_KNOWN_KEYS: Final = (BASE_KEY, POD_KEY, CONTAINER_PREFIX + "<name>")
_KEYS_BY_WORD: Final = {"pod": POD_KEY, "container": CONTAINER_PREFIX + "<name>"}


def select_annotation(
    pod_annotations: Mapping[str, str], container_annotations: Mapping[str, str], container_name: str
) -> tuple[str, str] | None:
    """Return key and value of the annotation that applies to a container about to be created, or None.

    container_annotations: the container's own. An existing container carries our signed grant: give an empty mapping.

    Raises: RequestError: an unknown key with our prefix (a mistyped request must not start without its GPU), or a key
    of ours on the container itself.
    """
    # One search over all keys at once, since most containers ask for nothing.
    if BASE_KEY in "\n".join(container_annotations):
        _check_container_keys(pod_annotations, container_annotations)
    if BASE_KEY not in "\n".join(pod_annotations):
        return None
    _check_pod_keys(pod_annotations)
    for key in (CONTAINER_PREFIX + container_name, *POD_WIDE):
        value = pod_annotations.get(key)
        if value is not None:
            return key, value
    return None


def kubelet_key(annotations: Iterable[str]) -> str:
    """Return the first key that carries an allocation of the kubelet, or empty."""
    return next((key for key in annotations if key == KUBELET_KEY or key.startswith(f"{KUBELET_KEY}.")), "")


def our_keys(annotations: Iterable[str]) -> list[str]:
    """Return the keys that are requests, or would be if they were spelt right."""
    return sorted(key for key in annotations if key == BASE_KEY or key.startswith(KEY_PREFIX))


def _check_pod_keys(annotations: Mapping[str, str]) -> None:
    for key in our_keys(annotations):
        if key == CONTAINER_PREFIX:
            raise RequestError(shown_key(key), f"the container's name is missing: write {CONTAINER_PREFIX}<name>")
        if key not in POD_WIDE and not key.startswith(CONTAINER_PREFIX):
            raise RequestError(shown_key(key), f"unknown annotation, known: {listed(_KNOWN_KEYS)}{_guess_key(key)}")


def _check_container_keys(pod: Mapping[str, str], container: Mapping[str, str]) -> None:
    for key in our_keys(container):
        if key == GRANT_KEY:
            raise RequestError(key, WRITTEN_BY_US)
        # Runtimes can be configured to copy annotations of the pod to its containers; such a copy is no request.
        if pod.get(key) != container[key]:
            raise RequestError(
                shown_key(key),
                "is set on the container; requests are read from the annotations of the pod: set it there",
            )


def _guess_key(key: str) -> str:
    """Return the known key whose word after the slash is close, as a question in brackets, or empty."""
    word = key[len(KEY_PREFIX) :].partition(".")[0]
    close = did_you_mean(word, _KEYS_BY_WORD)
    return next((f' (did you mean "{key}"?)' for name, key in _KEYS_BY_WORD.items() if f'"{name}"' in close), "")
