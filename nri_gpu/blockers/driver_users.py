"""The users of the driver, of what was seen on a node: each with what it has, and what ends it. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct, field

from nri_gpu.blockers.blocker import Blocker, BlockerKind, BlockingProcess, NodeGpu
from nri_gpu.blockers.module_references import Console, DriverModule, module_blockers
from nri_gpu.blockers.owners import BlockerOwner, Containers, MpsProcess, endings, owner_of
from nri_gpu.domain.bounds import MODESET_MINOR
from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.node import Majors
from nri_gpu.domain.text import counted, listed, shown
from nri_gpu.driver.table import VERSION
from nri_gpu.stray.judge import usual_node
from nri_gpu.stray.uses import Use
from nri_gpu.verify.oci_bundles import Bundle

PATH_MAX: Final = 120  # characters of a path in a sentence
NODES_MAX: Final = 3  # in a sentence
# The name of a device in /proc/devices -> the module that serves it; all others are of module nvidia.
_SERVED_BY: Final = {"nvidia-uvm": "nvidia_uvm", "nvidia-fs": "nvidia_fs", "gdrdrv": "gdrdrv"}
_DEVICES: Final = re.compile(r"nvidia\b.*|nvidiactl|gdrdrv")
_NODES: Final = {  # of those that `usual_node` does not know
    "nvidia-nvswitch": "/dev/nvidia-nvswitch{}",
    "nvidia-caps-imex-channels": "/dev/nvidia-caps-imex-channels/channel{}",
}
# By its name; staged by us, below `580.95.05-d118b36d` (driver/stage.py); or in the driver container's root.
_DRIVER_FILE: Final = re.compile(
    rf".*/lib(?:cuda|nvcuvid|nvidia-[\w-]+)\.so[\d.]*|.*/{VERSION}-[0-9a-f]{{8}}(?:\.\d+)?/.+|/run/nvidia/driver(?:/.*)?"
)


class SeenUsers(Struct, frozen=True, kw_only=True):
    """The node, as it was seen. devices: the names in /proc/devices, with their majors.

    files: how often all processes have a node open. mps: of MPS, by pid. manifests: files of static pods, by the names
    there.
    """

    devices: Mapping[str, frozenset[int]] = {}
    gpus: tuple[NodeGpu, ...] = ()
    bundles: tuple[Bundle, ...] = ()
    processes: tuple[Use, ...] = ()
    files: Mapping[DeviceNumber, int] = {}
    mps: Mapping[int, MpsProcess] = {}
    manifests: Mapping[str, str] = {}
    modules: tuple[DriverModule, ...] = ()
    console: Console = Console()


def driver_devices(names: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Return the devices of /proc/devices that the driver's modules serve, and those that use it."""
    return {name: majors for name, majors in names.items() if _DEVICES.fullmatch(name)}


class DriverNumbers:
    """The device numbers that the driver's modules serve."""

    def __init__(self, devices: Mapping[str, frozenset[int]], gpus: Iterable[NodeGpu]) -> None:
        self._gpus = tuple(gpus)
        self._devices = {major: name for name, majors in reversed([*devices.items()]) for major in majors}
        self._drm = {(major, minor): f"/dev/dri/{name}" for gpu in self._gpus for name, major, minor in gpu.drm}
        nvidia = next((min(devices[name]) for name in ("nvidia", "nvidia-frontend") if name in devices), None)
        self._majors = Majors(
            nvidia=nvidia,
            nvidia_uvm=min(devices.get("nvidia-uvm", ()), default=None),
            nvidia_caps=min(devices.get("nvidia-caps", ()), default=None),
        )

    @property
    def majors(self) -> frozenset[int]:
        return frozenset({*self._devices, *(major for major, _ in self._drm)})

    def __contains__(self, number: DeviceNumber) -> bool:
        return number[0] in self._devices or number in self._drm

    def node(self, number: DeviceNumber) -> str:
        """Return the usual node of a number."""
        major, minor = number
        if number in self._drm:
            return self._drm[number]
        if major in (self._majors.nvidia, self._majors.nvidia_uvm, self._majors.nvidia_caps):
            return usual_node(number, self._majors)
        name = self._devices[major]
        return _NODES.get(name, f"/dev/{name}").format(minor)

    def module(self, number: DeviceNumber) -> str:
        """Return the module that serves a number."""
        if number in self._drm:
            return "nvidia_drm"
        if number == (self._majors.nvidia, MODESET_MINOR):
            return "nvidia_modeset"
        return _SERVED_BY.get(self._devices[number[0]], "nvidia")

    def gpu(self, number: DeviceNumber) -> NodeGpu | None:
        """Return the GPU that a number opens alone, or None."""
        return next((gpu for gpu in self._gpus if number in self.of_gpu(gpu)), None)

    def of_gpu(self, gpu: NodeGpu) -> frozenset[DeviceNumber]:
        numbers = {(major, minor) for _, major, minor in gpu.drm}
        if self._majors.nvidia is not None:
            numbers.add((self._majors.nvidia, gpu.minor_number))
        return frozenset(numbers)


class _Holdings(Struct):
    """The nodes, files and processes of an owner."""

    granted: set[DeviceNumber] = field(default_factory=set)  # by the specs of its containers
    opened: set[DeviceNumber] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)
    container_ids: set[str] = field(default_factory=set)
    openers: list[Use] = field(default_factory=list)
    mappers: list[Use] = field(default_factory=list)  # of libcuda, that have no node open

    @property
    def numbers(self) -> set[DeviceNumber]:
        return self.granted | self.opened


def blockers(seen: SeenUsers, gpu: NodeGpu | None = None) -> tuple[tuple[Blocker, ...], tuple[Blocker, ...]]:
    """Return who keeps the driver loaded, or that GPU in use; and who else breaks when the driver is replaced.

    Each is in the order in which to end it.
    """
    numbers = DriverNumbers(seen.devices, seen.gpus)
    users = _users(seen, numbers)
    keeping = [
        _blocker(owner, holdings, numbers)
        for (owner, _), holdings in users.items()
        if holdings.numbers and (gpu is None or not holdings.numbers.isdisjoint(numbers.of_gpu(gpu)))
    ]
    if gpu is not None:
        return _in_order(keeping), ()
    files = Counter[str]()
    for number, count in seen.files.items():
        if number in numbers:
            files[numbers.module(number)] += count
    keeping += module_blockers(seen.modules, files, seen.console)
    breaking = (_blocker(owner, each, numbers) for (owner, _), each in users.items() if not each.numbers)
    return _in_order(keeping), _in_order(breaking)


def _in_order(found: Iterable[Blocker]) -> tuple[Blocker, ...]:
    order = list(BlockerKind)
    return tuple(sorted(found, key=lambda each: order.index(each.kind)))


def _users(seen: SeenUsers, numbers: DriverNumbers) -> Mapping[tuple[BlockerOwner, bool], _Holdings]:
    """Return what each owner has, without those that have nothing of the driver.

    Processes that are ended one by one stand apart, as true, where they have no node open.
    """
    containers, found = Containers(seen.bundles, seen.manifests), dict[tuple[BlockerOwner, bool], _Holdings]()
    for bundle in containers.bundles.values():
        # A privileged container's spec has every node of the host: it counts for what its processes have open.
        nodes = () if bundle.spec.privileged else ((node.major, node.minor) for node in bundle.spec.nodes)
        granted = {number for number in nodes if number in numbers}
        mounts = {each.source for each in bundle.spec.mounts or () if _DRIVER_FILE.fullmatch(each.source)}
        if granted or mounts:
            holdings = found.setdefault((containers.owner(bundle), False), _Holdings())
            holdings.granted |= granted
            holdings.mounts |= mounts
            holdings.container_ids.add(bundle.id)
    for use in seen.processes:
        opened = {number for number in use.numbers if number in numbers}
        if opened or use.libcuda:
            owner = owner_of(use, containers, seen.mps)
            holdings = found.setdefault((owner, owner.kind is BlockerKind.PROCESS and not opened), _Holdings())
            holdings.opened |= opened
            (holdings.openers if opened else holdings.mappers).append(use)
            holdings.container_ids |= {id_ for id_ in [containers.id_of(use)] if id_}
    return found


def _blocker(owner: BlockerOwner, holdings: _Holdings, numbers: DriverNumbers) -> Blocker:
    held = sorted(holdings.numbers)
    gpus = (numbers.gpu(number) for number in held)
    nodes = tuple(numbers.node(number) for number in held)
    return Blocker(
        kind=owner.kind,
        name=owner.name,
        what="; ".join(_clauses(holdings, nodes)),
        next=endings(owner, holdings.openers or holdings.mappers),
        gpu_uuids=tuple(dict.fromkeys(gpu.uuid for gpu in gpus if gpu)),
        nodes=nodes,
        libcuda=any(use.libcuda for use in (*holdings.openers, *holdings.mappers)),
        mounts=tuple(sorted(holdings.mounts)),
        processes=tuple(
            BlockingProcess(use.pid, use.started, use.program) for use in (*holdings.openers, *holdings.mappers)
        ),
        namespace=owner.namespace,
        pod=owner.pod,
        container_ids=tuple(sorted(holdings.container_ids)),
        unit=owner.unit,
    )


def _clauses(holdings: _Holdings, nodes: tuple[str, ...]) -> Iterator[str]:
    """Yield what an owner has: nodes, or else what breaks."""
    if nodes:
        opened = f"open in {_running(holdings.openers)}" if holdings.opened else "open in no process"
        yield f"has {listed(nodes, NODES_MAX)}, {opened}"
        return
    if holdings.mappers:
        yield f"maps libcuda, {_running(holdings.mappers)}"
    if holdings.mounts:
        first = shown(min(holdings.mounts), PATH_MAX)
        yield f"mounts {counted(len(holdings.mounts), 'file')} of the driver, such as {first}"


def _running(uses: Iterable[Use]) -> str:
    return listed((f"pid {use.pid} {shown(use.program, PATH_MAX)}" for use in uses), NODES_MAX)
