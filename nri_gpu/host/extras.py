"""The extras of a node, besides GPUs, for containers, such as GPUDirect Storage, RDMA, IMEX channels and firmware."""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.edits import CHANNELS_DEFAULT, Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.errors import cause_of
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.host.modules import CAP_MINOR_MAX, decimal, driver_fields, majors_by_name
from nri_gpu.system.storage import text_of, why_untrusted

SOCKETS: Final = {
    Extra.PERSISTENCED: "nvidia-persistenced",
    Extra.FABRICMANAGER: "nvidia-fabricmanager",
}
# The socket itself and not its folder, which may hold others. Read-only does not keep a container from connecting: it
# keeps the container's root from changing the socket's mode.
SOCKET_OPTIONS: Final = ("rbind", "rprivate", "ro", "nosuid", "nodev", "noexec")
UDEV: Final = "run/udev"
CUFILE: Final = "etc/cufile.json"
FIRMWARE_FOLDER: Final = "/lib/firmware"
_FIRMWARE_FILES: Final = "gsp*.bin"
_CAPS: Final = "nvidia-caps"
# DeviceFileMode is decimal: 256 is 0400, for root alone (kernel-open/nvidia/nv-caps.c).
_PERMISSIONS: Final = 0o777
_CHANNELS: Final = "nvidia-caps-imex-channels"
_CHANNEL_COUNT: Final = re.compile(r"^ImexChannelCount:[ \t]*([0-9]{1,7})[ \t]*$", re.MULTILINE)


class _Nodes(Struct, frozen=True):
    """The device nodes of an extra, by name below /dev/FOLDER."""

    folder: str
    needed: tuple[re.Pattern[str], ...]  # each must exist
    module: str  # its name in /proc/devices
    remedy: str  # what to do if a node is missing
    optional: re.Pattern[str] | None = None  # may exist


# Source: NVIDIA/nvidia-container-toolkit internal/discover/{gds,gdrcopy,mofed,nvswitch}.go, for the names.
_NODES: Final[Mapping[Extra, _Nodes]] = {
    Extra.GDS: _Nodes("", (re.compile(r"nvidia-fs[0-9]{1,4}"),), "nvidia-fs", "`modprobe nvidia-fs`"),
    Extra.GDRCOPY: _Nodes("", (re.compile("gdrdrv"),), "gdrdrv", "`modprobe gdrdrv`, and make the node /dev/gdrdrv"),
    # Connections by address need rdma_cm too; verbs alone, which is what NCCL uses, do without.
    Extra.RDMA: _Nodes(
        "infiniband",
        (re.compile(r"uverbs[0-9]{1,4}"),),
        "infiniband_verbs",
        "load the adapter's driver and `modprobe ib_uverbs`",
        re.compile("rdma_cm"),
    ),
    Extra.NVSWITCH: _Nodes(
        "",
        (re.compile("nvidia-nvswitchctl"), re.compile(r"nvidia-nvswitch[0-9]{1,3}")),
        "nvidia-nvswitch",
        "only hosts with NVSwitches have it; there, `nvidia-modprobe -s` makes the nodes",
    ),
}


def find_extras(folders: HostFolders, driver_version: str) -> Mapping[Extra, NodeExtra]:
    """Return every extra but those made of the granted GPUs alone. Read a few files and open no device."""
    majors = majors_by_name(text_of(folders.proc / "devices") or "")
    found = {extra: _find_nodes(nodes, folders.dev, majors) for extra, nodes in _NODES.items()}
    if not found[Extra.GDS].lacking:
        found[Extra.GDS] = _with_gds_files(folders.host, found[Extra.GDS])
    found[Extra.IMEX] = _imex_channels(folders.proc, majors)
    for extra, service in SOCKETS.items():
        found[extra] = _service_socket((folders.driver, folders.host), service)
    for extra, capability in ((Extra.MIG_CONFIG, "config"), (Extra.MIG_MONITOR, "monitor")):
        found[extra] = _mig_capability(capability, folders.proc, majors)
    found[Extra.FIRMWARE] = _firmware(folders.driver, folders.sys, driver_version)
    return {extra: found[extra] for extra in Extra if extra in found}


def on_the_host(extras: Mapping[Extra, NodeExtra], root: Path, host_root: Path) -> Mapping[Extra, NodeExtra]:
    """Return the extras with their mounts' sources as the host names them. Files of our own image are no extras."""
    real = Path(os.path.realpath(root))  # sources are real paths too
    return {extra: _renamed(each, real, host_root) for extra, each in extras.items()}


def socket_mount(destination: str, source: str) -> Mount:
    """Return the mount that gives a container a socket."""
    return Mount(destination, source, SOCKET_OPTIONS)


def _renamed(extra: NodeExtra, root: Path, host_root: Path) -> NodeExtra:
    mounts: list[Mount] = []
    for mount in extra.mounts:
        source = Path(mount.source)
        if not source.is_relative_to(root):
            return NodeExtra(lacking=f"{source} is in nri-gpu's own image, not on the host: mount it below {root}")
        mounts.append(replace(mount, source=str(host_root / source.relative_to(root))))
    return replace(extra, mounts=tuple(mounts))


def _find_nodes(nodes: _Nodes, dev: Path, majors: Mapping[str, frozenset[int]]) -> NodeExtra:
    shown = f"/dev/{nodes.folder}/" if nodes.folder else "/dev/"
    existing = dict(_character_devices(dev / nodes.folder, shown))
    chosen: list[DeviceNode] = []
    for pattern in nodes.needed:
        matching = [node for name, node in existing.items() if pattern.fullmatch(name)]
        if not matching:
            name = pattern.pattern.partition("[")[0] + ("N" if "[" in pattern.pattern else "")
            return NodeExtra(lacking=f"there is no {shown}{name} ({nodes.remedy})")
        chosen += matching
    known = majors.get(nodes.module, frozenset())
    for node in chosen:
        if known and node.major not in known:
            listed = ", ".join(map(str, sorted(known)))
            return NodeExtra(
                lacking=f"{node.path} has major {node.major}, and {nodes.module} has {listed} now: "
                "the node is a leftover; remove it"
            )
    chosen += [node for name, node in existing.items() if nodes.optional and nodes.optional.fullmatch(name)]
    return NodeExtra(nodes=tuple(chosen))


def _character_devices(folder: Path, shown: str) -> Iterator[tuple[str, DeviceNode]]:
    """Yield name and node, in the order of their numbers. Symlinks are not followed."""
    try:
        names = sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name))
    except OSError:
        return
    for name in names:
        try:
            found = (folder / name).lstat()
        except OSError:
            continue
        if stat.S_ISCHR(found.st_mode):
            number, mode = found.st_rdev, stat.S_IMODE(found.st_mode) & _PERMISSIONS
            node = DeviceNode(f"{shown}{name}", os.major(number), os.minor(number), mode, found.st_uid, found.st_gid)
            yield name, node


def _with_gds_files(host: Path, nodes: NodeExtra) -> NodeExtra:
    """Return GPUDirect Storage's nodes, with udev's database and cuFile's settings if they exist."""
    mounts: list[Mount] = []
    if (host / UDEV).is_dir():
        mounts.append(Mount(f"/{UDEV}", os.path.realpath(host / UDEV)))
    if (host / CUFILE).exists():
        if why := _why_unfit(host / CUFILE):
            return NodeExtra(lacking=f"/{CUFILE} is not given to containers: {why}")
        mounts.append(Mount(f"/{CUFILE}", os.path.realpath(host / CUFILE)))
    return NodeExtra(nodes.nodes, tuple(mounts))


def _imex_channels(proc: Path, majors: Mapping[str, frozenset[int]]) -> NodeExtra:
    """Return the channels, which need no node on the host: the kernel knows them by number."""
    known = majors.get(_CHANNELS)
    if not known:
        return NodeExtra(lacking=f"{_CHANNELS} is not in /proc/devices: load nvidia, of a driver from 550.54.14 on")
    match = _CHANNEL_COUNT.search(text_of(proc / "driver/nvidia/params") or "")
    count = int(match[1]) if match else CHANNELS_DEFAULT
    if not count:
        return NodeExtra(lacking="kernel module nvidia was loaded with NVreg_ImexChannelCount=0")
    return NodeExtra(channels=Channels(min(known), count))


def _service_socket(roots: Iterable[Path], service: str) -> NodeExtra:
    """Return the socket of a service of NVIDIA's, below the driver's root or the host's."""
    for root in dict.fromkeys(roots):
        for run in ("run", "var/run"):
            path = root / run / service / "socket"
            if _is_socket(path):
                return NodeExtra(mounts=(socket_mount(f"/run/{service}/socket", os.path.realpath(path)),))
    return NodeExtra(lacking=f"there is no socket /run/{service}/socket: start {service}")


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _mig_capability(name: str, proc: Path, majors: Mapping[str, frozenset[int]]) -> NodeExtra:
    """Return the node of a MIG capability, `config` or `monitor`, with the mode that the driver asks for."""
    major = min(majors.get(_CAPS, ()), default=None)
    if major is None:
        return NodeExtra(lacking=f"{_CAPS} is not in /proc/devices: load kernel module nvidia")
    path = proc / "driver/nvidia/capabilities/mig" / name
    text = text_of(path)
    if text is None:
        return NodeExtra(lacking=f"{path} does not exist: no GPU of this driver supports MIG")
    facts = driver_fields(text)
    minor = decimal(facts.get("DeviceFileMinor", ""), CAP_MINOR_MAX)
    mode = decimal(facts.get("DeviceFileMode", ""), _PERMISSIONS)
    if minor is None or mode is None:
        return NodeExtra(lacking=f"{path} does not show the capability's minor and mode")
    return NodeExtra(nodes=(DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor, mode),))


def _firmware(root: Path, sys: Path, version: str) -> NodeExtra:
    """Return the GSP firmware of this driver version, from the first folder that has any.

    Source: NVIDIA/nvidia-container-toolkit pkg/nvcdi/driver-nvml.go, for the folders and their order.
    """
    if not version:
        return NodeExtra(lacking="the driver's version is not known")
    for folder in _firmware_folders(root, sys):
        files = sorted((folder / "nvidia" / version).glob(_FIRMWARE_FILES))
        for file in files:
            if why := _why_unfit(file, root):
                return NodeExtra(lacking=f"{file} is not given to containers: {why}")
        if files:
            place = f"{FIRMWARE_FOLDER}/nvidia/{version}"
            return NodeExtra(mounts=tuple(Mount(f"{place}/{file.name}", os.path.realpath(file)) for file in files))
    return NodeExtra(lacking=f"there is no nvidia/{version}/{_FIRMWARE_FILES} below {root / FIRMWARE_FOLDER[1:]}")


def _firmware_folders(root: Path, sys: Path) -> Iterator[Path]:
    base, release = root / FIRMWARE_FOLDER[1:], platform.release()
    custom = (text_of(sys / "module/firmware_class/parameters/path") or "").strip()
    if custom.startswith("/"):
        yield root / custom[1:]
    yield from (base / "updates" / release, base / "updates", base / release, base)


def _why_unfit(path: Path, within: Path = Path("/")) -> str:
    """Return a clause: why containers must not have a file, or empty. within: where its links must stay."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(within)):
        return f"it leads out of {within}"
    try:
        found = real.lstat()
    except OSError as error:
        return f"{cause_of(error)}"
    return why_untrusted(found, real) if stat.S_ISREG(found.st_mode) else "it is not a regular file"
