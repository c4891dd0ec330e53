"""The ledger of the daemon before this one, read back from `ledger.json`.

The runtime lists only what lives. Who left a GPU a moment ago, and what the kubelet gave to pods whose containers are
still to come, stands nowhere else. The next Synchronize replaces everything but these two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nri_gpu.allocation.leaver import Leaver
from nri_gpu.allocation.ledger import Entry, Ledger, Phase
from nri_gpu.allocation.promises import is_promise
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.runtime.state import LEDGER_SCHEMA

BYTES_MAX: Final = 64 * 1024 * 1024
GRACE_MAX_S: Final = 86_400.0


def former_ledger(file: Path, now: float) -> Ledger:
    """What the file tells, or an empty ledger. now: seconds on the boot's monotonic clock.

    Raises: ValueError: it is not a ledger; OSError: it is there and cannot be read.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(BYTES_MAX)
    except FileNotFoundError:
        return Ledger()
    try:
        raw = json.loads(text)
        if raw["schema"] != LEDGER_SCHEMA:
            raise ValueError(f"its schema is {raw['schema']}")
        entries = [entry for each in raw["grants"] if (entry := _entry(each))]
        leaving = {GpuUuid(_text(each, "gpu_uuid")): _leaver(each, now) for each in raw.get("leaving", ())}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not what nri-gpu writes: {error!r}") from error
    return Ledger({entry.grant.container_id: entry for entry in entries}, {}, leaving)


def _entry(raw: Mapping[str, Any]) -> Entry | None:
    """None: it holds nothing."""
    phase, mode = Phase(raw["phase"]), raw["mode"]
    if phase is Phase.LAPSED or mode == "none":
        return None
    id_ = ContainerId(_text(raw, "container_id"))
    grant = Grant(
        container_id=id_,
        container_name=_text(raw, "container"),
        pod_id=PodId(""),
        pod_uid=PodUid(_text(raw, "pod_uid")),
        pod_name=_text(raw, "pod"),
        namespace=_text(raw, "namespace"),
        uuids=_uuids(raw["gpu_uuids"]),
        mode=Mode(mode),
        generation=_text(raw, "driver_generation"),
    )
    # When a promise began is not told, and whoever carries it on limits it anew.
    return Entry(grant, phase, math.inf, math.inf) if is_promise(id_) else Entry(grant, phase, 0.0)


def _leaver(raw: Mapping[str, Any], now: float) -> Leaver:
    """A time to come was edited by hand, and would put off the end of the grace."""
    since, grace_s = float(raw["since_s"]), float(raw["grace_s"])
    if not (math.isfinite(since) and 0 <= grace_s <= GRACE_MAX_S):
        raise ValueError(f"a GPU that was left at {since} s with a grace of {grace_s} s")
    return Leaver(PodUid(_text(raw, "pod_uid")), _text(raw, "pod"), min(since, now), grace_s)


def _uuids(raw: object) -> tuple[GpuUuid, ...]:
    if not isinstance(raw, list) or not all(isinstance(each, str) for each in raw):
        raise TypeError("gpu_uuids is no list of texts")
    return tuple(map(GpuUuid, raw))


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return value
