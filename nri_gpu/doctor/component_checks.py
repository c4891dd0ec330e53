"""The checks of what gives GPUs to containers beside nri-gpu: other components, and who opens GPUs ungranted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from nri_gpu.daemon.answers import ExternalStatus
from nri_gpu.decision.refusals import number_of
from nri_gpu.doctor.cdi_checks import docker_engine
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.allocation import NVIDIA_DRIVER
from nri_gpu.domain.finding import Finding, error, in_policy, ok, unseen, warning
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.text import listed
from nri_gpu.host.components import OTHERS, components, node_advice
from nri_gpu.policy.model import Disarm
from nri_gpu.stray.allocated import AllocationsUnknownError, allocated

_SUBJECT: Final = "external holders"
# The end that a controller gives its pods' names (kubernetes: apimachinery/pkg/util/rand, SafeEncodeString).
_GENERATED: Final = re.compile(r"(-[bcdf-hj-np-tv-xz2456789]{6,10})?-[bcdf-hj-np-tv-xz2456789]{5}")


def other_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Check NVIDIA's runtime, hooks, device plugins and DRA driver, and CDI specifications with hooks."""
    advice = node_advice(seen.policy, seen.root)
    yield from advice
    default = runtime.default_handler if runtime and "nvidia" in runtime.default_handler else ""
    if runtime and default and seen.policy.environment.disarm is not Disarm.ALL:
        yield error(
            "default runtime",
            f"{default} is the default runtime of {runtime.name}: any image that sets NVIDIA_VISIBLE_DEVICES gets "
            f"GPUs{' once CRI starts' if runtime.cri_fault else ''}, past nri-gpu and its policy",
            *runtime.default_to_runc(seen),
        )
    yield from _docker(seen)
    found = tuple(components(seen.root, seen.policy.kubelet.dir, str(Path(seen.policy.kubelet.registry_dir).parent)))
    if not advice and not default:
        yield ok(OTHERS, "no other component that assigns GPUs to containers" if not found else "provided for")


def _docker(seen: Examined) -> Iterator[Finding]:
    """Check Docker's default runtime, which Docker's containers alone use: they never come to NRI."""
    engine = docker_engine(seen)
    settings = engine.settings
    if settings and "nvidia" in settings.default_runtime:
        yield warning(
            "Docker",
            f"{engine.path} makes {settings.default_runtime} Docker's default runtime: any image that sets "
            "NVIDIA_VISIBLE_DEVICES gets GPUs there, and nri-gpu does not see it",
            f"# in {engine.path}, remove the line:",
            f'"default-runtime": "{settings.default_runtime}"',
            f"systemctl reload {engine.unit}    # then give GPUs by `nri-gpu cdi generate` and --device",
        )


def external_findings(seen: Examined) -> Iterator[Finding]:
    """Report how many GPUs each container keeps from others; one that opens all unallocated is probably a monitor."""
    if seen.status is None:
        return
    holding = [each for each in seen.status.external if each.gpu_uuids]
    every = {gpu.uuid for gpu in seen.status.gpus if gpu.kind == "gpu"}
    opening_all = [each for each in holding if every <= set(each.gpu_uuids) and not each.prepared]
    given: Mapping[tuple[str, str], frozenset[GpuUuid]] | str = _allocated(seen) if opening_all else {}
    for each in holding:
        yield _finding(seen, each, given) if each in opening_all else ok(_SUBJECT, f"{_holds(each)}")
    if watching := [each.pod for each in seen.status.external if each.watched]:
        yield ok("monitors", f"{listed(dict.fromkeys(watching))}: GPUs that they open stay available to others")


def _holds(each: ExternalStatus) -> str:
    opened = f"opens {number_of(each.gpu_uuids)} that nri-gpu did not grant to it"
    if each.prepared:
        opened = f"has a claim of {NVIDIA_DRIVER}, which prepared {each.prepared} for it"
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
