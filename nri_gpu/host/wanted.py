"""The device nodes that the loaded modules serve, by the driver's files in /proc. Pure.

Numbers in those files are decimal, modes too: 438 is 0666.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from msgspec import Struct

from nri_gpu.domain.bounds import GPU_INDEX_MAX, MODESET_MINOR, NVIDIACTL_MINOR
from nri_gpu.host.facts import (
    CAPS,
    CharDevice,
    DevPath,
    HostError,
    HostFacts,
    HostFinding,
    KernelModule,
)
from nri_gpu.host.modules import CAP_MINOR_MAX, driver_fields, read_mig_minors

PARAMS: Final = "/proc/driver/nvidia/params"
GPUS: Final = "/proc/driver/nvidia/gpus"
CAPABILITIES: Final = "/proc/driver/nvidia/capabilities"

PERMISSIONS: Final = 0o777
# The last value means "unchanged" to chown(2), so it is no owner.
_MAX_ID: Final = 2**32 - 2


class WantedNode(Struct, frozen=True):
    """A node that should exist."""

    path: DevPath
    node: CharDevice
    hands_off: str = ""  # why `prepare` must leave the node alone, or empty


def wanted_nodes(facts: HostFacts, graphics: bool) -> Iterator[WantedNode | HostFinding]:
    """Yield the nodes that the loaded modules serve, and what keeps us from knowing them.

    Without a readable `params` no node is wanted at all: it may forbid us to make any.
    """
    if any(finding.path == PARAMS for finding in facts.unreadable):
        return
    try:
        ownership = params_ownership(facts.params)
    except HostError as error:
        yield HostFinding(PARAMS, f"{error}; until then no device node is made or changed")
        return
    kept = "" if ownership.modify else f"{PARAMS} has ModifyDeviceFiles: 0, so the administrator makes device nodes"
    majors, loaded = facts.majors, facts.modules
    for name, major, in_use, nodes in (
        ("nvidia", majors.nvidia, KernelModule.NVIDIA in loaded, partial(_nvidia_nodes, facts, ownership, graphics)),
        ("nvidia-uvm", majors.nvidia_uvm, KernelModule.UVM in loaded, _uvm_nodes),
        ("nvidia-caps", majors.nvidia_caps, bool(facts.capabilities), partial(_mig_nodes, facts)),
    ):
        if in_use and major is not None:
            yield from nodes(major, kept)
        elif in_use:
            yield HostFinding("/proc/devices", f"{name} is in use, but has no major here: reload the driver")


def _nvidia_nodes(
    facts: HostFacts, ownership: Ownership, graphics: bool, major: int, kept: str
) -> Iterator[WantedNode | HostFinding]:
    def node(minor: int) -> CharDevice:
        return CharDevice(major, minor, ownership.mode, ownership.uid, ownership.gid)

    yield WantedNode(DevPath("nvidiactl"), node(NVIDIACTL_MINOR), kept)
    for each in _gpu_minors(facts):
        yield each if isinstance(each, HostFinding) else WantedNode(DevPath(f"nvidia{each}"), node(each), kept)
    if graphics and KernelModule.MODESET in facts.modules:
        yield WantedNode(DevPath("nvidia-modeset"), node(MODESET_MINOR), kept)


def _gpu_minors(facts: HostFacts) -> Iterator[int | HostFinding]:
    seen: dict[int, str] = {}
    for address, information in sorted(facts.gpus.items()):
        path = f"{GPUS}/{address}/information"
        try:
            minor = gpu_minor(information)
        except HostError as error:
            yield HostFinding(path, str(error))
            continue
        if minor is None:
            continue  # excluded by the administrator
        if minor in seen:
            yield HostFinding(path, f"has minor {minor} like {seen[minor]}: reload the driver")
            continue
        seen[minor] = address
        if minor not in facts.away:
            yield minor
    if not facts.gpus and not any(finding.path.startswith(GPUS) for finding in facts.unreadable):
        yield HostFinding(
            GPUS, f"the driver is loaded, and serves none of {', '.join(facts.devices)}: see the kernel's log"
        )


def _uvm_nodes(major: int, kept: str) -> Iterator[WantedNode | HostFinding]:
    """Yield UVM's nodes. The module has no parameters for owner or mode, and every CUDA program needs the nodes."""
    for minor, name in enumerate(("nvidia-uvm", "nvidia-uvm-tools")):
        yield WantedNode(DevPath(name), CharDevice(major, minor, 0o666, 0, 0), kept)


def _mig_nodes(facts: HostFacts, major: int, kept: str) -> Iterator[WantedNode | HostFinding]:
    """Yield nodes of MIG instances only: root's tools make those of the capabilities to configure and to monitor."""
    table = read_mig_minors(facts.mig_minors)
    seen: dict[int, str] = {}
    away = {f"gpu{minor}" for minor in facts.away}
    ours = {name: text for name, text in facts.capabilities.items() if name.partition("/")[0] not in away}
    for name, text in sorted(ours.items()):
        path = f"{CAPABILITIES}/{name}"
        try:
            minor, own = capability(text)
        except HostError as error:
            yield HostFinding(path, str(error))
            continue
        listed = table.get(name.replace("/mig/", "/"), minor)
        if minor in seen or listed != minor:
            rival = f"mig-minors has {listed}" if listed != minor else f"so has {seen[minor]}"
            yield HostFinding(path, f"has minor {minor}, but {rival}: reload the driver")
            continue
        seen[minor] = name
        off = kept or ("" if own.modify else f"{path} has DeviceFileModify: 0, so the administrator makes the node")
        node = CharDevice(major, minor, own.mode, own.uid, own.gid)
        yield WantedNode(DevPath(f"{CAPS}/nvidia-cap{minor}"), node, off)


# The kernel writes no leading zeros; a value with them may be octal.
_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,9}")


class Ownership(Struct, frozen=True):
    """The mode and owner of nodes. modify: false if only the administrator may make and change them."""

    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    modify: bool = True


def params_ownership(text: str) -> Ownership:
    """Parse /proc/driver/nvidia/params. Missing values are the driver's defaults. Raises: HostError."""
    return _ownership(driver_fields(text), "ModifyDeviceFiles")


def gpu_minor(information: str) -> int | None:
    """Return the minor of a GPU's node, or None for a GPU that the administrator excluded. Raises: HostError."""
    fields = driver_fields(information)
    if fields.get("GPU Excluded", "").lower() == "yes":
        return None
    return _number(fields, "Device Minor", GPU_INDEX_MAX)


def capability(text: str) -> tuple[int, Ownership]:
    """Parse the file of a capability, which is the right to open a device node: its minor. Raises: HostError."""
    fields = driver_fields(text)
    return _number(fields, "DeviceFileMinor", CAP_MINOR_MAX), _ownership(fields, "DeviceFileModify")


def _ownership(fields: Mapping[str, str], switch: str) -> Ownership:
    default = Ownership()
    return Ownership(
        mode=_mode(fields, default.mode),
        uid=_number(fields, "DeviceFileUID", _MAX_ID, default.uid),
        gid=_number(fields, "DeviceFileGID", _MAX_ID, default.gid),
        # nvidia-modprobe takes 1 for yes and any other number for no.
        modify=_number(fields, switch, 2**32 - 1, 1) == 1,
    )


def _mode(fields: Mapping[str, str], default: int) -> int:
    mode = _number(fields, "DeviceFileMode", 2**32 - 1, default)
    if mode & ~PERMISSIONS:
        # The kernel takes NVreg_DeviceFileMode=660 as decimal, 01224, since it has no leading 0. Do not guess.
        raise HostError(
            f"DeviceFileMode is {mode}, which is {mode:#o} in octal and no mode for a device node: "
            "write the module parameter with a leading 0, as in NVreg_DeviceFileMode=0660"
        )
    return mode


def _number(fields: Mapping[str, str], key: str, most: int, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise HostError(f"has no `{key}` line")
        return default
    if not _DECIMAL.fullmatch(value) or int(value) > most:
        raise HostError(f"{key} is `{value[:40]}`, where a decimal number up to {most} belongs")
    return int(value)
