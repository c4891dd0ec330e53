"""The file with the GPUs' health, which outlives a restart of the daemon. An earlier version reads what it knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct, field, json

from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.health.applications import Failed, Failures
from nri_gpu.health.gpu_record import GpuRecord
from nri_gpu.health.node_health import NodeHealth
from nri_gpu.system.storage import read_bytes, write_whole

BYTES_MAX: Final = 16 << 20


class _HealthFile(Struct, frozen=True, omit_defaults=True):
    records: Mapping[GpuUuid, GpuRecord] = field(default_factory=dict)
    failures: Mapping[GpuUuid, tuple[Failed, ...]] = field(default_factory=dict)


def load_health(file: Path) -> tuple[NodeHealth, Failures]:
    """Return what was saved, or nothing if it cannot be read, since refreshes and events show it again."""
    found = _HealthFile()
    try:
        found = json.decode(read_bytes(file, BYTES_MAX), type=_HealthFile)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        logger.bind(path=str(file), fault=fault_of(error)).warning("saved health not read")
    return NodeHealth(found.records), Failures(found.failures)


def save_health(file: Path, health: NodeHealth, failures: Failures) -> None:
    """Write some hundred bytes, on each change of a state."""
    try:
        write_whole(file, json.encode(_HealthFile(health.records, failures.by_gpu)))
    except OSError as error:
        logger.bind(path=str(file), fault=fault_of(error)).warning("health not saved")
