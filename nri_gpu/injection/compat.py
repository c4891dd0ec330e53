"""A newer libcuda in front of the driver's: one folder, mounted whole, that leads the loader's path.

The driver's own libraries stay where they are, so whatever the package lacks is found behind it. A program that clears
its environment finds the driver's libcuda alone: it then has the driver's CUDA, as without a package.
"""

from __future__ import annotations

from collections.abc import Iterable
from posixpath import normpath
from typing import Final

from nri_gpu.domain.compat import CompatPackage
from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import Mount
from nri_gpu.injection.env import LIBRARY_PATH

PLACE: Final = "/opt/nri-gpu/compat"


def compat_mount(package: CompatPackage) -> Mount:
    """The staged package at its place."""
    return Mount(PLACE, package.path)


def compat_hindrance(container: Container) -> str:
    """Why no package could win over the driver's libraries in this container; empty where it does. A clause."""
    if LIBRARY_PATH in container.env_twice:
        return f"image and pod both set {LIBRARY_PATH}, and of the two NRI reaches only the one that loses"
    if any(_touches(other) for other in _near(container.mounts)):
        return f"the pod has a mount of its own at {PLACE}"
    return ""


def _near(mounts: Iterable[str]) -> Iterable[str]:
    return (normpath(f"/./{other}") for other in mounts)


def _touches(other: str) -> bool:
    return other in ("/", PLACE) or other.startswith(f"{PLACE}/") or PLACE.startswith(f"{other}/")
