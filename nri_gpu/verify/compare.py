"""The differences between what one container has and what its signed grant says. Pure: each is a sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.edits import staged_below
from nri_gpu.domain.text import listed, quoted, shown
from nri_gpu.injection.device_numbers import Owner
from nri_gpu.injection.inject import OUR_UUIDS, VISIBLE_DEVICES, VOID
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant
from nri_gpu.verify.oci_spec import Spec

NO_GENERATION: Final = "-"
NO_GENERATIONS: Final = frozenset({"profiles"})  # of the stage folder: containers of an earlier version have it mounted
NAMED_MAX: Final = 8  # numbers or generations in a sentence
_SPEC_ALONE: Final = "its spec has {}, not granted; the kernel does not let it open that"
_BY_NODE: Final = (
    "can open {}, not granted: its spec has the node, from a device plugin, CDI or another component: an external "
    "allocation"
)
_RENUMBERED: Final = (
    "can open {}, not granted: the node had that number when the container was created, and it was the granted GPU's: "
    "the driver has been reloaded since, or MIG devices re-created; create the container again"
)
_BY_RULE: Final = "can open {}, not granted: a device rule of its spec opens it, without a node"
_BY_HOOK: Final = (
    "can open {}, not granted: its spec has a hook of NVIDIA's runtime, which opens devices by itself for an image "
    "that sets NVIDIA_VISIBLE_DEVICES; remove that runtime, or set disarm in the policy's [environment]"
)
_WIDENED: Final = (
    "can open {}, not granted, and its spec does not say so: its device rules were widened after it was created; stop "
    "it, and find out who did that"
)
VALUE_MAX: Final = 200  # characters of a variable's value
VARIABLES: Final = frozenset({VISIBLE_DEVICES, OUR_UUIDS})  # of an environment, that are read


class Seen(Struct, frozen=True, kw_only=True):
    """A container as it was seen."""

    spec: Spec
    grant: SignedGrant | InvalidGrant | None
    opens: Set[DeviceNumber]  # numbers that the kernel lets it open
    staged: frozenset[str]  # entries of the stage folder that are mounted in it, by the kernel's word
    simulated: bool = False  # a topology file's node grants capabilities that its driver has no files for


def differences(seen: Seen, numbers: Mapping[DeviceNumber, Owner], stage_dir: str) -> Iterator[str]:
    """Yield all that is not as granted, each as a clause that follows the container's name."""
    if isinstance(seen.grant, InvalidGrant):
        yield f"its signed grant is not valid: {seen.grant.why}"
    yield from _of_devices(seen, numbers)
    yield from _of_mounts(seen, stage_dir)
    yield from _of_environment(seen)


def _granted(seen: Seen) -> frozenset[str]:
    return frozenset(seen.grant.uuids) if isinstance(seen.grant, SignedGrant) else frozenset()


def _of_devices(seen: Seen, numbers: Mapping[DeviceNumber, Owner]) -> Iterator[str]:
    granted, known = _granted(seen), {unit for owner in numbers.values() for unit in owner.units}
    nodes = {(node.major, node.minor) for node in seen.spec.nodes}
    for uuid in sorted(granted - known):
        yield f"was granted {uuid}, which is no longer on this node: the driver was reloaded, or the GPU is gone"
    beyond = defaultdict[str, list[str]](list)
    moved = any(not _has(granted, number, owner, nodes) for number, owner in numbers.items()) or not granted <= known
    for number, owner in sorted(numbers.items(), key=lambda each: (not each[1].units, not each[1].shared)):
        if owner.units & granted or (owner.shared and granted and number in nodes):
            yield from _lacking(seen, number, owner, nodes)
        elif not seen.spec.privileged and (why := _origin(seen, number, nodes, moved=moved)):
            beyond[why].append(_named(owner, number))
    for why, named in beyond.items():
        yield why.format(_listed(named))


def _lacking(seen: Seen, number: DeviceNumber, owner: Owner, nodes: Set[DeviceNumber]) -> Iterator[str]:
    """Say why the container cannot use what it was granted."""
    if not _has(_granted(seen), number, owner, nodes):
        yield f"its spec has no node {_named(owner, number)}, which its grant needs"
    elif number in nodes and number not in seen.opens:
        yield (
            f"cannot open {_named(owner, number)} any more, which it was granted: its device rules were changed after "
            "it was created, as systemd does on daemon-reload where /dev/char has no link (`nri-gpu prepare` makes "
            "them); create it again"
        )


def _has(granted: Set[str], number: DeviceNumber, owner: Owner, nodes: Set[DeviceNumber]) -> bool:
    """Return whether a number's node is there, or need not be: nodes in /dev/dri come with graphics alone."""
    return number in nodes or not owner.units & granted or owner.path.startswith("/dev/dri/")


def _origin(seen: Seen, number: DeviceNumber, nodes: Set[DeviceNumber], *, moved: bool) -> str:
    """Return the message template for how the container reached an ungranted device, or empty if it cannot.

    moved: the granted device has a new number now.
    """
    if number not in seen.opens:
        return _SPEC_ALONE if number in nodes else ""
    if number in nodes:
        return _RENUMBERED if moved else _BY_NODE
    if seen.spec.opens(number):
        return _BY_RULE
    return _BY_HOOK if seen.spec.nvidia_hooks else _WIDENED


def _of_mounts(seen: Seen, stage_dir: str) -> Iterator[str]:
    sources = [mount.source for mount in seen.spec.mounts or ()]
    staged = staged_below(stage_dir, sources)
    generation = seen.grant.generation if isinstance(seen.grant, SignedGrant) else NO_GENERATION
    wanted = {*generation.split("+")} - {NO_GENERATION}
    if other := sorted(staged - wanted - NO_GENERATIONS):
        told = f"its grant is of {generation}" if wanted else "it has no grant"
        yield f"mounts driver files of generation {_listed(other)}, and {told}"
    if _granted(seen) and not seen.simulated and (missing := sorted(wanted - staged)):
        yield f"its grant is of driver generation {_listed(missing)}, and its spec mounts nothing of it"
    if more := sorted(seen.staged - staged):
        yield f"the kernel shows {_listed(more)} of the stage folder mounted in it, and its spec does not"
    if less := sorted(staged - seen.staged):
        yield f"its spec mounts {_listed(less)} of the stage folder, and the kernel does not show it: it was unmounted"


def _of_environment(seen: Seen) -> Iterator[str]:
    """Check the variable that programs and exporters believe: it must say what was granted."""
    if not (granted := _granted(seen)):
        return
    name = OUR_UUIDS if seen.spec.env.get(VISIBLE_DEVICES) == VOID else VISIBLE_DEVICES
    value = seen.spec.env.get(name)
    if value is None:
        yield f"has no variable {name}, which should name {_listed(sorted(granted))}"
    elif {*value.split(",")} != granted:
        told = quoted(value, VALUE_MAX)
        yield f"its variable {name} is {told}, and it was granted {_listed(sorted(granted))}: image or pod set it too"


def _named(owner: Owner, number: DeviceNumber) -> str:
    return f"{owner.path} ({number[0]}:{number[1]}{f', {owner.what}' if owner.what else ''})"


def _listed(names: list[str]) -> str:
    return listed((shown(each, VALUE_MAX) for each in names), NAMED_MAX)
