"""Where a container has the driver by the default strategy, on this machine."""

from typing import Final

from nri_gpu.domain.edits import Edits
from nri_gpu.injection.driver_mounts import HWCAPS_PLACES, TREE_PLACES

LIBRARIES: Final = HWCAPS_PLACES[0] if HWCAPS_PLACES else f"{TREE_PLACES[0]}/lib64"


def tree_of(edits: Edits) -> str:
    """The staged tree that a container gets."""
    return edits.mounts[HWCAPS_PLACES[0] if HWCAPS_PLACES else TREE_PLACES[0]].source.removesuffix("/lib64")
