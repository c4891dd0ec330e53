"""The part of a container that the observer shows: what has to do with NVIDIA's devices, within bounds. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from nri_gpu.domain.container import ContainerId, DeviceNumber
from nri_gpu.domain.names import is_nvidia_device
from nri_gpu.driver.table import VERSION
from nri_gpu.observe.bundles import ASKED, CAPABILITIES, FoundContainer
from nri_gpu.observe.looks import DeviceRequest, SeenContainer
from nri_gpu.observe.runtime_table import CONTAINERD, CRI, CRIO
from nri_gpu.verify.oci_bundles import NAME_MAX
from nri_gpu.verify.oci_spec import Spec, SpecRule

TEXT_MAX: Final = 256  # characters of a variable's value
NAMES_MAX: Final = 64  # devices by name: of an annotation, of a request
REQUESTS_MAX: Final = 16
NODES_MAX: Final = 256
VERSIONS_MAX: Final = 8
_CDI: Final = "cdi.k8s.io/"  # begins the keys of annotations whose values are CDI names with commas between them
# A library of the driver by its name, or a folder of our own, such as `580.95.05-d118b36d` (driver/stage.py).
_DRIVER_FILE: Final = re.compile(
    rf"/lib(?:cuda|nvidia-ml)\.so\.({VERSION})$|/({VERSION})-[0-9a-f]{{8}}(?:\.\d+)?(?:/|$)", re.MULTILINE
)


class Numbers:
    """NVIDIA's device numbers on this node. majors: all of whose numbers are NVIDIA's. known: all that are judged."""

    def __init__(self, majors: Iterable[int], known: Iterable[DeviceNumber]) -> None:
        self.majors = frozenset(majors)
        self.known = tuple(sorted({*known}))
        self._set = frozenset(self.known)
        self._allowed: dict[tuple[SpecRule, ...], tuple[DeviceNumber, ...]] = {}  # most containers' rules are alike

    def __contains__(self, number: DeviceNumber) -> bool:
        return number[0] in self.majors or number in self._set

    def allowed(self, spec: Spec) -> tuple[DeviceNumber, ...]:
        """Return those that the spec's rules let it open."""
        if spec.rules not in self._allowed:
            self._allowed[spec.rules] = tuple(number for number in self.known if spec.opens(number))
        return self._allowed[spec.rules]


def seen_container(
    found: FoundContainer, opens: tuple[DeviceNumber, ...] | None, fault: str, numbers: Numbers
) -> SeenContainer | None:
    """Return a container as it is shown, or None if it has nothing to do with NVIDIA's devices.

    opens: the numbers that the kernel lets it open, or None with the fault that says why they were not seen.
    """
    bundle, spec = found.bundle, found.bundle.spec
    nodes = {(node.major, node.minor) for node in spec.nodes}
    cdi = [name for key, text in (spec.annotations or {}).items() if key.startswith(_CDI) for name in text.split(",")]
    # The runtimes of pods write these annotations; of Docker, Podman and nerdctl they are free text.
    in_pod = found.runtime == CRIO or (found.runtime == CONTAINERD and bundle.namespace == CRI)
    faults = [each for each in (bundle.fault, found.fault, "" if bundle.fault else fault) if each]
    seen = SeenContainer(
        id=ContainerId(bundle.id),
        runtime=found.runtime,
        namespace=bundle.pod_namespace[:NAME_MAX] if in_pod else "",
        pod=bundle.pod_name[:NAME_MAX] if in_pod else "",
        pod_uid=bundle.pod_uid[:NAME_MAX] if in_pod else "",
        name=bundle.name if in_pod else found.name[:NAME_MAX] or bundle.id[:12],
        sandbox=in_pod and bundle.sandbox,
        privileged=spec.privileged,
        pid=bundle.pid,
        began_s=bundle.written_s or None,
        nodes=tuple(sorted(number for number in nodes if number in numbers)[:NODES_MAX]),
        allowed=numbers.allowed(spec),
        opens=opens,
        asked=spec.env.get(ASKED, "")[:TEXT_MAX],
        capabilities=spec.env.get(CAPABILITIES, "")[:TEXT_MAX],
        requests=tuple(_clipped(each) for each in found.requests if _asks(each))[:REQUESTS_MAX],
        cdi=tuple(name[:NAME_MAX] for name in dict.fromkeys(cdi) if is_nvidia_device(name))[:NAMES_MAX],
        hooks=spec.nvidia_hooks,
        driver_versions=_driver_versions(spec),
        fault="; ".join(faults),
    )
    return seen if _concerns(seen) else None


def _concerns(seen: SeenContainer) -> bool:
    shown = (seen.nodes, seen.allowed, seen.opens, seen.asked, seen.requests, seen.cdi, seen.hooks)
    return any(shown) or bool(seen.driver_versions)


def _asks(request: DeviceRequest) -> bool:
    """Return whether an entry is of NVIDIA's devices: by `--gpus`, whose driver may be empty, or by CDI names."""
    return request.driver != "cdi" or any(map(is_nvidia_device, request.ids))


def _clipped(request: DeviceRequest) -> DeviceRequest:
    names = request.ids if request.driver != "cdi" else filter(is_nvidia_device, request.ids)
    ids = tuple(name[:NAME_MAX] for name in names)[:NAMES_MAX]
    return DeviceRequest(driver=request.driver[:NAME_MAX], count=request.count, ids=ids)


def _driver_versions(spec: Spec) -> tuple[str, ...]:
    """Return the versions of the driver whose files are mounted in it."""
    paths = "\n".join(path for mount in spec.mounts or () for path in (mount.source, mount.destination))
    found = {match[1] or match[2] for match in _DRIVER_FILE.finditer(paths)}
    return tuple(sorted(found)[:VERSIONS_MAX])
