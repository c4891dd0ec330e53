"""Application profiles: a small file for each set of a node's GPUs, which makes EGL and Vulkan ignore the others.

They are written in advance, beside the staged driver. The runtime mounts them, for containers in user namespaces as
another user than root, so they cannot be in the state folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.domain.edits import PROFILE_GPUS_MAX, PROFILE_MINOR_MAX, Profiles, mask
from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.host_files import check_folder
from nri_gpu.system.selinux import READ_ONLY, label_if_enabled, set_label
from nri_gpu.system.state import NodeState
from nri_gpu.system.storage import text_of, write_whole
from nri_gpu.system.tasks import LogOnce, work_when_told

FOLDER: Final = "profiles"  # below the folder of staged drivers; not a possible name of a generation
FOLDER_MODE: Final = 0o755
_NAME: Final = "_container_"


def planned_profiles(base: Path, minors: Iterable[int]) -> Profiles:
    """What `write_profiles` would make. Does not read the disk."""
    known, folder = frozenset(minors), str(base / FOLDER)
    if len(known) > PROFILE_GPUS_MAX:
        fault = f"it has {len(known)} GPUs, and profiles are written for up to {PROFILE_GPUS_MAX}"
        return Profiles(folder, fault=fault)
    if high := [minor for minor in known if minor > PROFILE_MINOR_MAX]:
        fault = f"/dev/nvidia{min(high)} has a minor above {PROFILE_MINOR_MAX}, which profiles have no bit for"
        return Profiles(folder, fault=fault)
    return Profiles(folder, known)


def write_profiles(base: Path, minors: Iterable[int], label: str | None = None) -> Profiles:
    """Writes a file for each set of these GPUs unless it exists. Raises: DriverError: one could not be written.

    label: of SELinux; None: what this host needs.
    """
    label = label_if_enabled(READ_ONLY) if label is None else label
    plan = planned_profiles(base, minors)
    folder = Path(plan.folder)
    try:
        base.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        check_folder(base)
        check_folder(folder, follow=False)
        folder.chmod(FOLDER_MODE)  # whatever the umask
        set_label(folder, label)
        for size in range(1, len(plan.minors) + 1):
            for some in combinations(sorted(plan.minors), size):
                path, text = Path(plan.path(some)), profile_text(some)
                if text_of(path) != text:
                    write_whole(path, text.encode(), 0o444)
                set_label(path, label)
    except OSError as error:
        raise DriverError(f"application profiles cannot be written below {folder}: {error.strerror}") from error
    return plan


def profile_text(minors: Iterable[int]) -> str:
    """The file's content: a mask of device minors for every program.

    Source: the driver's README on application profiles; NVIDIA/nvidia-container-toolkit
    cmd/nvidia-cdi-hook/update-application-profile, for a rule that fits everything.
    """
    profile = {"name": _NAME, "settings": ["EGLVisibleDGPUDevices", mask(minors)]}
    return json.dumps({"profiles": [profile], "rules": [{"pattern": [], "profile": _NAME}]}) + "\n"


RETRY_S: Final = 60.0


class ProfileController:
    """Writes application profiles when the GPUs change, and publishes for which GPUs they exist. again: set to look."""

    def __init__(self, stage_dir: Path, node_state: NodeState, *, retry_s: float = RETRY_S) -> None:
        self._stage_dir = stage_dir
        self._node_state = node_state
        self._retry_s = retry_s
        self._log = LogOnce()
        self.again = asyncio.Event()

    async def run(self) -> None:
        await work_when_told(self.again, self.look, retry_s=self._retry_s)

    async def look(self) -> bool:
        """Writes what is missing. Returns whether that worked."""
        node = self._node_state.node
        minors = frozenset(gpu.minor_number for gpu in node.gpus)
        # Where no GPU is known (the driver is being replaced, say) the profiles stay valid.
        if not minors or node.profiles == planned_profiles(self._stage_dir, minors):
            return True
        try:
            profiles = await asyncio.to_thread(write_profiles, self._stage_dir, minors)
        except DriverError as error:
            self._failed(str(error))
            return False
        self._log.clear()
        self._node_state.put_profiles(profiles)
        logger.bind(gpus=len(minors), path=profiles.folder).debug("application profiles written")
        return True

    def _failed(self, sentence: str) -> None:
        known = self._node_state.node.profiles
        if known is None or known.fault != sentence:
            self._node_state.put_profiles(Profiles(str(self._stage_dir), fault=sentence))
        self._log.warning("application profiles not written", sentence)
