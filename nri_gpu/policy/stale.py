"""What a stale inventory means: the age is told by whoever has a clock."""

from __future__ import annotations

from nri_gpu.policy.model import Policy, Stale
from nri_gpu.policy.terms import shown_source


def stale_fault(policy: Policy, age_s: float) -> str:
    """Why nothing can be granted by an inventory of this age (seconds); empty when it can."""
    settings = policy.inventory
    if settings.stale is Stale.SERVE or age_s <= settings.stale_after_s:
        return ""
    return (
        f"the driver was last heard of {age_s:.0f} s ago, more than inventory.stale_after_s = {settings.stale_after_s} "
        f"in {shown_source(policy)} lets pass: see `nvidia-smi` and nri-gpu's log on the node, and try again."
    )
