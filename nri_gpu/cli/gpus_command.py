"""`nri-gpu gpus`: the node's GPUs, for people and for programs.

Health is a running daemon's to know, so it is asked, too.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, convert, to_builtins

from nri_gpu.cli.ask_daemon import with_cordons, with_health
from nri_gpu.cli.follow_daemon import follow, followed_policy
from nri_gpu.cli.page import Tone
from nri_gpu.cli.render import answer, gpus_page, lines, transition_lines
from nri_gpu.daemon.answers import DaemonStatus, FaultStatus, HealthStatus, UnitStatus
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.edits import NodeExtra
from nri_gpu.domain.errors import CommandError, Exit, InventoryError, cause_of
from nri_gpu.domain.gpu import DrmNode, Ecc, Gpu, GpuDescription, MigDescription, Unit
from nri_gpu.domain.health import History
from nri_gpu.domain.node import Inventory, KernelGpu, Link
from nri_gpu.domain.text import counted
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.inventory.topology_source import TopologySource, ask_once, source_of
from nri_gpu.system.clocks import since_boot_s
from nri_gpu.system.node_name import NamedNode, this_node

LINK: Final = "it is a link; name the file that it points to, or print with `--record -`"


class MigDeviceLine(MigDescription, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A MIG device: a compute instance inside a GPU instance. index: its place in NVML's list, the j of `i:j`.

    profile: as `nvidia-smi -L` writes it, lower case. memory_bytes: of its GPU instance. gpu_instance_minor,
    compute_instance_minor: of its nodes /dev/nvidia-caps/nvidia-capN. unavailable: why it cannot be granted; empty when
    it can. processes: how many have it open; null where NVML cannot tell. engines: those of the GPU that it has. pool,
    offered_to: as the GPU's.
    """

    index: int
    gpu_instance_minor: int | None
    compute_instance_minor: int | None
    health: HealthStatus
    pool: str | None
    offered_to: tuple[str, ...] | None


class GpuLine(GpuDescription, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A GPU. index: NVML's, which is no id: it moves when a GPU is lost. minor_number: N of /dev/nvidiaN.

    memory_bytes: of its framebuffer. arch: compute capability, `9.0`; architecture: its name, `hopper`. cpus: those
    nearest to it, in the kernel's list syntax. unavailable: why it cannot be granted; empty when it can. drm: its nodes
    below /dev/dri. processes: how many have it open. pcie_root: of its PCI tree, `pci0000:c9`. What NVML does not tell
    is empty or null. pool: in the running daemon's policy; empty: in none. offered_to: how that policy lets new pods
    have it, `annotation`, `kubelet`, `dra`; both null without a daemon.
    """

    arch: str | None
    mig_enabled: bool
    mig: tuple[MigDeviceLine, ...]
    drm: tuple[DrmNode, ...]
    health: HealthStatus
    ecc: Ecc | None
    pool: str | None
    offered_to: tuple[str, ...] | None


class MajorsLine(Struct, frozen=True):
    """Character device majors of the driver's kernel modules; null: that module is not loaded."""

    nvidia: int | None
    nvidia_uvm: int | None
    nvidia_caps: int | None


class ExtraNode(Struct, frozen=True):
    """A character device node of the host."""

    path: str
    major: int
    minor: int


class ExtraLine(Struct, frozen=True):
    """A node's offer of one extra. lacking: why it cannot be given; empty if it can. mounts: places in a container.

    channels: how many IMEX channels there are.
    """

    lacking: str
    nodes: tuple[ExtraNode, ...]
    mounts: tuple[str, ...]
    channels: int


class SnapshotLine(Struct, frozen=True):
    """The running daemon's snapshot of the node. age_s: since NVML confirmed it; null: not yet."""

    number: int
    age_s: float | None


class NumaLine(Struct, frozen=True):
    """A NUMA node that a GPU is nearest to. cpus: in the kernel's list syntax. memory: whether it has any."""

    node: int
    cpus: str
    memory: bool


class GpusDocument(Struct, frozen=True, kw_only=True, tag_field="schema", tag="nri-gpu/gpus/v1"):
    """The GPUs of this node. fault: why nothing can be granted at all; empty when something can.

    simulated: from a topology file. modeset: whether nvidia-modeset is loaded; null: unknown. extras: by name.
    modules: version of each of the driver's kernel modules. snapshot, transitions: of the running daemon; null without
    one. unlisted: GPUs that the kernel shows and NVML does not list. faults: GPUs that cannot be described.
    """

    node: NamedNode
    simulated: bool
    driver_version: str
    cuda_version: str
    fault: str
    modeset: bool | None
    majors: MajorsLine
    extras: Mapping[str, ExtraLine]
    modules: Mapping[str, str]
    snapshot: SnapshotLine | None
    gpus: tuple[GpuLine, ...]
    unlisted: tuple[KernelGpu, ...]
    faults: tuple[FaultStatus, ...]
    links: tuple[Link, ...]
    numa: tuple[NumaLine, ...]
    transitions: History | None


def run(args: argparse.Namespace) -> int:
    """Print the GPUs. Return 1 if none can be granted, 69 if NVML cannot be asked."""
    status = follow(args)
    try:
        inventory = ask_once(_source(args, status))
    except InventoryError as error:
        if not error.unlisted or args.record:
            raise
        inventory = Inventory(taken_at=since_boot_s(), fault=str(error), unlisted=error.unlisted)
    if args.record:  # as NVML has it: a GPU that is unhealthy today is not so in a simulation
        return _record(inventory, args.record)
    inventory = with_health(inventory, status) if status else inventory
    if not args.gpus:
        inventory = with_cordons(inventory, status, followed_policy(args, status).usage)
    page = [*gpus_page(inventory, status), *lines(transition_lines(status.transitions if status else None), Tone.FAINT)]
    answer(args, gpus_document(inventory, status), page)
    if inventory.fault:
        return Exit.UNAVAILABLE
    return Exit.OK if any(not why_not(unit) for unit in inventory.units) else Exit.FINDING


def _source(args: argparse.Namespace, status: DaemonStatus | None) -> TopologySource | NvmlSource:
    """Return NVML, with the driver where policy says it is, or a topology file. Raises: PolicyError."""
    if args.gpus:
        return source_of(args.gpus, "/")
    driver = followed_policy(args, status).driver
    return source_of(None, driver.root, driver.library_dirs, stage_dir=driver.stage_dir)


def _record(inventory: Inventory, path: str) -> int:
    """Write a topology file that `--gpus` simulates, or print it for the path `-`."""
    from nri_gpu.inventory.record import topology_text

    text = topology_text(inventory, "Recorded by `nri-gpu gpus --record`.")
    if path == "-":
        print(text, end="")
        return Exit.OK
    try:
        with open(path, "w", encoding="utf-8", opener=_no_link) as file:
            file.write(text)
    except OSError as error:
        why = LINK if error.errno == errno.ELOOP else cause_of(error)
        raise CommandError(Exit.of(error), f"{path} cannot be written: {why}") from None
    print(f"{path}: {counted(len(inventory.gpus), 'GPU')}; try it with `nri-gpu gpus --gpus {path}`")
    return Exit.OK


def _no_link(path: str, flags: int) -> int:
    """Open only a file, never a link: in a folder that others can write, a link may lead to a file of root's."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def gpus_document(inventory: Inventory, status: DaemonStatus | None = None) -> GpusDocument:
    """Return the document. status: of the running daemon, if there is one."""
    snapshot, majors = status.node if status else None, inventory.majors
    told = {each.uuid: each for each in status.gpus} if status else {}
    return GpusDocument(
        node=this_node(),
        simulated=inventory.simulated,
        driver_version=inventory.driver_version,
        cuda_version=inventory.cuda_version,
        fault=inventory.fault,
        modeset=majors.modeset,
        majors=MajorsLine(majors.nvidia, majors.nvidia_uvm, majors.nvidia_caps),
        extras={extra.value: _extra_line(offer) for extra, offer in inventory.extras.items()},
        modules=inventory.modules,
        snapshot=SnapshotLine(snapshot.inventory_number, snapshot.inventory_age_s) if snapshot else None,
        gpus=tuple(_gpu_line(gpu, told) for gpu in inventory.gpus),
        unlisted=inventory.unlisted,
        faults=convert(inventory.faults, tuple[FaultStatus, ...], from_attributes=True),
        links=inventory.links,
        numa=tuple(NumaLine(each.number, each.cpus, each.memory) for each in inventory.numa),
        transitions=status.transitions if status else None,
    )


def _extra_line(offer: NodeExtra) -> ExtraLine:
    nodes = tuple(ExtraNode(node.path, node.major, node.minor) for node in offer.nodes)
    mounts = tuple(mount.destination for mount in offer.mounts)
    return ExtraLine(offer.lacking, nodes, mounts, offer.channels.count if offer.channels else 0)


def _gpu_line(gpu: Gpu, told: Mapping[str, UnitStatus]) -> GpuLine:
    """Return a GPU's fields as the inventory names them; `arch` is a text, and signs are in `health`."""
    parts = [{**to_builtins(part.device), **_state(part, told)} for part in gpu.parts]
    changed = {**_state(gpu, told), "arch": gpu.arch_text or None, "mig": parts}
    return convert({**to_builtins(gpu), **changed}, GpuLine)


def _state(unit: Unit, told: Mapping[str, UnitStatus]) -> Mapping[str, object]:
    daemons = told.get(unit.uuid)
    pool, ways = (daemons.pool, daemons.offered_to) if daemons and daemons.offered_to is not None else (None, None)
    health = to_builtins(HealthStatus.of(unit))
    return {"unavailable": why_not(unit), "health": health, "pool": pool, "offered_to": ways}
