"""What `check` says of the guard: whether one runs, is connected, and what it found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nri_gpu.policy.health import OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.runtime.guard_files import DEFAULT_RUN_DIR, read_seen
from nri_gpu.runtime.state import DEFAULT_STATE


def guard_advice(policy: Policy, state_dir: Path = DEFAULT_STATE, run_dir: Path = DEFAULT_RUN_DIR) -> tuple[str, ...]:
    """One sentence a thing to be done."""
    # In a pod another pod's guard cannot be seen: its readiness says what is said here.
    seen_here = state_dir.exists() and "KUBERNETES_SERVICE_HOST" not in os.environ
    return (*_settings(policy), *(_on_this_node(run_dir) if seen_here else ()))


def _settings(policy: Policy) -> Iterator[str]:
    if policy.guard.index <= policy.plugin.index:
        yield (
            f'guard.index = "{policy.guard.index}" is not behind plugin.index = "{policy.plugin.index}": starts are '
            "then refused with the guard's sentence, where nri-gpu's own would say more"
        )
    if policy.guard.stop_ungranted and find_spec("grpc") is None:
        yield "guard.stop_ungranted has no effect: grpcio is not installed; pip install 'nri-gpu[cri]'"
    if policy.health.containers is OnBad.STOP and find_spec("grpc") is None:
        yield "health.containers has no effect: grpcio is not installed; pip install 'nri-gpu[cri]'"


def _on_this_node(run_dir: Path) -> Iterator[str]:
    """Of a node that nri-gpu has served since it booted: on any other there is nothing to guard."""
    seen = read_seen(run_dir)
    if seen is None:
        yield (
            "no guard runs on this node: a container that asks for GPUs, created and started while `nri-gpu run` is "
            "away, runs without them; systemctl enable --now nri-gpu-guard"
        )
    elif not seen.connected:
        why = seen.fault or "`systemctl status nri-gpu-guard` says why"
        yield f"the guard (pid {seen.pid}) is not connected to the runtime: {why}"
    elif seen.ungranted:
        yield (
            f"{seen.ungranted} containers ran without the GPUs they asked for when the guard connected: "
            "`journalctl -u nri-gpu-guard` names them; delete their pods to have them granted"
        )
