"""The checks of GPUs whose health needs an administrator, as the daemon reports it."""

from __future__ import annotations

from collections.abc import Iterator

from nri_gpu.doctor.examined import Examined
from nri_gpu.domain.finding import Finding, error, warning
from nri_gpu.health.health_notes import failing, reset_steps, withhold_steps


def health_findings(seen: Examined) -> Iterator[Finding]:
    """Report GPUs that wait for a reset, and those on which the applications of several namespaces fail."""
    for gpu in seen.status.gpus if seen.status else ():
        notes, name = gpu.notes, f"GPU {gpu.place}"
        if notes.reset:
            yield error(name, f"it is withheld until it was reset: {notes.reset}", *reset_steps(gpu.uuid))
        if notes.soon:
            soon, *_ = reset_steps(gpu.uuid)
            yield warning(name, f"it is offered to nobody once its holder has gone: {notes.soon}", soon)
        if notes.namespaces:
            yield warning(name, failing(notes), *withhold_steps(gpu.uuid))
