"""A look at this node for the users of the driver: kernel, bundles, processes. It needs no daemon and loads no NVML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from nri_gpu.blockers.blocker import NodeGpu
from nri_gpu.blockers.driver_users import DriverNumbers, SeenUsers, driver_devices
from nri_gpu.blockers.module_references import DRIVER, Console, DriverModule
from nri_gpu.blockers.owners import MpsProcess
from nri_gpu.domain.errors import CommandError, InventoryError, UnseenError, cause_of
from nri_gpu.domain.text import shown
from nri_gpu.host.kernel_view import HostFolders, unlisted_gpus
from nri_gpu.host.modules import MODULES, drm_nodes, majors_by_name
from nri_gpu.mps.mps_daemon import CONTROL, SERVER
from nri_gpu.mps.mps_folders import noted_folders
from nri_gpu.stray.stray_controller import Look, LookError, look_for
from nri_gpu.stray.uses import Extent, Use
from nri_gpu.system.proc import PROC, parse_stat
from nri_gpu.system.storage import below, bytes_of, text_of
from nri_gpu.system.yaml_documents import read_documents
from nri_gpu.verify.oci_bundles import STATES, Bundle, read_bundles
from nri_gpu.verify.oci_spec import Spec

FILE_MAX: Final = 1 << 20  # bytes of a manifest, of the kubelet's configuration and of an environment
COMM_MAX: Final = 15  # characters of a program's name that the kernel keeps; both of MPS have the same
HOLDERS_MAX: Final = 4096  # of modules, so that a folder of anything has an end
# Of the kubelet as kubeadm sets it up, and of k3s and RKE2; what its configuration names comes first.
MANIFESTS: Final = (
    "/etc/kubernetes/manifests",
    "/var/lib/rancher/k3s/agent/pod-manifests",
    "/var/lib/rancher/rke2/agent/pod-manifests",
)
KUBELET_CONFIGURATION: Final = "/var/lib/kubelet/config.yaml"
_STATIC_PATH: Final = re.compile(r"^staticPodPath:[ \t]*[\"']?([^\"'\s#]+)", re.MULTILINE)
_PIPE: Final = b"CUDA_MPS_PIPE_DIRECTORY="
_DEFAULT_PIPE: Final = "/tmp/nvidia-mps"  # where NVIDIA's daemon has it


class SeenNode(Struct, frozen=True):
    """The result of a look. unseen: why there may be more. denied: for want of permission."""

    users: SeenUsers
    unseen: tuple[str, ...]
    denied: bool


class Scan(Protocol):
    """A look at the processes, as `look_for` takes it."""

    async def __call__(self, majors: Iterable[int], *, libcuda: bool = False) -> Look: ...


async def look_at_users(
    folders: HostFolders, state_dir: Path, states: Iterable[Path] = (), *, scan: Scan = look_for
) -> SeenNode:
    """Look at the node. states: containerd's state folders, else the usual ones. Raises: InventoryError."""
    table = folders.proc / "devices"
    try:
        devices = driver_devices(majors_by_name(table.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        fix = "" if folders.host == Path("/") else "; --root names the folder that is the node's /"
        raise InventoryError(f"{table} cannot be read: {cause_of(error)}{fix}") from error
    gpus = tuple(driven_gpus(folders))
    named = tuple(states)
    bundles, unseen, denied = _bundles(named or [below(folders.host, each) for each in STATES], named=bool(named))
    look, why = await _processes(DriverNumbers(devices, gpus).majors, scan)
    extent = look.extent
    if not extent.whole:
        why = [*why, "the processes of the whole host: run it on the host as root, or in a pod with hostPID: true"]
    if extent.closed:
        why = [*why, f"what {extent.closed} of {extent.processes} processes have open: be root on the host"]
    if extent.late:
        why = [*why, extent.unread]
    users = SeenUsers(
        devices=devices,
        gpus=gpus,
        bundles=bundles,
        processes=look.uses,
        files={(major, minor): count for major, minor, count in extent.files},
        mps=_mps(look.uses, state_dir),
        manifests=_manifests(folders.host) if any(each.static for each in bundles) else {},
        modules=tuple(loaded_modules(folders.sys)),
        console=_console(folders),
    )
    hidden = not extent.whole and os.geteuid() != 0
    return SeenNode(users, (*unseen, *why), denied or hidden or bool(extent.closed))


def driven_gpus(folders: HostFolders) -> Iterator[NodeGpu]:
    """Yield the GPUs that the driver drives, by PCI addresses, as NVML counts them."""
    found = (each for each in unlisted_gpus(folders, ()) if each.given and not each.set_aside)
    for index, gpu in enumerate(each for each in found if each.minor_number is not None):
        yield NodeGpu(
            index=index,
            uuid=gpu.uuid,
            pci_bus_id=gpu.pci_bus_id,
            minor_number=gpu.minor_number or 0,
            drm=tuple(drm_nodes(folders.sys / "bus/pci/devices" / gpu.pci_bus_id)),
        )


def _bundles(states: Iterable[Path], *, named: bool) -> tuple[tuple[Bundle, ...], list[str], bool]:
    """Return the containers, those that start as well, why there may be more, and whether that is for permission.

    named: the command line names the folder. A host without any containerd has no bundle, which is no fault.
    """
    found, unseen, denied = list[Bundle](), list[str](), False
    for state in states:
        try:
            found += read_bundles([state], starting=True)
        except UnseenError as error:
            if named or error.denied:
                unseen.append(str(error))
            denied |= error.denied
    unread = (each for each in found if each.fault and each.spec == Spec())
    unseen += [f"container {shown(each.id)} of {each.pod}: {each.fault}" for each in unread]
    return tuple(found), unseen, denied


async def _processes(majors: Iterable[int], scan: Scan) -> tuple[Look, list[str]]:
    """Return the processes. One that hangs in the kernel may hold back who reads its maps: then they are not read."""
    numbers = tuple(majors)
    try:
        return await scan(numbers, libcuda=True), []
    except LookError as error:
        unseen = [f"which programs map libcuda: {error}"]
    try:
        return await scan(numbers), unseen
    except LookError as error:
        return Look((), Extent(0, 0, whole=True)), [*unseen, f"which processes have a node open: {error}"]


def _mps(uses: Iterable[Use], state_dir: Path) -> Mapping[int, MpsProcess]:
    """Return the processes of MPS with their daemons. Of an environment nothing is kept but the pipe's folder."""
    pids = [use.pid for use in uses if use.program.rpartition("/")[2] in (CONTROL, SERVER)]
    if not pids:
        return {}
    ours = dict[int, str]()
    with suppress(OSError):
        ours = {noted.pid: str(each.pipe) for each in noted_folders(state_dir) if (noted := each.noted())}
    daemons = {pid: _control(pid) for pid in pids}
    return {pid: MpsProcess(daemon, ours.get(daemon) or _pipe(pid)) for pid, daemon in daemons.items()}


def _control(pid: int) -> int:
    """Return the pid of an MPS server's control daemon, which started it; of another process its own."""
    parent = _parent(pid)
    return parent if (text_of(PROC / str(parent) / "comm") or "").strip() == CONTROL[:COMM_MAX] else pid


def _parent(pid: int) -> int:
    text = text_of(PROC / str(pid) / "stat")
    return parse_stat(text).parent if text else 0


def _pipe(pid: int) -> str:
    words = (bytes_of(PROC / str(pid) / "environ", FILE_MAX) or b"").split(b"\0")
    values = (word.removeprefix(_PIPE).decode(errors="replace") for word in words if word.startswith(_PIPE))
    return next(values, _DEFAULT_PIPE)


def _manifests(root: Path) -> Mapping[str, str]:
    """Return the files of static pods by the pods' names in them; one that cannot be read is left out."""
    configured = _STATIC_PATH.search(text_of(below(root, KUBELET_CONFIGURATION), FILE_MAX, "utf-8") or "")
    folders = dict.fromkeys([*([configured[1]] if configured else []), *MANIFESTS])
    found = dict[str, str]()
    for folder in folders:
        with suppress(OSError):
            for path in sorted(below(root, folder).iterdir()):
                for name in _pod_names(path):
                    found.setdefault(name, f"{folder}/{path.name}")
    return found


def _pod_names(path: Path) -> Iterator[str]:
    text = text_of(path, FILE_MAX, "utf-8")
    with suppress(CommandError):
        for document in read_documents(text, str(path), typed=False) if text else ():
            match document:
                case {"kind": "Pod", "metadata": {"name": str(name)}}:
                    yield name


def loaded_modules(sysfs: Path) -> Iterator[DriverModule]:
    """Yield the driver's modules that are loaded, and each that uses one of them."""
    left, met = [*MODULES], {*MODULES}
    while left and len(met) < HOLDERS_MAX:
        folder = sysfs / "module" / (name := left.pop())
        if not folder.is_dir():
            continue
        holders = tuple(sorted(each.name for each in (folder / "holders").glob("*")))
        left += [each for each in holders if each not in met]
        met.update(holders)
        count = (text_of(folder / "refcnt") or "").strip()
        yield DriverModule(name, int(count) if count.isdecimal() else None, holders)


def _console(folders: HostFolders) -> Console:
    """Return the consoles on a framebuffer of the driver's. Linux: drivers/tty/vt/vt.c, drivers/video/fbdev/core."""
    if "nvidia" not in (text_of(folders.proc / "fb") or ""):
        return Console()
    files = []
    for console in sorted((folders.sys / "class/vtconsole").glob("vtcon*")):
        if "frame buffer" in (text_of(console / "name") or "") and (text_of(console / "bind") or "").strip() == "1":
            files.append(f"/sys/class/vtconsole/{console.name}/bind")
    return Console(tuple(files))


def unload_commands(modules: Iterable[DriverModule]) -> tuple[str, ...]:
    """Return what unloads the driver's own modules once nobody uses them."""
    loaded = {each.name for each in modules}
    names = [name for name in DRIVER if name in loaded]
    return (f"modprobe -r {' '.join(names)}",) if names else ()
