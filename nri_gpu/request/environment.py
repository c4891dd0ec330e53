"""NVIDIA_VISIBLE_DEVICES as a request, where policy allows that. Stricter than NVIDIA's own reading of it.

    value = "" | "void" | "none" | "all" | id *( "," id )      blanks around commas do not count, nor do empty items

Both image and pod may have set it, and it cannot be told which.
Source: NVIDIA/nvidia-container-toolkit internal/config/image/devices.go; there `all` or `none` among other items
decides, an unknown item fails late, and `none` still brings the driver's files.

NVIDIA_DRIVER_CAPABILITIES names parts of the driver: "all", or words with commas between them. Source:
internal/config/image/capabilities.go; there an unknown word keeps the container from being created.
"""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.gpu import Capabilities, Capability
from nri_gpu.domain.gpu_request import Claim, Devices, Everything
from nri_gpu.domain.text import quoted
from nri_gpu.request.annotation import VALUE_MAX, check_text
from nri_gpu.request.values import BLANKS, DEVICES_MAX, MIG_PREFIX, UUID_LENGTH, UUID_PREFIX, Piece, read_id

VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
CAPABILITIES_MAX: Final = 256  # characters that are read of its value; all its words together have 52
# NVIDIA's device plugin with deviceListStrategy=volume-mounts says this, and mounts a file there for each device.
MOUNTED_NAMES: Final = "/var/run/nvidia-container-devices"
_NOTHING: Final = frozenset({"void", "none"})


def claim_of_environment(value: str) -> Claim | None:
    """Return what the variable's value asks for, or None if it asks for nothing.

    Raises: RequestError: it is not valid.
    """
    whole = Piece(VARIABLE, value, 0)
    check_text(whole)
    items = [item for item in whole.split(",") if item.text]
    words = {item.text for item in items}
    if not items or "void" in words or words == {"none"}:
        return None
    if words == {"all"}:
        return Claim(key=VARIABLE, text=value, wanted=Everything())
    ids = tuple(dict.fromkeys(map(_id, items)))
    if len(ids) > DEVICES_MAX:
        raise whole.error(f"at most {DEVICES_MAX} GPUs can be named")
    return Claim(key=VARIABLE, text=value.strip(BLANKS), wanted=Devices(ids))


def named_devices(value: str) -> tuple[str, ...]:
    """Return the devices that a device plugin may have written there, by UUID or index, or the folder that names them.

    Empty if it names none: `all`, `none`, `void`, nothing. An unknown word counts as a name of no GPU.
    """
    if value.rstrip("/") == MOUNTED_NAMES:
        return (MOUNTED_NAMES,)
    items = [item for each in value[: VALUE_MAX + 1].split(",") if (item := each.strip(BLANKS))]
    if "all" in items or not _NOTHING.isdisjoint(items):
        return ()
    # KAI-Scheduler writes CDI names, with CDI switched on; what stands behind `=` is the same.
    return tuple(dict.fromkeys(item.rpartition("=")[2] for item in items))


def named_capabilities(value: str) -> Capabilities:
    """Return the parts of the driver that NVIDIA_DRIVER_CAPABILITIES names; a word that is unknown or cut is none."""
    whole = value if len(value) <= CAPABILITIES_MAX else value[:CAPABILITIES_MAX].rpartition(",")[0]
    words = {word.strip(BLANKS) for word in whole.split(",")}
    return frozenset(each for each in Capability if each in words or "all" in words)


def is_unit_name(name: str) -> bool:
    """Return whether a device plugin may call a GPU or MIG device like this, on whatever node."""
    return name.startswith((UUID_PREFIX, MIG_PREFIX)) or name.replace(":", "", 1).isdecimal() or name == MOUNTED_NAMES


def _id(item: Piece) -> str:
    """Read the name of a GPU or MIG device: an index, both indices, or a whole UUID."""
    if item.text in ("all", *_NOTHING):
        raise item.error(f'"{item.text}" stands alone here')
    if item.text.count(":") > 1:
        raise item.error(f"{quoted(item.text)} is a PCI bus id: write the GPU's index or UUID")
    name = read_id(item)
    for prefix in (UUID_PREFIX, MIG_PREFIX):
        if name.startswith(prefix) and len(name) != len(prefix) + UUID_LENGTH:
            raise item.error(f"{quoted(item.text)} is not a whole UUID")
    return name
