"""The minors of MIG devices' capability nodes, from the driver's files under /proc.

Each capability has a file as long as its instance exists. Drivers without these files have a table of all minors.
Both use the GPU's device minor, not its NVML index.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.system.storage import text_of

CAP_MINOR_MAX: Final = 8191  # as many minors as the driver registers (kernel-open/nvidia/nv-caps.c)
GPUS_MAX: Final = 32
GPU_INSTANCES_MAX: Final = 15
COMPUTE_INSTANCES_MAX: Final = 8
# How drivers from 515 to 595 number them (kernel-open/nvidia/nv-caps.c): only to compare with.
_FIRST: Final = 3
_PER_GPU: Final = 135
_PER_INSTANCE: Final = 9
_MINOR_LINE: Final = re.compile(r"^DeviceFileMinor:[ \t]*([0-9]{1,5})[ \t]*$", re.MULTILINE)


def usual_minors(gpu_minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[int, int] | None:
    """The minors of GPU and compute instance, as drivers number them; None where there is no such capability."""
    in_range = (
        gpu_minor < GPUS_MAX and gpu_instance_id < GPU_INSTANCES_MAX and compute_instance_id < COMPUTE_INSTANCES_MAX
    )
    if not in_range:
        return None
    instance = _FIRST + _PER_GPU * gpu_minor + _PER_INSTANCE * gpu_instance_id
    return instance, instance + 1 + compute_instance_id


def with_minors(gpus: Sequence[Gpu], proc: Path) -> tuple[Gpu, ...]:
    """The same GPUs, with the capability minors of their MIG devices, or with why these are unknown."""
    if not any(gpu.mig for gpu in gpus):
        return tuple(gpus)
    table = _table(text_of(proc / "driver/nvidia-caps/mig-minors"))
    return tuple(
        replace(gpu, mig=tuple(_with_minors(gpu, device, proc, table) for device in gpu.mig)) if gpu.mig else gpu
        for gpu in gpus
    )


def unusual_minors(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """A sentence for each MIG device whose minors differ from those of known drivers; they are used all the same."""
    return tuple(
        f"MIG device {part.uuid} has capability minors {minors[0]}, {minors[1]}; known drivers use {usual}"
        for gpu in gpus
        for part in gpu.mig
        if None not in (minors := (part.gpu_instance_minor, part.compute_instance_minor))
        and minors != (usual := usual_minors(gpu.minor_number, part.gpu_instance_id, part.compute_instance_id))
    )


def _with_minors(gpu: Gpu, device: MigDevice, proc: Path, table: Mapping[str, int]) -> MigDevice:
    instance = f"gi{device.gpu_instance_id}"
    try:
        gpu_instance, compute_instance = (
            _minor(gpu, name, proc, table)
            for name in (f"{instance}/access", f"{instance}/ci{device.compute_instance_id}/access")
        )
    except _UnknownMinorError as error:
        return replace(device, unavailable=device.unavailable or str(error))
    return replace(device, gpu_instance_minor=gpu_instance, compute_instance_minor=compute_instance)


class _UnknownMinorError(Exception):
    """Why a capability's minor is unknown."""


def _minor(gpu: Gpu, name: str, proc: Path, table: Mapping[str, int]) -> int:
    """Raises: _UnknownMinorError."""
    path = proc / "driver/nvidia/capabilities" / f"gpu{gpu.minor_number}" / "mig" / name
    text, listed = text_of(path), table.get(f"gpu{gpu.minor_number}/{name}")
    if text is None:
        if listed is None:
            raise _UnknownMinorError(f"the driver shows no capability for it ({path} does not exist)")
        return listed
    match = _MINOR_LINE.search(text)
    if match is None or int(match[1]) > CAP_MINOR_MAX:
        raise _UnknownMinorError(f"{path} has no DeviceFileMinor")
    minor = int(match[1])
    if listed not in (None, minor):
        raise _UnknownMinorError(f"{path} has minor {minor}, but mig-minors has {listed}")
    return minor


def _table(text: str | None) -> dict[str, int]:
    """`gpu0/gi0/access 3` a line; other lines do not matter."""
    pairs = (line.split() for line in (text or "").splitlines())
    numbers = (pair for pair in pairs if len(pair) == 2 and pair[1].isascii() and pair[1].isdecimal())
    return {name: int(number) for name, number in numbers if len(number) < 6 and int(number) <= CAP_MINOR_MAX}
