"""In a pod the driver's root is a mount of the host's: what is found below it is told by the name the runtime knows.

Staged files need none of this: their folder has one path inside and outside. Extras that are the host's own files and
sockets are mounted from where they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from nri_gpu.domain.edits import Mount
from nri_gpu.domain.extras import Extra, Offer
from nri_gpu.inventory.offers import Roots


def roots_of(driver_root: Path, host_root: str, *, proc: Path, sys: Path) -> Roots:
    """Where to look. The root of a pod is its image's; the host's is the driver's, where all of it is mounted there."""
    roots = Roots(proc=proc, sys=sys, driver=driver_root)
    return replace(roots, host=driver_root) if host_root == "/" else roots


def as_host_names(offers: Mapping[Extra, Offer], root: Path, host_root: Path) -> Mapping[Extra, Offer]:
    """Offers with the sources of their mounts renamed. What lies elsewhere is the image's own and nobody's extra."""
    real = Path(os.path.realpath(root))  # as sources are
    return {extra: _renamed(offer, real, host_root) for extra, offer in offers.items()}


def _renamed(offer: Offer, root: Path, host_root: Path) -> Offer:
    mounts: list[Mount] = []
    for mount in offer.mounts:
        source = Path(mount.source)
        if not source.is_relative_to(root):
            return Offer(lacking=f"{source} is in nri-gpu's own image and not the host's: mount that below {root}")
        mounts.append(replace(mount, source=str(host_root / source.relative_to(root))))
    return replace(offer, mounts=tuple(mounts))
