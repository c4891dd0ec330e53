"""Compiles the made-up libnvidia-ml.so.1 into a driver root, and tells it what machine to play."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import astuple

from nri_gpu.domain.bounds import ADDRESSING, ARCHITECTURES
from nri_gpu.domain.gpu import ComputeMode, Fabric, FabricState, Gpu, MigDevice
from nri_gpu.domain.health import RecoveryAction
from nri_gpu.domain.node import Inventory
from nri_gpu.request.image_requirements import BRANDS
from tests.support import packages

SOURCE = Path(__file__).with_name("fake.c")
DRIVER = "580.95.05"
LIB_DIR = f"usr/lib/{os.uname().machine}-linux-gnu"
SWITCH = -1  # as the far end of an NVLink
WHOLE = (0xFFFFFFFF, 0xFFFFFFFF)  # nvmlEventData_t's ids, where an event is the whole GPU's
_LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


class FakeMig(Struct, frozen=True, kw_only=True):
    """One MIG device. place: its index, empty ones between are holes. profile: empty where the name has none.

    start: the first of its GPU instance's memory slices, -1 where the driver does not tell. running: processes with a
    compute and with a graphics context, -1 where the driver does not tell; the same ones as far as both have them.
    """

    place: int
    uuid: str
    gi: int
    ci: int = 0
    start: int = -1
    slices: int = 1
    compute_slices: int | None = None
    memory_mib: int = 9728
    profile: str = ""
    running: tuple[int, int] = (0, 0)
    engines: tuple[int, ...] = (0, 0, 0, 0, 0, 0)  # as MigEngines has them


class FakeHealth(Struct, frozen=True, kw_only=True):
    """Numbers of nvml.h. recovery_action: -1 where the driver does not know the field. remap_pending: -1: no remaps."""

    remap_pending: int = 0
    remap_failed: int = 0
    clock_reasons: int = 0
    recovery_action: int = 0
    fabric_state: int = 0


class FakeFacts(Struct, frozen=True, kw_only=True):
    """Numbers of nvml.h, -1 for what this GPU or driver has not. ecc: current and pending mode."""

    architecture: int = 9
    compute_mode: int = 0
    persistence: int = 1
    ecc: tuple[int, int] = (1, 1)
    addressing: int = 0


class FakeFabric(Struct, frozen=True, kw_only=True):
    """A place in an NVLink fabric. cluster: 32 hex digits."""

    state: int = 3
    status: int = 0
    clique: int = 0
    health_mask: int = 0
    cluster: str = "0" * 32


class FakeGpu(Struct, frozen=True, kw_only=True):
    """What NVML says of one GPU; its index is its place in the list.

    minor: None for the index. numa: -1 where the host does not tell. mig: current and pending mode, (-1, -1) where
    the GPU has none. brand: nvmlBrandType_t, -1 where the driver does not tell. nvlinks: what is at the far end of its
    links, by index, or SWITCH. running: as a MIG device's. first_pid: of them; 0: one that no machine has. facts,
    fabric: None where the driver tells nothing of them.
    """

    minor: int | None = None
    uuid: str = ""
    domain: int = 0
    bus: int | None = None
    model: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 85_520_809_984
    arch: tuple[int, int] = (9, 0)
    numa: int = 0
    mig: tuple[int, int] = (0, 0)
    brand: int = 14
    nvlinks: tuple[int, ...] = ()
    parts: tuple[FakeMig, ...] = ()
    running: tuple[int, int] = (0, 0)
    first_pid: int = 0
    health: FakeHealth | None = None
    facts: FakeFacts | None = None
    fabric: FakeFabric | None = None


class FakeProcess(Struct, frozen=True):
    """A process on a GPU. kind: c, g or m, for MPS. utilization: -1 where the driver tells it of no process."""

    pid: int
    memory_bytes: int = 2**30
    utilization: int = 0
    kind: str = "c"


class FakeUse(Struct, frozen=True, kw_only=True):
    """What a GPU or a MIG device does; -1: not supported. place: of the MIG device, -1 for the GPU itself."""

    gpu: int = 0
    place: int = -1
    used_bytes: int = 2**30
    total_bytes: int = 80 * 2**30
    utilization: int = 0
    memory_rate: int = 0
    temperature: int = 31
    milliwatts: int = 71_200
    limit_milliwatts: int = 700_000
    sm_mhz: int = 345
    memory_mhz: int = 2619
    processes: tuple[FakeProcess, ...] = ()


class Act(Struct, frozen=True):
    """What the library does in one function instead of, or besides, answering.

    function: the symbol's name. gpu: index, -1 for any. code: for `fail`, an NVML return code; for `babble`, which
    nonsense.
    """

    function: str
    deed: Literal["fail", "hang", "crash", "say", "rubbish", "deny", "babble"]
    code: int = 0
    gpu: int = -1


def build_fake_nvml(
    driver_root: Path,
    gpus: Sequence[FakeGpu] = (),
    faults: Iterable[Act] = (),
    *,
    ancestors: Iterable[tuple[int, int, str]] = (),
    without: Iterable[str] = (),
    lib_dir: str = LIB_DIR,
    driver: str = DRIVER,
    quiet: bool = False,
) -> Path:
    """A driver root whose NVML plays these GPUs; `driver_root` itself, made where it is missing.

    ancestors: (a, b, word of `nvidia-smi topo -m`). without: symbols that this driver does not have. quiet: it notes no
    call, which costs more than the call.
    """
    folder = driver_root / lib_dir
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"libnvidia-ml.so.{driver}"
    fresh = folder / "fresh.so"  # renamed into place: a process may have the old one mapped
    fresh.write_bytes(_compiled(tuple(sorted(without))))
    fresh.rename(library)
    link = folder / "libnvidia-ml.so.1"
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    configure(driver_root, gpus, faults, ancestors=ancestors, lib_dir=lib_dir, driver=driver, quiet=quiet)
    return driver_root


@functools.cache
def _compiled(without: tuple[str, ...]) -> bytes:
    """The library, compiled once a test run."""
    with tempfile.TemporaryDirectory() as folder:
        exports, library = Path(folder, "exports.map"), Path(folder, "library.so")
        local = "".join(f"{name}; " for name in without)
        exports.write_text(f"{{ global: nvml*; local: {local}*; }};\n", encoding="ascii")
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        linker = ["-Wl,-soname,libnvidia-ml.so.1", f"-Wl,--version-script={exports}"]
        subprocess.run([*packages.gcc(), *flags, *linker, "-o", library, SOURCE], check=True, timeout=60)
        return library.read_bytes()


def configure(
    driver_root: Path,
    gpus: Sequence[FakeGpu] = (),
    faults: Iterable[Act] = (),
    *,
    ancestors: Iterable[tuple[int, int, str]] = (),
    lib_dir: str = LIB_DIR,
    driver: str = DRIVER,
    quiet: bool = False,
) -> None:
    """Changes the machine that is played, from the library's next nvmlInit on."""
    lines = [f"driver {driver}", "cuda 13000", f"quiet {quiet:d}"]
    lines += [_gpu_line(index, gpu) for index, gpu in enumerate(gpus)]
    for index, gpu in enumerate(gpus):
        lines += [_mig_line(index, gpu, part) for part in gpu.parts]
        running = {-1: gpu.running, **{part.place: part.running for part in gpu.parts}}
        lines += [f"running {index} {place} {both[0]} {both[1]}" for place, both in running.items() if any(both)]
        lines += [f"pids {gpu.first_pid}"] if gpu.first_pid else []
        lines += [_health_line(index, gpu.health)] if gpu.health else []
        lines += [_facts_line(index, gpu.facts)] if gpu.facts else []
        lines += [_fabric_line(index, gpu.fabric)] if gpu.fabric else []
        lines += [f"nvlink {index} {link} {remote}" for link, remote in enumerate(gpu.nvlinks)]
    lines += [f"ancestor {a} {b} {_LEVELS[word]}" for a, b, word in ancestors]
    lines += [f"act {act.function} {act.gpu} {act.deed} {act.code}" for act in faults]
    _rewrite(driver_root / lib_dir / "fake-nvml.conf", lines)


def _rewrite(path: Path, lines: Iterable[str]) -> None:
    # One write, never shorter than what was there: a library that is reading sees one machine or the other, and the
    # folder stays the same driver's, which a new name in it would end.
    content = "".join(f"{line}\n" for line in lines).encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(file, content.ljust(os.fstat(file).st_size, b"\n"), 0)
    finally:
        os.close(file)


def use(driver_root: Path, *uses: FakeUse) -> None:
    """Changes what GPUs do, from the next call on."""
    lines = [f"usage {' '.join(map(str, astuple(each)[:-1]))}" for each in uses]
    lines += [
        f"process {each.gpu} {each.place} {one.kind} {one.pid} {one.memory_bytes} {one.utilization}"
        for each in uses
        for one in each.processes
    ]
    _rewrite(driver_root / LIB_DIR / "fake-nvml.usage", lines)


def _facts_line(index: int, facts: FakeFacts) -> str:
    ecc = f"{facts.ecc[0]} {facts.ecc[1]}"
    return f"facts {index} {facts.architecture} {facts.compute_mode} {facts.persistence} {ecc} {facts.addressing}"


def _fabric_line(index: int, fabric: FakeFabric) -> str:
    return f"fabric {index} {fabric.state} {fabric.status} {fabric.clique} {fabric.health_mask:#x} {fabric.cluster}"


def _health_line(index: int, health: FakeHealth) -> str:
    remap = f"{health.remap_pending} {health.remap_failed}"
    return f"health {index} {remap} {health.clock_reasons:#x} {health.recovery_action} {health.fabric_state}"


def happen(driver_root: Path, gpu: int, kind: int, data: int = 0, part: tuple[int, int] = WHOLE) -> None:
    """An event, for whoever waits for it. gpu: -1 for one that does not say whose it is. data: the XID.

    part: ids of the GPU instance and the compute instance that it happened to.
    """
    with (driver_root / LIB_DIR / "fake-nvml.events").open("a", encoding="ascii") as events:
        events.write(f"{gpu} {kind} {data} {part[0]} {part[1]}\n")


def gpus_of(inventory: Inventory) -> tuple[list[FakeGpu], list[tuple[int, int, str]]]:
    """The GPUs and ancestors of a topology, for `build_fake_nvml`: the same node, through NVML.

    Its NVLinks all go through switches.
    """
    links = {
        gpu.index: max((k.nvlink for k in inventory.links if gpu.index in (k.a, k.b)), default=0)
        for gpu in inventory.gpus
    }
    gpus = [
        FakeGpu(
            minor=gpu.minor_number,
            uuid=gpu.uuid,
            domain=int(gpu.pci_bus_id.split(":")[0], 16),
            bus=int(gpu.pci_bus_id.split(":")[1], 16),
            model=gpu.model,
            memory_bytes=gpu.memory_bytes or 0,
            arch=gpu.arch or (0, 0),
            numa=-1 if gpu.numa_node is None else gpu.numa_node,
            mig=(int(gpu.mig_enabled), int(gpu.mig_enabled)),
            brand=BRANDS.index(gpu.brand) if gpu.brand else -1,
            nvlinks=(SWITCH,) * links[gpu.index],
            parts=tuple(map(_fake_mig, gpu.mig)),
            health=_fake_health(gpu),
            facts=_fake_facts(gpu),
            fabric=_fake_fabric(gpu.fabric) if gpu.fabric else None,
        )
        for gpu in inventory.gpus
    ]
    return gpus, [(link.a, link.b, link.pcie) for link in inventory.links]


def _fake_health(gpu: Gpu) -> FakeHealth:
    return FakeHealth(
        remap_pending=-1 if gpu.remap_pending is None else int(gpu.remap_pending),
        recovery_action=-1 if gpu.recovery_action is None else [*RecoveryAction].index(gpu.recovery_action),
    )


def _fake_facts(gpu: Gpu) -> FakeFacts:
    architectures = {word: number for number, word in ARCHITECTURES.items()}
    return FakeFacts(
        architecture=architectures.get(gpu.architecture, -1),
        compute_mode=-1 if gpu.compute_mode is None else [*ComputeMode].index(gpu.compute_mode),
        persistence=-1 if gpu.persistence is None else int(gpu.persistence),
        ecc=(int(gpu.ecc.current), int(gpu.ecc.pending)) if gpu.ecc else (-1, -1),
        addressing=ADDRESSING.index(gpu.addressing) if gpu.addressing else -1,
    )


def _fake_fabric(fabric: Fabric) -> FakeFabric:
    return FakeFabric(
        state=list(FabricState).index(fabric.state) + 1,
        status=fabric.status,
        clique=fabric.clique,
        health_mask=fabric.health_mask or 0,
        cluster=fabric.cluster.replace("-", "") or "0" * 32,
    )


def _fake_mig(device: MigDevice) -> FakeMig:
    slices = int(device.profile.partition("g.")[0].rpartition(".")[2])
    compute = int(device.profile.partition("c.")[0]) if "c." in device.profile else slices
    return FakeMig(
        place=device.index,
        uuid=device.uuid,
        gi=device.gpu_instance_id,
        ci=device.compute_instance_id,
        start=-1 if device.placement is None else device.placement,
        slices=slices,
        compute_slices=compute,
        memory_mib=(device.memory_bytes or 0) // 2**20,
        engines=tuple(number or 0 for number in astuple(device.engines)),
    )


def evidence(driver_root: Path, name: Literal["calls", "environ", "status"]) -> str:
    """What the library noted of the process it was loaded into."""
    path = driver_root / LIB_DIR / f"fake-nvml.{name}"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _gpu_line(index: int, gpu: FakeGpu) -> str:
    minor = index if gpu.minor is None else gpu.minor
    bus = 0x10 + index if gpu.bus is None else gpu.bus
    uuid = gpu.uuid or f"GPU-{index:x}fa4e000-0000-4000-8000-{index:012d}"
    major_cc, minor_cc = gpu.arch
    return (
        f"gpu {minor} {gpu.domain:x} {bus:x} {gpu.memory_bytes} {major_cc} {minor_cc} {gpu.numa} "
        f"{gpu.mig[0]} {gpu.mig[1]} {gpu.brand} {uuid} {gpu.model}"
    )


def _mig_line(index: int, gpu: FakeGpu, part: FakeMig) -> str:
    compute = part.slices if part.compute_slices is None else part.compute_slices
    ids = (
        f"{part.place} {part.gi} {part.ci} {part.start} {part.slices} {compute} {part.memory_mib} "
        f"{' '.join(map(str, part.engines))}"
    )
    return f"mig {index} {ids} {part.uuid} {gpu.model} MIG {part.profile or 'of no name'}"
