"""Stops containers through CRI, in a child process, and logs the outcome of each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from loguru import logger

from nri_gpu.policy.service import GuardSettings

PATIENCE_S: Final = 30.0  # beyond the grace, for a runtime whose CRI is still starting
STOP_LIMIT_S: Final = 2 * PATIENCE_S
CRI_MODULE: Final = "nri_gpu.system.cri_child"


def warn_without_grpc(setting: str) -> None:
    """Log that a setting has no effect, where grpcio is not installed."""
    if find_spec("grpc") is None:
        fault = "grpcio is not installed: pip install 'nri-gpu[cri]'"
        logger.bind(fault=fault).error(f"{setting} has no effect")


async def stop_containers(names: Mapping[str, str], settings: GuardSettings, why: str) -> frozenset[str]:
    """Stop containers; returns the ids of those that are stopped. Raises: OSError, TimeoutError.

    names: container id -> the pod, for the log. why: ends the phrase "container stopped: ".
    """
    arguments = (settings.cri_socket, str(settings.stop_grace_s), str(PATIENCE_S))
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-m", CRI_MODULE, *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(settings.stop_grace_s + STOP_LIMIT_S):
            output, errors = await child.communicate("\n".join(names).encode())
    finally:
        if child.returncode is None:
            child.kill()
    stopped = set()
    for line in output.decode(errors="replace").splitlines():
        container, _, outcome = line.partition(" ")
        bound = logger.bind(pod_name=names.get(container, "?"), container_id=container)
        if outcome == "ok":
            stopped.add(container)
            bound.warning(f"container stopped: {why}")
        else:
            bound.bind(fault=outcome).error("container not stopped")
    if child.returncode and not output:
        fault = (errors.decode(errors="replace").strip().splitlines() or ["?"])[-1]
        logger.bind(socket=settings.cri_socket, fault=fault).error("containers not stopped")
    return frozenset(stopped)
