"""The minors of MIG devices' capability nodes, from the driver's own files under /proc.

A capability's own file is there only while its instance is; the table of all minors is for drivers without one. Both
go by the GPU's *device minor*, not by its NVML index.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.edits import CHANNELS_DEFAULT, Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.inventory.kernel import majors_by_name
from nri_gpu.system.storage import text_of

PROC: Final = "/proc"
CAP_MINOR_MAX: Final = 8191  # as many minors as the driver registers (kernel-open/nvidia/nv-caps.c)
# How drivers from 515 to 595 have numbered: kernel-open/nvidia/nv-caps.c. To check by, not to go by.
_FIRST: Final = 3
_PER_GPU: Final = 135
_PER_INSTANCE: Final = 9
GPUS_MAX: Final = 32
GPU_INSTANCES_MAX: Final = 15
COMPUTE_INSTANCES_MAX: Final = 8

_MINOR_LINE: Final = re.compile(r"^DeviceFileMinor:[ \t]*([0-9]{1,5})[ \t]*$", re.MULTILINE)


def usual_minors(gpu_minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[int, int] | None:
    """Of GPU instance and compute instance, as drivers number them; None where there is no such capability."""
    known = gpu_minor < GPUS_MAX and gpu_instance_id < GPU_INSTANCES_MAX and compute_instance_id < COMPUTE_INSTANCES_MAX
    if not known:
        return None
    instance = _FIRST + _PER_GPU * gpu_minor + _PER_INSTANCE * gpu_instance_id
    return instance, instance + 1 + compute_instance_id


def with_minors(gpus: Sequence[Gpu], proc: Path) -> tuple[Gpu, ...]:
    """The same GPUs, their MIG devices with the minors of their capability nodes, or with why these are not known."""
    if not any(gpu.mig for gpu in gpus):
        return tuple(gpus)
    table = _table(text_of(proc / "driver/nvidia-caps/mig-minors"))
    return tuple(
        replace(gpu, mig=tuple(_with_minors(gpu, device, proc, table) for device in gpu.mig)) if gpu.mig else gpu
        for gpu in gpus
    )


def unusual(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """A sentence for each MIG device whose minors are not those of the drivers we know: the files are believed."""
    return tuple(
        f"MIG device {part.uuid} has capability minors {minors[0]}, {minors[1]}; drivers known to us have {usual}"
        for gpu in gpus
        for part in gpu.mig
        if None not in (minors := (part.gpu_instance_minor, part.compute_instance_minor))
        and minors != (usual := usual_minors(gpu.minor_number, part.gpu_instance_id, part.compute_instance_id))
    )


def _with_minors(gpu: Gpu, device: MigDevice, proc: Path, table: dict[str, int]) -> MigDevice:
    instance = f"gi{device.gpu_instance_id}"
    found: list[int] = []
    for name in (f"{instance}/access", f"{instance}/ci{device.compute_instance_id}/access"):
        minor = _minor(gpu, name, proc, table)
        if isinstance(minor, str):
            return replace(device, unavailable=device.unavailable or minor)
        found.append(minor)
    return replace(device, gpu_instance_minor=found[0], compute_instance_minor=found[1])


def _minor(gpu: Gpu, name: str, proc: Path, table: dict[str, int]) -> int | str:
    """The minor, or a sentence."""
    path = proc / "driver/nvidia/capabilities" / f"gpu{gpu.minor_number}" / "mig" / name
    text = text_of(path)
    listed = table.get(f"gpu{gpu.minor_number}/{name}")
    if text is None:
        return f"no capability of it is known to the driver ({path} is not there)" if listed is None else listed
    match = _MINOR_LINE.search(text)
    if match is None or int(match[1]) > CAP_MINOR_MAX:
        return f"{path} has no DeviceFileMinor"
    minor = int(match[1])
    if listed not in (None, minor):
        return f"{path} says minor {minor}, but mig-minors says {listed}"
    return minor


def _table(text: str | None) -> dict[str, int]:
    """`gpu0/gi0/access 3` a line; others are none of ours."""
    pairs = (line.split() for line in (text or "").splitlines())
    numbers = (pair for pair in pairs if len(pair) == 2 and pair[1].isascii() and pair[1].isdecimal())
    return {name: int(number) for name, number in numbers if len(number) < 6 and int(number) <= CAP_MINOR_MAX}


_CAPS: Final = "nvidia-caps"
# DeviceFileMode is decimal: 256 is 0400, root's alone (kernel-open/nvidia/nv-caps.c).
_LINE: Final = re.compile(r"^(DeviceFileMinor|DeviceFileMode):[ \t]*([0-9]{1,5})[ \t]*$", re.MULTILINE)
_PERMISSIONS: Final = 0o777


def right_to_mig(right: str, proc: Path, majors: Mapping[str, frozenset[int]]) -> NodeExtra:
    """The node of a right, `config` or `monitor`, with the mode that the driver says."""
    major = min(majors.get(_CAPS, ()), default=None)
    if major is None:
        return NodeExtra(lacking=f"{_CAPS} is not in /proc/devices: load kernel module nvidia")
    path = proc / "driver/nvidia/capabilities/mig" / right
    try:
        facts = {name: int(value) for name, value in _LINE.findall(path.read_text(encoding="ascii", errors="replace"))}
    except OSError:
        return NodeExtra(lacking=f"{path} is not there: no GPU of this driver can be cut by MIG")
    minor, mode = facts.get("DeviceFileMinor"), facts.get("DeviceFileMode")
    if minor is None or mode is None or minor > CAP_MINOR_MAX or mode & ~_PERMISSIONS:
        return NodeExtra(lacking=f"{path} does not tell minor and mode of the capability")
    return NodeExtra(nodes=(DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor, mode),))


# A socket is connected to by its inode, which a read-only mount does not hinder; it keeps a container's root from
# changing the socket's mode. The socket and not its folder: beside it may be others that are nobody's business.
SOCKET_OPTIONS: Final = ("rbind", "rprivate", "ro", "nosuid", "nodev", "noexec")
UDEV: Final = "run/udev"
CUFILE: Final = "etc/cufile.json"
FIRMWARE_FOLDER: Final = "/lib/firmware"
_FIRMWARE_FILES: Final = "gsp*.bin"


def gds_files(host: Path, nodes: NodeExtra) -> NodeExtra:
    """GPUDirect Storage's nodes, with udev's database and cuFile's settings where there are any."""
    mounts: list[Mount] = []
    if (host / UDEV).is_dir():
        mounts.append(Mount(f"/{UDEV}", os.path.realpath(host / UDEV)))
    if (host / CUFILE).exists():
        if why := distrust(host / CUFILE):
            return NodeExtra(lacking=f"/{CUFILE} is not given to containers: {why}")
        mounts.append(Mount(f"/{CUFILE}", os.path.realpath(host / CUFILE)))
    return NodeExtra(nodes.nodes, tuple(mounts))


def socket_offer(roots: Iterable[Path], service: str) -> NodeExtra:
    """The socket of one of NVIDIA's services, below the driver's root or the host's."""
    for root in dict.fromkeys(roots):
        for run in ("run", "var/run"):
            path = root / run / service / "socket"
            if _is_socket(path):
                return NodeExtra(mounts=(socket_mount(f"/run/{service}/socket", os.path.realpath(path)),))
    return NodeExtra(lacking=f"there is no socket /run/{service}/socket: start {service}")


def socket_mount(destination: str, source: str) -> Mount:
    """A socket as containers get it."""
    return Mount(destination, source, SOCKET_OPTIONS)


def firmware(root: Path, sys: Path, version: str) -> NodeExtra:
    """The GPU's own programs, of this driver's version, from the first folder that has any.

    Source: NVIDIA/nvidia-container-toolkit pkg/nvcdi/driver-nvml.go, for the folders and their order.
    """
    if not version:
        return NodeExtra(lacking="the driver's version is not known")
    for folder in _firmware_folders(root, sys):
        files = sorted((folder / "nvidia" / version).glob(_FIRMWARE_FILES))
        for file in files:
            if why := distrust(file, root):
                return NodeExtra(lacking=f"{file} is not given to containers: {why}")
        if files:
            place = f"{FIRMWARE_FOLDER}/nvidia/{version}"
            return NodeExtra(mounts=tuple(Mount(f"{place}/{file.name}", os.path.realpath(file)) for file in files))
    return NodeExtra(lacking=f"there is no nvidia/{version}/{_FIRMWARE_FILES} below {root / FIRMWARE_FOLDER[1:]}")


def _firmware_folders(root: Path, sys: Path) -> Iterator[Path]:
    base, release = root / FIRMWARE_FOLDER[1:], platform.release()
    try:
        custom = (sys / "module/firmware_class/parameters/path").read_text().strip()
    except OSError:
        custom = ""
    if custom.startswith("/"):
        yield root / custom[1:]
    yield from (base / "updates" / release, base / "updates", base / release, base)


def distrust(path: Path, within: Path = Path("/")) -> str:
    """Why a file is not fit for containers, a clause; empty when it is. within: its links must not lead out of it."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(within)):
        return f"it leads out of {within}"
    try:
        found = real.lstat()
    except OSError as error:
        return f"{error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    # As with the driver's files: ourselves is root where it matters.
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: others than root can change it"
    return ""


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


SOCKETS: Final = {
    Extra.PERSISTENCED: "nvidia-persistenced",
    Extra.FABRICMANAGER: "nvidia-fabricmanager",
}
_CHANNELS: Final = "nvidia-caps-imex-channels"
_CHANNEL_COUNT: Final = re.compile(r"^ImexChannelCount:[ \t]*([0-9]{1,7})[ \t]*$", re.MULTILINE)


class Roots(Struct, frozen=True, kw_only=True):
    """Where the host's trees are; tests put others here. driver: the root that the driver's user space lives under."""

    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    host: Path = Path("/")
    driver: Path = Path("/")


class _Wanted(Struct, frozen=True):
    """The nodes of an extra. needed, welcome: names below /dev/FOLDER, and each of `needed` must be there.

    module: its name in /proc/devices. cure: a clause.
    """

    folder: str
    needed: tuple[re.Pattern[str], ...]
    module: str
    cure: str
    welcome: re.Pattern[str] | None = None


# Source: NVIDIA/nvidia-container-toolkit internal/discover/{gds,gdrcopy,mofed,nvswitch}.go, for the names.
_NODES: Final[Mapping[Extra, _Wanted]] = {
    Extra.GDS: _Wanted("", (re.compile(r"nvidia-fs[0-9]{1,4}"),), "nvidia-fs", "`modprobe nvidia-fs`"),
    Extra.GDRCOPY: _Wanted("", (re.compile("gdrdrv"),), "gdrdrv", "`modprobe gdrdrv`, and make the node /dev/gdrdrv"),
    # Connections by address need rdma_cm too; verbs alone, which is what NCCL uses, do without.
    Extra.RDMA: _Wanted(
        "infiniband",
        (re.compile(r"uverbs[0-9]{1,4}"),),
        "infiniband_verbs",
        "load the adapter's driver and `modprobe ib_uverbs`",
        re.compile("rdma_cm"),
    ),
    Extra.NVSWITCH: _Wanted(
        "",
        (re.compile("nvidia-nvswitchctl"), re.compile(r"nvidia-nvswitch[0-9]{1,3}")),
        "nvidia-nvswitch",
        "only hosts with NVSwitches have it; there, `nvidia-modprobe -s` makes the nodes",
    ),
}


def find_offers(roots: Roots, driver_version: str) -> Mapping[Extra, NodeExtra]:
    """Every extra but those that are made of the granted GPUs alone. Reads a few files, opens no device."""
    majors = majors_by_name(text_of(roots.proc / "devices") or "")
    offers = {extra: _nodes(wanted, roots.dev, majors) for extra, wanted in _NODES.items()}
    if not offers[Extra.GDS].lacking:
        offers[Extra.GDS] = gds_files(roots.host, offers[Extra.GDS])
    offers[Extra.IMEX] = _channels(roots.proc, majors)
    for extra, name in SOCKETS.items():
        offers[extra] = socket_offer((roots.driver, roots.host), name)
    for extra, right in ((Extra.MIG_CONFIG, "config"), (Extra.MIG_MONITOR, "monitor")):
        offers[extra] = right_to_mig(right, roots.proc, majors)
    offers[Extra.FIRMWARE] = firmware(roots.driver, roots.sys, driver_version)
    return {extra: offers[extra] for extra in Extra if extra in offers}


def _nodes(wanted: _Wanted, dev: Path, majors: Mapping[str, frozenset[int]]) -> NodeExtra:
    shown = f"/dev/{wanted.folder}/" if wanted.folder else "/dev/"
    there = dict(_character_devices(dev / wanted.folder, shown))
    chosen: list[DeviceNode] = []
    for pattern in wanted.needed:
        matching = [node for name, node in there.items() if pattern.fullmatch(name)]
        if not matching:
            return NodeExtra(lacking=f"there is no {shown}{_spelt(pattern)} ({wanted.cure})")
        chosen += matching
    known = majors.get(wanted.module, frozenset())
    for node in chosen:
        if known and node.major not in known:
            return NodeExtra(
                lacking=f"{node.path} has major {node.major}, and {wanted.module} has {_listed(known)} now: "
                "the node is a leftover; remove it and have it made again"
            )
    chosen += [node for name, node in there.items() if wanted.welcome and wanted.welcome.fullmatch(name)]
    return NodeExtra(nodes=tuple(chosen))


def _character_devices(folder: Path, shown: str) -> Iterator[tuple[str, DeviceNode]]:
    """Name and node, in the order of their numbers. Links are nobody's device: they are not followed."""
    for name in sorted(_names(folder), key=lambda name: (len(name), name)):
        try:
            found = (folder / name).lstat()
        except OSError:
            continue
        if stat.S_ISCHR(found.st_mode):
            number, mode = found.st_rdev, stat.S_IMODE(found.st_mode) & 0o777
            node = DeviceNode(f"{shown}{name}", os.major(number), os.minor(number), mode, found.st_uid, found.st_gid)
            yield name, node


def _channels(proc: Path, majors: Mapping[str, frozenset[int]]) -> NodeExtra:
    """Channels need no node on the host: the kernel knows them by number."""
    known = majors.get(_CHANNELS)
    if not known:
        return NodeExtra(lacking=f"{_CHANNELS} is not in /proc/devices: load nvidia, of a driver from 550.54.14 on")
    match = _CHANNEL_COUNT.search(text_of(proc / "driver/nvidia/params") or "")
    count = int(match[1]) if match else CHANNELS_DEFAULT
    if not count:
        return NodeExtra(lacking="kernel module nvidia was loaded with NVreg_ImexChannelCount=0")
    return NodeExtra(channels=Channels(min(known), count))


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _spelt(pattern: re.Pattern[str]) -> str:
    return pattern.pattern.partition("[")[0] + ("N" if "[" in pattern.pattern else "")


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def roots_of(driver_root: Path, host_root: str, *, proc: Path, sys: Path) -> Roots:
    """Where to look. The root of a pod is its image's; the host's is the driver's, where all of it is mounted there."""
    roots = Roots(proc=proc, sys=sys, driver=driver_root)
    return replace(roots, host=driver_root) if host_root == "/" else roots


def as_host_names(offers: Mapping[Extra, NodeExtra], root: Path, host_root: Path) -> Mapping[Extra, NodeExtra]:
    """Offers with the sources of their mounts renamed. What lies elsewhere is the image's own and nobody's extra."""
    real = Path(os.path.realpath(root))  # as sources are
    return {extra: _renamed(offer, real, host_root) for extra, offer in offers.items()}


def _renamed(offer: NodeExtra, root: Path, host_root: Path) -> NodeExtra:
    mounts: list[Mount] = []
    for mount in offer.mounts:
        source = Path(mount.source)
        if not source.is_relative_to(root):
            return NodeExtra(lacking=f"{source} is in nri-gpu's own image and not the host's: mount that below {root}")
        mounts.append(replace(mount, source=str(host_root / source.relative_to(root))))
    return replace(offer, mounts=tuple(mounts))
