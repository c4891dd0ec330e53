"""The file by which the health of GPUs outlives a restart, though not a reboot: it lies in the state folder."""

from __future__ import annotations

import json
from pathlib import Path

from nri_gpu.domain.codec import CodecError, canonical, decode
from nri_gpu.health.fleet import Fleet
from nri_gpu.log import logger


def load_fleet(file: Path) -> Fleet:
    """What was known; nothing where it cannot be read, since every look and event tells again."""
    try:
        return decode(Fleet, json.loads(file.read_text(encoding="ascii")))
    except FileNotFoundError:
        return Fleet()
    except (OSError, CodecError, ValueError) as error:
        logger.bind(path=str(file), fault=str(error)).warning("health of before is not known")
        return Fleet()


def save_fleet(file: Path, fleet: Fleet) -> None:
    """Written whole or not at all; some hundred bytes, on each change of a state."""
    fresh = file.with_suffix(".new")
    try:
        fresh.write_text(canonical(fleet), encoding="ascii")
        fresh.replace(file)
    except OSError as error:
        logger.bind(path=str(file), fault=str(error)).warning("health not kept for the next start")
