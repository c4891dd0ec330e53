"""The checks of containers that open GPUs which nri-gpu did not grant them: holders, and monitors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Final

from nri_gpu.daemon.answers import ExternalStatus
from nri_gpu.decision.refusals import number_of
from nri_gpu.doctor.examined import Examined
from nri_gpu.domain.finding import Finding, in_policy, ok, unseen
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.text import listed
from nri_gpu.stray.allocated import AllocationsUnknownError, allocated

_SUBJECT: Final = "external holders"
# The end that a controller gives its pods' names (kubernetes: apimachinery/pkg/util/rand, SafeEncodeString).
_GENERATED: Final = re.compile(r"(-[bcdf-hj-np-tv-xz2456789]{6,10})?-[bcdf-hj-np-tv-xz2456789]{5}")


def external_findings(seen: Examined) -> Iterator[Finding]:
    """Report how many GPUs each container keeps from others; one that opens all unallocated is probably a monitor."""
    if seen.status is None:
        return
    holding = [each for each in seen.status.external if each.gpu_uuids]
    every = {gpu.uuid for gpu in seen.status.gpus if gpu.kind == "gpu"}
    opening_all = [each for each in holding if every <= set(each.gpu_uuids)]
    given: Mapping[tuple[str, str], frozenset[GpuUuid]] | str = _allocated(seen) if opening_all else {}
    for each in holding:
        yield _finding(seen, each, given) if each in opening_all else ok(_SUBJECT, f"{_holds(each)}")
    if watching := [each.pod for each in seen.status.external if each.watched]:
        yield ok("monitors", f"{listed(dict.fromkeys(watching))}: GPUs that they open stay available to others")


def _holds(each: ExternalStatus) -> str:
    opened = f"opens {number_of(each.gpu_uuids)} that nri-gpu did not grant to it"
    return f"{each.pod}, container {each.container}, {opened}: no other container gets them exclusively"


def _finding(
    seen: Examined, each: ExternalStatus, given: Mapping[tuple[str, str], frozenset[GpuUuid]] | str
) -> Finding:
    """Return the finding of one that opens every GPU. given: the kubelet's allocations by pod, or why unknown."""
    if isinstance(given, str):
        return unseen(_SUBJECT, f"{_holds(each)}; whether the kubelet allocated any to it is not known: {given}")
    namespace, _, name = each.pod.partition("/")
    if given.get((namespace, name)):
        return ok(_SUBJECT, _holds(each))
    pattern = f"{namespace}/{re.sub(f'{_GENERATED.pattern}$', '-*', name)}"
    quoted = ", ".join(f'"{each}"' for each in (*seen.policy.foreign.monitors.patterns, pattern))
    monitors = f"[{quoted}]"
    return in_policy(
        f"{_holds(each)}, and the kubelet allocated none to it: if it only monitors them, set foreign.monitors = "
        f"{monitors}, so that they stay available to others",
        "foreign.monitors",
        monitors,
        _SUBJECT,
    )


def _allocated(seen: Examined) -> Mapping[tuple[str, str], frozenset[GpuUuid]] | str:
    socket = seen.policy.kubelet.podresources
    try:
        return asyncio.run(allocated(str(seen.at(socket)) if socket else ""))
    except AllocationsUnknownError as error:
        return str(error)
