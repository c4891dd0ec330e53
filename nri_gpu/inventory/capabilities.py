"""The minors of MIG devices' capability nodes, from the driver's own files under /proc.

A capability's own file is there only while its instance is; the table of all minors is for drivers without one. Both
go by the GPU's *device minor*, not by its NVML index.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu, MigDevice
from nri_gpu.files import text_of

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
