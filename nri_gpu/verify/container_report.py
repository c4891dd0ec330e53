"""The answer of `nri-gpu verify`: a verdict on each container, made of what runtime, kernel and signed grant say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId, DeviceNumber, PodUid
from nri_gpu.domain.errors import UnseenError
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Inventory
from nri_gpu.injection.device_numbers import Owner, device_numbers
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant, verify_grant
from nri_gpu.system.cgroups import mounts_of
from nri_gpu.system.node_name import NamedNode, this_node
from nri_gpu.system.process import process_of
from nri_gpu.verify.compare import Seen, differences
from nri_gpu.verify.in_kernel import Kernel, staged_by_mounts
from nri_gpu.verify.oci_bundles import Bundle

SCHEMA: Final = "nri-gpu/verify/v1"
DAEMON, SNAPSHOT, OBSERVER = "daemon", "snapshot", "observer"  # where device numbers are from


class Verdict(StrEnum):
    """The verdict on a container. OK: it has what its signed grant says.

    NO_GPU: it was granted none, and can open none. The last three are of an observer, and held against what the
    kubelet, a claim, CDI or Docker names: ALLOCATED: it can open that and no more; WIDENED: more than that;
    NOT_ALLOCATED: it can open GPUs, and none of these names it.
    """

    OK = "ok"
    NO_GPU = "no GPU"
    PRIVILEGED = "privileged"
    DIFFERS = "differs"
    UNSEEN = "not seen"
    ALLOCATED = "allocated"
    WIDENED = "widened"
    NOT_ALLOCATED = "not allocated"


class OpenNumber(Struct, frozen=True):
    """A device number of NVIDIA that the kernel lets a container open. path: its usual node."""

    path: str
    major: int
    minor: int


class ContainerReport(Struct, frozen=True, kw_only=True):
    """A container. pod: `namespace/name`. mode, gpu_uuids, generation: of its signed grant; mode empty without GPUs.

    Beside an observer gpu_uuids are those that it was given, and by names what gave it these. differences: clauses that
    follow its name. unseen: why it, or a part of it, could not be looked at.
    """

    id: str
    pod: str
    container: str
    verdict: Verdict
    granted: bool = False
    mode: str = ""
    gpu_uuids: tuple[str, ...] = ()
    generation: str = ""
    privileged: bool = False
    opens: tuple[OpenNumber, ...] = ()
    differences: tuple[str, ...] = ()
    unseen: str = ""
    by: str = ""


class Report(Struct, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """The whole node. numbers_from: `daemon`, its last `snapshot`, or `observer`. unseen: what else was not seen."""

    node: NamedNode
    numbers_from: str
    containers: tuple[ContainerReport, ...]
    unseen: tuple[str, ...] = ()
    denied: bool = False


class Expected(Struct, frozen=True, kw_only=True):
    """The state that containers are held against."""

    kernel: Kernel
    key: bytes
    inventory: Inventory
    stage_dir: Path  # without symlinks
    numbers_from: str  # as in `Report`
    # Asks the daemon which containers run with GPUs, id -> `namespace/pod`, or None if it cannot say.
    holders: Callable[[], Mapping[str, str] | None]


def verify(bundles: Callable[[], Iterable[Bundle]], by: Expected) -> Report:
    """Return the report on these containers.

    A pod's sandbox is no container to users: it is listed only if something is wrong.
    """
    numbers, found, denied = device_numbers(by.inventory), list[ContainerReport](), False
    pods, holders = dict[str, str](), by.holders()
    for bundle in bundles():
        pods[bundle.id] = bundle.pod_uid
        try:
            each = _compared(bundle, numbers, by)
            if each.differences or not bundle.sandbox:
                found.append(each)
        except UnseenError as error:
            if not bundle.fault and process_of(bundle.pid) is None:
                continue  # it ended meanwhile
            denied |= error.denied
            found.append(_unseen(bundle, str(error)))
    found = [_held_twice(each, found, pods) for each in found]
    found.sort(key=lambda each: (each.pod, each.container, each.id))
    return Report(
        node=this_node(),
        numbers_from=by.numbers_from,
        containers=tuple(found),
        unseen=tuple(_missing(by, holders, pods)),
        denied=denied,
    )


def _missing(by: Expected, holders: Mapping[str, str] | None, pods: Mapping[str, str]) -> Iterator[str]:
    """Yield why what was found is not all."""
    if holders is None:
        yield "which containers have GPUs according to the daemon: it stopped, or is another version"
        return
    missing = {id_: pod for id_, pod in holders.items() if id_ not in pods}
    still = by.holders() or {} if missing else {}  # one may have ended meanwhile
    for id_, pod in missing.items():
        if id_ in still:
            yield (
                f"container {id_} of {pod}, which has GPUs: it belongs to no containerd that was examined: name its "
                "state folder with --containerd-state"
            )


def _compared(bundle: Bundle, numbers: Mapping[DeviceNumber, Owner], by: Expected) -> ContainerReport:
    """Compare a container with what it should have. Raises: UnseenError."""
    if bundle.fault:
        raise UnseenError(bundle.fault)
    filtered = by.kernel.device_filter(bundle.pid, bundle.id)
    opens = {number: owner for number, owner in numbers.items() if filtered.opens(number)}
    staged = staged_by_mounts(by.stage_dir, by.kernel.mounts, mounts_of(bundle.pid, by.kernel.proc))
    grant = _grant(bundle, by.key)
    seen = Seen(spec=bundle.spec, grant=grant, opens=opens.keys(), staged=staged, simulated=by.inventory.simulated)
    found = tuple(differences(seen, numbers, str(by.stage_dir)))
    signed = grant if isinstance(grant, SignedGrant) else None
    return ContainerReport(
        id=bundle.id,
        pod=bundle.pod,
        container=bundle.name,
        verdict=_verdict(found, signed, privileged=bundle.spec.privileged),
        granted=bool(signed and signed.uuids),
        mode=signed.mode.value if signed and signed.mode else "",
        gpu_uuids=signed.uuids if signed else (),
        generation=signed.generation if signed else "",
        privileged=bundle.spec.privileged,
        opens=tuple(OpenNumber(owner.path, *number) for number, owner in opens.items()),
        differences=found,
    )


def _held_twice(each: ContainerReport, found: Iterable[ContainerReport], pods: Mapping[str, str]) -> ContainerReport:
    """Add to the report other pods that have a valid grant of the same GPU, if either grant is exclusive."""
    others = [
        other
        for other in found
        if pods[other.id] != pods[each.id]
        and Mode.EXCLUSIVE in (each.mode, other.mode)
        and not {*each.gpu_uuids}.isdisjoint(other.gpu_uuids)
    ]
    if not others:
        return each
    names = ", ".join(sorted({f"{other.pod} ({other.mode})" for other in others}))
    clause = f"was granted a GPU in {each.mode} mode that {names} was granted, too: stop one of them"
    return replace(each, differences=(*each.differences, clause), verdict=Verdict.DIFFERS)


def _verdict(found: tuple[str, ...], signed: SignedGrant | None, *, privileged: bool) -> Verdict:
    if found:
        return Verdict.DIFFERS
    if privileged:
        return Verdict.PRIVILEGED
    return Verdict.OK if signed and signed.uuids else Verdict.NO_GPU


def _grant(bundle: Bundle, key: bytes) -> SignedGrant | InvalidGrant | None:
    text = (bundle.spec.annotations or {}).get(GRANT_KEY)
    if text is None:
        return None
    return verify_grant(text, PodUid(bundle.pod_uid), ContainerId(bundle.id), key)


def _unseen(bundle: Bundle, why: str) -> ContainerReport:
    return ContainerReport(id=bundle.id, pod=bundle.pod, container=bundle.name, verdict=Verdict.UNSEEN, unseen=why)
