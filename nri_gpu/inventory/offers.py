"""What this host has of each extra: nodes, files and sockets that exist now, or a clause on what is missing.

Numbers come from the nodes themselves, since most of these modules are not NVIDIA's driver; where the kernel lists the
module's name, a node with another major is a leftover, and the whole extra is not offered.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.edits import DeviceNode
from nri_gpu.domain.extras import CHANNELS_DEFAULT, Channels, Extra, Offer
from nri_gpu.files import text_of
from nri_gpu.inventory.devices import majors_by_name
from nri_gpu.inventory.offered_files import firmware, gds_files, socket_offer
from nri_gpu.inventory.right import right_to_mig

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


def find_offers(roots: Roots, driver_version: str) -> Mapping[Extra, Offer]:
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


def _nodes(wanted: _Wanted, dev: Path, majors: Mapping[str, frozenset[int]]) -> Offer:
    shown = f"/dev/{wanted.folder}/" if wanted.folder else "/dev/"
    there = dict(_character_devices(dev / wanted.folder, shown))
    chosen: list[DeviceNode] = []
    for pattern in wanted.needed:
        matching = [node for name, node in there.items() if pattern.fullmatch(name)]
        if not matching:
            return Offer(lacking=f"there is no {shown}{_spelt(pattern)} ({wanted.cure})")
        chosen += matching
    known = majors.get(wanted.module, frozenset())
    for node in chosen:
        if known and node.major not in known:
            return Offer(
                lacking=f"{node.path} has major {node.major}, and {wanted.module} has {_listed(known)} now: "
                "the node is a leftover; remove it and have it made again"
            )
    chosen += [node for name, node in there.items() if wanted.welcome and wanted.welcome.fullmatch(name)]
    return Offer(nodes=tuple(chosen))


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


def _channels(proc: Path, majors: Mapping[str, frozenset[int]]) -> Offer:
    """Channels need no node on the host: the kernel knows them by number."""
    known = majors.get(_CHANNELS)
    if not known:
        return Offer(lacking=f"{_CHANNELS} is not in /proc/devices: load nvidia, of a driver from 550.54.14 on")
    match = _CHANNEL_COUNT.search(text_of(proc / "driver/nvidia/params") or "")
    count = int(match[1]) if match else CHANNELS_DEFAULT
    if not count:
        return Offer(lacking="kernel module nvidia was loaded with NVreg_ImexChannelCount=0")
    return Offer(channels=Channels(min(known), count))


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _spelt(pattern: re.Pattern[str]) -> str:
    return pattern.pattern.partition("[")[0] + ("N" if "[" in pattern.pattern else "")


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
