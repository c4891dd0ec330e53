"""The log of an observer's findings: a line when one comes, and one when it is gone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from loguru import logger

from nri_gpu.daemon.answers import ObservedFinding
from nri_gpu.domain.fair_share import fair_share
from nri_gpu.observe.use_findings import subject

LINES_MAX: Final = 32  # of one look; `status` and metrics have the rest


def log_findings(before: Iterable[ObservedFinding], after: Iterable[ObservedFinding]) -> None:
    """Log what came and what went between two looks."""
    old, new = ({subject(each): each for each in found} for found in (before, after))
    for found in _some(each for about, each in new.items() if about not in old):
        bound = logger.bind(event=found.kind, namespace=found.namespace, pod_name=found.pod, fault=found.message)
        bound.bind(container_name=found.container, gpu_uuid=",".join(found.gpu_uuids)).warning("observer finding")
    for found in _some(each for about, each in old.items() if about not in new):
        bound = logger.bind(event=found.kind, namespace=found.namespace, pod_name=found.pod)
        bound.bind(container_name=found.container, gpu_uuid=",".join(found.gpu_uuids)).info("observer finding is gone")


def _some(found: Iterable[ObservedFinding]) -> list[ObservedFinding]:
    return fair_share(found, lambda each: (each.kind, each.namespace), LINES_MAX)
