"""A ResourceClaim as the API server has it, read for what it allocates of our driver's devices.

Its own fields are Kubernetes', so unknown ones are passed over. Those of a configuration are ours, and strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct, field

from nri_gpu.domain.container import PodUid
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, usable_uid
from nri_gpu.domain.text import listed, shown
from nri_gpu.dra.claim_config import ConfigError, parse_config
from nri_gpu.dra.questions import PreparedName

BYTES_MAX: Final = 2 << 20  # etcd takes less (kubernetes: its request limit of 1.5 MiB)
NAME_MAX: Final = 253  # characters of a Kubernetes object's name
# Whom `reservedFor` can name; Kubernetes calls that an open list (resource/v1). A pod group's pods are not in it.
POD: Final = "pods"
POD_GROUP: Final = "podgroups.scheduling.k8s.io"


class ResourceClaimError(NriGpuError):
    """The reason why a claim cannot be prepared: one sentence. over: it has nothing of us any more."""

    def __init__(self, sentence: str, *, over: bool = False) -> None:
        super().__init__(sentence)
        self.over = over


class _Owner(Struct):
    kind: str = ""


class _Metadata(Struct, rename="camel"):
    uid: Annotated[str, Meta(min_length=1)]
    owner_references: list[_Owner] = []
    deletion_timestamp: str | None = None


class _Consumer(Struct, rename="camel"):
    resource: str
    name: str
    uid: str
    api_group: str = ""

    @property
    def kind(self) -> str:
        """Return the resource with its API group, as `pods` or `podgroups.scheduling.k8s.io`."""
        return f"{self.resource}.{self.api_group}" if self.api_group else self.resource


class _Result(Struct, rename="camel"):
    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    share_id: str | None = field(name="shareID", default=None)


class _Opaque(Struct):
    driver: str
    parameters: Raw = Raw(b"null")


class _Config(Struct):
    source: str = ""
    requests: list[str] | None = None
    opaque: _Opaque | None = None

    def applies_to(self, request: str) -> bool:
        """Return whether it names the request, or the request of which that is an alternative, or no request at all."""
        return not self.requests or bool({request, request.partition("/")[0]}.intersection(self.requests))


class _Devices(Struct):
    results: list[_Result] | None = None
    config: list[_Config] | None = None


class _Allocation(Struct):
    devices: _Devices = field(default_factory=_Devices)


class _Status(Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = None


class _ResourceClaim(Struct):
    metadata: _Metadata
    status: _Status = field(default_factory=_Status)


def parse_resource_claim(document: bytes, asked: PreparedName, driver: str, pool: str) -> AllocatedClaim:
    """Read what a claim allocates of this driver's devices, and to which pods.

    asked: the claim that the kubelet, or the daemon, means. pool: of this node's devices; a claim that ended here may
    have been allocated on another node since. Raises: ResourceClaimError.
    """
    what = claim_name(asked)
    if not usable_uid(asked.uid):
        raise ResourceClaimError(f"{what}: its UID is not of letters, digits and dashes")
    if len(document) > BYTES_MAX:
        raise ResourceClaimError(f"{what}: {len(document)} bytes are over the limit of {BYTES_MAX}")
    try:
        claim = msgspec.json.decode(document, type=_ResourceClaim)
    except RecursionError:  # msgspec goes down into what it passes over, too
        raise ResourceClaimError(
            f"{what}: it nests too deep to be read: make the opaque configurations of its drivers flatter"
        ) from None
    except ValueError as error:
        raise ResourceClaimError(f"{what}: the API server's answer cannot be read: {error}") from None
    _check_uid(claim, asked)
    allocation = claim.status.allocation
    if allocation is None:
        raise ResourceClaimError(f"{what}: status.allocation: nothing is allocated to it", over=True)
    ours = [each for each in allocation.devices.results or () if (each.driver, each.pool) == (driver, pool)]
    if not ours:
        sentence = f"{what}: status.allocation.devices.results: none is of the driver {driver} on {pool}"
        raise ResourceClaimError(sentence, over=True)
    texts = _texts(what, allocation.devices.config or (), ours, driver)
    consumers = claim.status.reserved_for or ()
    return AllocatedClaim(
        uid=asked.uid,
        namespace=asked.namespace,
        name=asked.name,
        pods={PodUid(each.uid): each.name for each in consumers if each.kind == POD},
        results=tuple(
            AllocatedResult(
                request=each.request,
                pool=each.pool,
                device=each.device,
                text=text,
                share_id=each.share_id or "",
                admin=bool(each.admin_access),
            )
            for each, text in zip(ours, texts, strict=True)
        ),
        owned=any(each.kind == "Pod" for each in claim.metadata.owner_references),
        groups={each.uid: each.name for each in consumers if each.kind == POD_GROUP},
        others=tuple(sorted({each.kind for each in consumers} - {POD, POD_GROUP})),
    )


def is_ending(document: bytes, holder: PreparedName) -> bool:
    """Return whether a claim is being deleted, or is reserved for nobody.

    Its pods may be terminating on this node: the kubelet unprepares the claim as soon as they have ended.
    Raises: ResourceClaimError: another claim has its name.
    """
    try:
        claim = msgspec.json.decode(document, type=_ResourceClaim)
    except (ValueError, RecursionError):
        return False
    _check_uid(claim, holder)
    return bool(claim.metadata.deletion_timestamp) or not claim.status.reserved_for


def _check_uid(claim: _ResourceClaim, asked: PreparedName) -> None:
    """Check that a claim is the one that is asked for. Raises: ResourceClaimError: another has its name."""
    if claim.metadata.uid != asked.uid:
        raise ResourceClaimError(
            f"{claim_name(asked)}: metadata.uid: it was deleted, and another claim was created with its name", over=True
        )


def unserved(claim: AllocatedClaim) -> str:
    """Return why a claim reserved for others than pods and PodGroups cannot be prepared; empty for any other claim."""
    if not claim.others:
        return ""
    return (
        f"{claim_name(PreparedName(claim.uid, claim.namespace, claim.name))}: status.reservedFor: it is reserved for "
        f"{listed(map(shown, claim.others))}, and only pods and PodGroups are served here: use a claim of its own for "
        "these pods, or a newer nri-gpu"
    )


def claim_name(claim: PreparedName) -> str:
    """Name a claim in a sentence."""
    return f"ResourceClaim {shown(claim.namespace, NAME_MAX)}/{shown(claim.name, NAME_MAX)}"


def _texts(what: str, configs: Sequence[_Config], results: Sequence[_Result], driver: str) -> list[str]:
    """Return each result's configuration as text: the last that the claim has for it, or else the last of its class."""
    read: list[tuple[_Config, str]] = []
    faults: list[str] = []
    for at, config in enumerate(configs):
        if config.opaque is None or config.opaque.driver != driver:
            continue
        try:
            read.append((config, parse_config(bytes(config.opaque.parameters))))
        except ConfigError as error:
            faults.append(f"status.allocation.devices.config[{at}] ({shown(config.source)}): {error}")
    if faults:
        raise ResourceClaimError(f"{what}: {'; '.join(faults)}")
    read.sort(key=lambda each: each[0].source == "FromClaim")
    return [next((text for config, text in reversed(read) if config.applies_to(each.request)), "") for each in results]
