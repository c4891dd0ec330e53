"""The notes that people get about a GPU beside its state: sentences for `status`, steps for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.domain.health import HealthNotes
from nri_gpu.domain.text import counted

REPAIRED: Final = "nri-gpu repaired"  # the operator's word


def sentences(place: str, uuid: str, notes: HealthNotes, xid_at: str) -> Iterator[str]:
    """Yield the lines of `status` about a GPU. place: its index. xid_at: when its last XID came."""
    if notes.reset:
        yield (
            f"GPU {place} is withheld until it is reset: {notes.reset}. If the driver has no recovery action (before "
            f"570), confirm the reset afterwards: {REPAIRED} {uuid}"
        )
    if notes.soon:
        yield f"GPU {place} is not granted again once its holder has ended: {notes.soon}"
    if notes.namespaces:
        yield f"GPU {place}: {failing(notes)}; nri-gpu doctor says how to withhold it"
    if notes.xid:
        yield f"GPU {place}'s last XID, {xid_at}: {notes.xid}"


def failing(notes: HealthNotes) -> str:
    """Say why the GPU may be the cause of what fails on it."""
    return (
        f"applications failed on it within a day under containers of {counted(len(notes.namespaces), 'namespace')} "
        f"({', '.join(notes.namespaces)}), so the GPU may be the cause"
    )


def reset_steps(uuid: str) -> tuple[str, ...]:
    return (
        f"nvidia-smi --gpu-reset -i {uuid}    # once nothing uses it; or reload the driver, or reboot",
        f"{REPAIRED} {uuid}    # after such a reset, if the driver has no recovery action (before 570)",
    )


def withhold_step(uuid: str) -> str:
    """Say how to withhold a GPU by hand."""
    return f'nri-gpu cordon {uuid} --why "applications fail on it"'
