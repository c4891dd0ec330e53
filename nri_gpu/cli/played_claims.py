"""The scheduler's allocation of a manifest's ResourceClaims, as far as a manifest shows it.

A request gets the first free devices of its class, in the order in which the node offers them. Selectors, constraints
and tolerations are not evaluated. Source: kubernetes/kubernetes, staging/src/k8s.io/api/resource/v1/types.go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from nri_gpu.domain.container import Pod
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.resource_claim import AllocatedClaim
from nri_gpu.domain.text import shown
from nri_gpu.dra.claim_object import ResourceClaimError, parse_resource_claim
from nri_gpu.dra.questions import OfferedDevice, PreparedName

POOL: Final = "node"  # of this node's devices
_VALUES_MAX: Final = 10_000  # of a configuration: YAML's aliases make any number of a few bytes
DeviceSpec = Mapping[object, object]  # `devices` of a claim's spec


class Offer(Struct, frozen=True):
    """The devices that a node offers to the scheduler. shares: how many claims can have each; taken: how many do."""

    driver: str
    devices: Sequence[OfferedDevice]
    shares: int
    taken: Mapping[str, int]


class _Request(Struct, frozen=True):
    """A request for devices, or one of several alternatives. path: its name in the claim's allocation."""

    path: str
    kind: str  # `gpu` or `mig`; empty: of a class that is not known
    count: int  # 0: all
    admin: bool


def is_ours(spec: DeviceSpec, driver: str) -> bool:
    """Return whether a claim asks for devices of this driver's own DeviceClasses, maybe beside those of others."""
    return any(_requests(spec, driver))


def allocate(spec: DeviceSpec, claim: PreparedName, pod: Pod, offer: Offer) -> AllocatedClaim | Reason:
    """Return the claim as it is allocated for a pod, or why it cannot be."""
    taken, results = Counter(offer.taken), list[Mapping[str, object]]()
    for alternatives in _requests(spec, offer.driver):
        found = ((each, _devices(each, offer, taken)) for each in alternatives)
        request, names = next((each for each in found if each[1]), (alternatives[0], ()))
        if not names:
            what = f"this node has too few free devices for request {shown(request.path)} of ResourceClaim "
            cure = "ask for fewer, or run the pod on another node"
            return Reason(Code.GPU_BUSY, what + shown(claim.name), cure=cure)
        taken.update(() if request.admin else names)
        results += [
            {
                "request": request.path,
                "driver": offer.driver,
                "pool": POOL,
                "device": name,
                "adminAccess": request.admin,
            }
            for name in names
        ]
    config = [{**each, "source": "FromClaim"} for each in _mappings(spec.get("config"))]
    if not _is_small(config):
        return Reason(Code.BAD_REQUEST, f"the configuration of ResourceClaim {shown(claim.name)} is too large")
    document = {
        "metadata": {"uid": claim.uid},
        "status": {
            "allocation": {"devices": {"results": results, "config": config}},
            "reservedFor": [{"resource": "pods", "name": pod.name, "uid": pod.uid}],
        },
    }
    try:
        return parse_resource_claim(msgspec.json.encode(document), claim, offer.driver, POOL)
    except ResourceClaimError as error:
        return Reason(Code.BAD_REQUEST, str(error))
    except (TypeError, ValueError, OverflowError) as error:  # JSON has fewer kinds of values than YAML
        return Reason(Code.BAD_REQUEST, f"ResourceClaim {shown(claim.name)}: {error}")


def _requests(spec: DeviceSpec, driver: str) -> Iterator[list[_Request]]:
    """Yield the alternatives, mostly one, of each request for our classes; v1beta1 has no `exactly` around it."""
    for request in _mappings(spec.get("requests")):
        name, exactly = _word(request.get("name")), request.get("exactly")
        alternatives = [_request(name, exactly if isinstance(exactly, Mapping) else request, driver)]
        if several := _mappings(request.get("firstAvailable")):
            alternatives = [_request(f"{name}/{_word(each.get('name'))}", each, driver) for each in several]
        if all(each.kind for each in alternatives):
            yield alternatives


def _request(path: str, found: Mapping[object, object], driver: str) -> _Request:
    count, mode = found.get("count"), found.get("allocationMode")
    kinds = {driver: "gpu", f"mig.{driver}": "mig"}
    return _Request(
        path,
        kinds.get(_word(found.get("deviceClassName")), ""),
        0 if mode == "All" else count if isinstance(count, int) and count > 0 else 1,
        found.get("adminAccess") is True,
    )


def _devices(request: _Request, offer: Offer, taken: Counter[str]) -> tuple[str, ...]:
    """Return the names of the devices that a request gets, or none if they are too few."""
    fitting = [each for each in offer.devices if each.attributes["type"] == request.kind]
    free = [each.name for each in fitting if request.admin or not (each.taints or taken[each.name] >= offer.shares)]
    count = request.count or len(fitting)
    return tuple(free[:count]) if len(free) >= count else ()


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _mappings(value: object) -> list[Mapping[object, object]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _is_small(value: object) -> bool:
    """Return whether a value has few values in it, however YAML's aliases repeat them."""
    level, number = [value], 0
    while level and number <= _VALUES_MAX:
        number += len(level)
        inner = (
            each.values() if isinstance(each, Mapping) else each for each in level if isinstance(each, Mapping | list)
        )
        level = [each for values in inner for each in values]
    return not level
