"""The driver's files under /proc, understood. Numbers in them are decimal, modes too: 438 is 0666."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.host.facts import HostError

PERMISSIONS: Final = 0o777
# The last value is chown(2)'s "leave as it is", so no owner.
_MAX_ID: Final = 2**32 - 2
# 248 and above are kept for others, 254 is modeset's and 255 the control node's.
# NVIDIA/open-gpu-kernel-modules kernel-open/common/inc/nv-chardev-numbers.h.
MAX_GPU_MINOR: Final = 247
# As many minors as the driver registers. kernel-open/nvidia/nv-caps.c.
MAX_CAP_MINOR: Final = 8191
CAPABILITY: Final = re.compile(r"(?P<gpu>gpu[0-9]+)/mig/(?P<instance>gi[0-9]+(?:/ci[0-9]+)?)/access")


class Ownership(Struct, frozen=True):
    """How nodes shall be. modify: false where the administrator makes and owns them, and nobody else may."""

    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    modify: bool = True


class Capability(Struct, frozen=True):
    """One MIG instance's right, which is a node that may be open()ed."""

    minor: int
    ownership: Ownership


def params_ownership(text: str) -> Ownership:
    """Of /proc/driver/nvidia/params; what it does not say is as the driver's default has it. Raises: HostError."""
    return _ownership(_fields(text), "ModifyDeviceFiles")


def gpu_minor(information: str) -> int | None:
    """Minor of the GPU's node; None for a GPU that the administrator excluded. Raises: HostError."""
    fields = _fields(information)
    if fields.get("GPU Excluded", "").lower() == "yes":
        return None
    return _bounded(fields, "Device Minor", MAX_GPU_MINOR)


def capability(text: str) -> Capability:
    """Of a capability's own file. Raises: HostError."""
    fields = _fields(text)
    return Capability(_bounded(fields, "DeviceFileMinor", MAX_CAP_MINOR), _ownership(fields, "DeviceFileModify"))


def table_name(name: str) -> str:
    """How the minors table calls a capability: `gpu0/mig/gi1/access` is `gpu0/gi1/access` there."""
    match = CAPABILITY.fullmatch(name)
    return f"{match['gpu']}/{match['instance']}/access" if match else name


def minors_table(text: str) -> Mapping[str, int]:
    """Of /proc/driver/nvidia-caps/mig-minors: lines of a name and a minor; others are none of ours."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and _is_decimal(pair[1])}


def _fields(text: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


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
        # NVreg_DeviceFileMode=660 without its 0 is decimal to the kernel, 01224: not what anybody meant, and what
        # they did mean is not for us to guess.
        raise HostError(
            f"DeviceFileMode is {mode}, which is {mode:#o} in octal and no mode for a device node: "
            "write the module parameter with a leading 0, as in NVreg_DeviceFileMode=0660"
        )
    return mode


def _bounded(fields: Mapping[str, str], key: str, most: int) -> int:
    if key not in fields:
        raise HostError(f"has no `{key}` line")
    return _number(fields, key, most, 0)


def _number(fields: Mapping[str, str], key: str, most: int, default: int) -> int:
    value = fields.get(key)
    if value is None:
        return default
    if not _is_decimal(value) or int(value) > most:
        raise HostError(f"{key} is `{value[:40]}`, where a decimal number up to {most} belongs")
    return int(value)


def _is_decimal(text: str) -> bool:
    # The kernel writes no leading zeros; a value that has them may be meant in octal.
    return re.fullmatch(r"0|[1-9][0-9]{0,9}", text) is not None
