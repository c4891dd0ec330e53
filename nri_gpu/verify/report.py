"""The answer of `nri-gpu verify`: a verdict on each container, made of what runtime, kernel and signed grant say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.allocation.grant import InvalidGrant, SignedGrant, verify_grant
from nri_gpu.domain.container import ContainerId, DeviceNumber, PodUid
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Inventory
from nri_gpu.system.process import process_of
from nri_gpu.verify.bundles import Bundle
from nri_gpu.verify.compare import Seen, differences
from nri_gpu.verify.kernel import Kernel, UnseenError, mounts_of, staged_by_mounts
from nri_gpu.verify.numbers import Owner, device_numbers

SCHEMA: Final = "nri-gpu/verify/v1"


class Verdict(StrEnum):
    """Of a container. OK: it has what its signed grant says. NO_GPU: it was granted none, and can open none."""

    OK = "ok"
    NO_GPU = "no GPU"
    PRIVILEGED = "privileged"
    DIFFERS = "differs"
    UNSEEN = "not seen"


class OpenNumber(Struct, frozen=True):
    """A device number of NVIDIA that the kernel lets a container open. path: its usual node."""

    path: str
    major: int
    minor: int


class ContainerReport(Struct, frozen=True, kw_only=True):
    """One container. pod: `namespace/name`. mode, gpu_uuids, generation: of its signed grant; mode empty without GPUs.

    differences: clauses that follow its name. unseen: why it, or a part of it, could not be looked at.
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


class Report(Struct, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    """The whole node. numbers_from: `daemon`, or `snapshot` of the last one. unseen: what else could not be seen."""

    numbers_from: str
    containers: tuple[ContainerReport, ...]
    unseen: tuple[str, ...] = ()
    denied: bool = False


class Evidence(Struct, frozen=True, kw_only=True):
    """What containers are held against.

    stage_dir: without symlinks. holders: containers that run, by the daemon's word, id -> `namespace/pod`.
    numbers_from: as in `Report`.
    """

    kernel: Kernel
    key: bytes
    inventory: Inventory
    stage_dir: Path
    holders: Mapping[str, str]
    numbers_from: str


def verify(bundles: Iterable[Bundle], by: Evidence) -> Report:
    """The report on these containers."""
    numbers, found, denied = device_numbers(by.inventory), list[ContainerReport](), False
    known = set()
    for bundle in bundles:
        known.add(bundle.id)
        try:
            found.append(_compared(bundle, numbers, by))
        except UnseenError as error:
            if not bundle.fault and process_of(bundle.pid) is None:
                continue  # it ended meanwhile
            denied |= error.denied
            found.append(_unseen(bundle, str(error)))
    missing = tuple(
        f"{pod} has GPUs, and its container {id_} is not among those of the runtimes that were looked at: name the "
        "state folder of its containerd with --containerd-state"
        for id_, pod in by.holders.items()
        if id_ not in known
    )
    found.sort(key=lambda each: (each.pod, each.container, each.id))
    return Report(numbers_from=by.numbers_from, containers=tuple(found), unseen=missing, denied=denied)


def _compared(bundle: Bundle, numbers: Mapping[DeviceNumber, Owner], by: Evidence) -> ContainerReport:
    """Raises: UnseenError."""
    if bundle.fault:
        raise UnseenError(bundle.fault)
    filtered = by.kernel.device_filter(bundle.pid, bundle.id)
    opens = {number: owner for number, owner in numbers.items() if filtered.opens(number)}
    staged = staged_by_mounts(by.stage_dir, by.kernel.mounts, mounts_of(bundle.pid, by.kernel.proc))
    grant = _grant(bundle, by.key)
    seen = Seen(spec=bundle.spec, grant=grant, opens=opens.keys(), staged=staged)
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


def changed(before: Report, now: Report) -> tuple[ContainerReport, ...]:
    """Containers that are new, or of which something else is said."""
    known = {each.id: each for each in before.containers}
    return tuple(each for each in now.containers if known.get(each.id) != each)


def ended(before: Report, now: Report) -> tuple[ContainerReport, ...]:
    """Containers that are gone."""
    present = {each.id for each in now.containers}
    return tuple(each for each in before.containers if each.id not in present)
