"""Environment: what programs and exporters read. Only variables that change are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nri_gpu.domain.gpu import Unit

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
OUR_UUIDS: Final = "NRI_GPU_UUIDS"
LIBRARY_PATH: Final = "LD_LIBRARY_PATH"
VOID: Final = "void"  # NVIDIA's value for no device: an old runtime or hook on the node then does nothing


def visible_devices(gpus: tuple[Unit, ...], *, void: bool) -> Mapping[str, str]:
    """The granted UUIDs. void: under another name, because a runtime or hook on this node still reads the usual one."""
    uuids = ",".join(gpu.uuid for gpu in gpus)
    return {VISIBLE_DEVICES: VOID, OUR_UUIDS: uuids} if void else {VISIBLE_DEVICES: uuids}


def library_path(folders: Sequence[str], present: str) -> Mapping[str, str]:
    """The loader's path with these folders before the container's own; nothing if they are first already.

    Never adds an empty element: to the loader that is the current directory.
    """
    if not folders or present.split(":")[: len(folders)] == list(folders):
        return {}
    return {LIBRARY_PATH: ":".join((*folders, present) if present else folders)}


def disarmed(env: Mapping[str, str]) -> Mapping[str, str]:
    """Overrides an image's NVIDIA_VISIBLE_DEVICES, so that no other component acts on it."""
    return {VISIBLE_DEVICES: VOID} if env.get(VISIBLE_DEVICES, VOID) != VOID else {}
