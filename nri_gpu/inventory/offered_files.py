"""Files and sockets of the host that extras are made of. Containers get a file only where root alone can change it."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from nri_gpu.domain.edits import Mount
from nri_gpu.domain.extras import Offer

# A socket is connected to by its inode, which a read-only mount does not hinder; it keeps a container's root from
# changing the socket's mode. The socket and not its folder: beside it may be others that are nobody's business.
SOCKET_OPTIONS: Final = ("rbind", "rprivate", "ro", "nosuid", "nodev", "noexec")
UDEV: Final = "run/udev"
CUFILE: Final = "etc/cufile.json"
FIRMWARE_FOLDER: Final = "/lib/firmware"
_FIRMWARE_FILES: Final = "gsp*.bin"


def gds_files(host: Path, nodes: Offer) -> Offer:
    """GPUDirect Storage's nodes, with udev's database and cuFile's settings where there are any."""
    mounts: list[Mount] = []
    if (host / UDEV).is_dir():
        mounts.append(Mount(f"/{UDEV}", os.path.realpath(host / UDEV)))
    if (host / CUFILE).exists():
        if why := distrust(host / CUFILE):
            return Offer(lacking=f"/{CUFILE} is not given to containers: {why}")
        mounts.append(Mount(f"/{CUFILE}", os.path.realpath(host / CUFILE)))
    return Offer(nodes.nodes, tuple(mounts))


def socket_offer(roots: Iterable[Path], service: str) -> Offer:
    """The socket of one of NVIDIA's services, below the driver's root or the host's."""
    for root in dict.fromkeys(roots):
        for run in ("run", "var/run"):
            path = root / run / service / "socket"
            if _is_socket(path):
                return Offer(mounts=(socket_mount(f"/run/{service}/socket", os.path.realpath(path)),))
    return Offer(lacking=f"there is no socket /run/{service}/socket: start {service}")


def socket_mount(destination: str, source: str) -> Mount:
    """A socket as containers get it."""
    return Mount(destination, source, SOCKET_OPTIONS)


def firmware(root: Path, sys: Path, version: str) -> Offer:
    """The GPU's own programs, of this driver's version, from the first folder that has any.

    Source: NVIDIA/nvidia-container-toolkit pkg/nvcdi/driver-nvml.go, for the folders and their order.
    """
    if not version:
        return Offer(lacking="the driver's version is not known")
    for folder in _firmware_folders(root, sys):
        files = sorted((folder / "nvidia" / version).glob(_FIRMWARE_FILES))
        for file in files:
            if why := distrust(file, root):
                return Offer(lacking=f"{file} is not given to containers: {why}")
        if files:
            place = f"{FIRMWARE_FOLDER}/nvidia/{version}"
            return Offer(mounts=tuple(Mount(f"{place}/{file.name}", os.path.realpath(file)) for file in files))
    return Offer(lacking=f"there is no nvidia/{version}/{_FIRMWARE_FILES} below {root / FIRMWARE_FOLDER[1:]}")


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
