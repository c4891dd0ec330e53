"""The folder of what is kept over reboots."""

from __future__ import annotations

import os
from pathlib import Path

from nri_gpu.policy.usage_settings import OFF, UsageSettings
from nri_gpu.records.policy_file import UNIT_FOLDER, unit_folder
from nri_gpu.system.storage import stat_of, why_untrusted


def kept_folder(settings: UsageSettings, *, in_pod: bool, simulated: bool, usual: Path = UNIT_FOLDER) -> Path | str:
    """Return the folder, or a clause: why nothing is kept. usual: the folder of an installed nri-gpu."""
    if settings.dir == OFF:
        return "usage.dir is off"
    if settings.dir:
        return Path(settings.dir)
    if simulated:
        return "the node is simulated, and usage.dir names no folder"
    return unit_folder() or _installed(usual, in_pod=in_pod)


def _installed(folder: Path, *, in_pod: bool) -> Path | str:
    try:
        found = stat_of(folder)
    except OSError as error:
        return str(error)
    if in_pod and not folder.is_mount():
        return f"{folder} is not mounted in this pod (paths.remembered of the chart)"
    if found is None:
        return f"there is no {folder}"
    if why := why_untrusted(found, folder):
        return f"{folder}: {why}"
    return folder if os.access(folder, os.W_OK) else f"{folder} cannot be written"
