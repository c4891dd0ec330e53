"""A node described by a TOML file: for demos, CI and clusters without GPUs. config/topologies/ shows the format."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nri_gpu.domain.errors import Fault, InventoryError
from nri_gpu.domain.gpu import ComputeMode, DrmNode, Gpu, GpuUuid, PciBusId
from nri_gpu.domain.node import GpuFault, Inventory, Link, NumaNode
from nri_gpu.inventory.facts import prohibited
from nri_gpu.inventory.identity import parse_bus_id, parse_drm_name, parse_model, parse_uuid, parse_version
from nri_gpu.inventory.kernel import parse_cpulist
from nri_gpu.inventory.report import CODE_MAX, PROCESSES_MAX
from nri_gpu.requirements.grammar import BRANDS
from nri_gpu.simulation.scenario import (
    MAJOR_MAX,
    Scene,
    mig_devices,
    parse_sign,
    read_changes,
    read_events,
    read_facts,
    read_majors,
    read_modules,
    read_offers,
    read_signs,
)
from nri_gpu.simulation.tables import Notes, Table

SCHEMA: Final = 1
GPUS_MAX: Final = 248  # /dev/nvidia0 to 247 (open-gpu-kernel-modules: kernel-open/common/inc/nv-chardev-numbers.h)
DRM_MINOR_MAX: Final = 2**20 - 1  # 20 bits (linux/kdev_t.h)
NUMA_MAX: Final = 1023  # MAX_NUMNODES
NVLINK_MAX: Final = 36  # NVML_NVLINK_MAX_LINKS
PCIE_WORDS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first

_ARCH: Final = re.compile(r"(\d{1,2})\.(\d{1,2})")
_SYNTAX_PLACE: Final = re.compile(r"\(at line (\d+), column \d+\)$")


class TopologyError(InventoryError):
    """A topology file with faults: all of them at once."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


def load_topology(path: str | Path, *, wall: Callable[[], float] = time.time) -> Inventory:
    """The node of a topology file.

    Raises: TopologyError.
    """
    return load_scene(path, wall=wall).after(0)


def load_scene(path: str | Path, *, wall: Callable[[], float] = time.time) -> Scene:
    """The same with the changes that the file plays later.

    Raises: TopologyError.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError((Fault(str(path), "", error.strerror or str(error)),)) from error
    except UnicodeDecodeError as error:
        raise TopologyError((Fault(str(path), "", f"is not UTF-8: {error.reason}"),)) from error
    return parse_scene(text, str(path), wall())


def parse_topology(text: str, file: str, taken_at: float) -> Inventory:
    """The node that `text` describes, at its beginning; `file` names it in faults.

    Raises: TopologyError; InventoryError: a fault that it plays from the beginning.
    """
    return parse_scene(text, file, taken_at).after(0)


def parse_scene(text: str, file: str, taken_at: float) -> Scene:
    """The same with the changes that it plays later. Raises: TopologyError."""
    from nri_gpu.simulation.contradictions import contradicting, with_lines  # a node with NVML needs none of it

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError((_syntax_fault(file, str(error)),)) from error
    notes = Notes(file)
    root = Table(notes, data)
    inventory = _inventory(root, taken_at)
    changes = read_changes(root, inventory)
    root.done()
    scene = Scene(inventory, changes)
    for path, sentence in tuple(contradicting(data, scene, notes.faults)):
        notes.fault(path, sentence)
    if notes.faults:
        raise TopologyError(with_lines(notes.faults, text))
    return scene


def _syntax_fault(file: str, message: str) -> Fault:
    place = _SYNTAX_PLACE.search(message)
    return Fault(file, "", message, int(place.group(1)) if place else None)


def _inventory(root: Table, taken_at: float) -> Inventory:
    root.number("schema", SCHEMA, SCHEMA)
    node = root.table("node")
    driver, cuda = (node.parsed(key, parse_version, default="") or "" for key in ("driver", "cuda"))
    majors = read_majors(node.table("majors", optional=True))
    modules = read_modules(node.table("modules", optional=True))
    offers = read_offers(node)
    node.done()
    gpus = sorted((_gpu(table) for table in root.tables("gpu")), key=lambda gpu: gpu.index)
    indices = frozenset(gpu.index for gpu in gpus)
    links = sorted((_link(table, indices) for table in root.tables("link")), key=lambda link: (link.a, link.b))
    numa = sorted((_numa_node(table) for table in root.tables("numa")), key=lambda each: each.number)
    faults = sorted((_gpu_fault(table) for table in root.tables("fault")), key=lambda each: each.index)
    script = read_events(root, indices)
    return Inventory(
        taken_at=taken_at,
        gpus=tuple(gpus),
        faults=tuple(faults),
        links=tuple(links),
        numa=tuple(numa),
        majors=majors,
        driver_version=driver,
        cuda_version=cuda,
        simulated=True,
        extras=offers,
        script=script,
        modules=modules,
    )


def _gpu(table: Table) -> Gpu:
    """A GPU; where a value is wrong, that is noted and something stands in, since nobody will see it."""
    index = table.number("index", 0, GPUS_MAX - 1)
    minor = table.number("minor", 0, GPUS_MAX - 1)
    uuid, bus_id = table.parsed("uuid", parse_uuid), table.parsed("bus_id", parse_bus_id)
    for key, value in (("index", index), ("minor", minor), ("uuid", uuid), ("bus_id", bus_id)):
        table.once(key, value, among="gpu")
    mig_enabled, instances = table.flag_or_tables("mig")
    memory_bytes = table.number("memory_bytes", 0, 2**63 - 1)
    facts = read_facts(table)
    unavailable = table.text("unavailable", default="") or ""
    if facts.compute_mode is ComputeMode.PROHIBITED:
        unavailable = unavailable or prohibited(bus_id or "")
    gpu = Gpu(
        index=index or 0,
        minor_number=minor or 0,
        uuid=uuid or GpuUuid(""),
        pci_bus_id=bus_id or PciBusId(""),
        model=table.parsed("model", parse_model) or "",
        memory_bytes=memory_bytes or 0,
        arch=table.parsed("arch", _parse_arch) or (0, 0),
        numa_node=table.number("numa", 0, NUMA_MAX, optional=True),
        mig_enabled=mig_enabled,
        brand=_brand(table),
        unavailable=unavailable,
        mig=mig_devices(instances, minor or 0, memory_bytes),
        drm=tuple(_drm(each) for each in table.tables("drm")),
        processes=table.number("processes", 0, PROCESSES_MAX, optional=True),
        signs=read_signs(table) or (),
        architecture=facts.architecture,
        cpus=facts.cpus,
        compute_mode=facts.compute_mode,
        persistence=facts.persistence,
        ecc=facts.ecc,
        addressing=facts.addressing,
        fabric=facts.fabric,
    )
    table.done()
    return gpu


def _drm(table: Table) -> DrmNode:
    name = table.parsed("name", parse_drm_name)
    table.once("name", name, among="drm")
    node = DrmNode(
        name=name or "",
        major=table.number("major", 1, MAJOR_MAX) or 0,
        minor=table.number("minor", 0, DRM_MINOR_MAX) or 0,
    )
    table.done()
    return node


def _brand(table: Table) -> str:
    """NVML's word for it; empty where the file gives none."""
    brand = table.text("brand", default="") or ""
    if brand and brand not in BRANDS:
        table.wrong("brand", f"{brand!r} is no brand of NVML's ({', '.join(BRANDS)})")
    return brand


def _parse_arch(text: str) -> tuple[int, int]:
    """Text and not a number, because 8.10 is not 8.1. Raises: ValueError."""
    match = _ARCH.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a compute capability ("9.0")')
    return int(match.group(1)), int(match.group(2))


def _link(table: Table, indices: frozenset[int]) -> Link:
    a, b = (table.number(key, 0, GPUS_MAX - 1) for key in ("a", "b"))
    for key, end in (("a", a), ("b", b)):
        if end is not None and end not in indices:
            table.wrong(key, f"there is no GPU with index {end}")
    if a is not None and b is not None:
        if a >= b:
            table.wrong("a", f"must be less than b: {a}, {b}")
        table.once("", (a, b), among="link")
    link = Link(
        a=a or 0,
        b=b or 0,
        pcie=table.parsed("pcie", _parse_pcie) or "",
        nvlink=table.number("nvlink", 0, NVLINK_MAX, optional=True) or 0,
    )
    table.done()
    return link


def _numa_node(table: Table) -> NumaNode:
    number = table.number("node", 0, NUMA_MAX)
    table.once("node", number, among="numa")
    node = NumaNode(number or 0, table.parsed("cpus", parse_cpulist) or "", memory=table.flag("memory", default=True))
    table.done()
    return node


def _parse_pcie(text: str) -> str:
    """Raises: ValueError."""
    if text not in PCIE_WORDS:
        raise ValueError(f"{text!r} is none of {', '.join(PCIE_WORDS)}")
    return text


def _gpu_fault(table: Table) -> GpuFault:
    """A GPU that is there, and could not be described."""
    index = table.number("index", 0, GPUS_MAX - 1)
    uuid, bus_id = table.parsed("uuid", parse_uuid, optional=True), table.parsed("bus_id", parse_bus_id, optional=True)
    for key, value in (("index", index), ("uuid", uuid), ("bus_id", bus_id)):
        table.once(key, value, among="gpu")
    fault = GpuFault(
        index=index or 0,
        reason=table.text("reason") or "",
        code=table.number("code", 0, CODE_MAX, optional=True) or 0,
        sign=table.parsed("sign", parse_sign, optional=True),
        uuid=uuid or "",
        pci_bus_id=bus_id or "",
    )
    table.done()
    return fault
