"""The folder of what is kept over a boot."""

from __future__ import annotations

import os
from pathlib import Path

from nri_gpu.domain.errors import cause_of
from nri_gpu.policy.usage_settings import OFF, UsageSettings
from nri_gpu.records.policy_file import UNIT_FOLDER, unit_folder
from nri_gpu.system.storage import stat_of, why_untrusted


def kept_folder(settings: UsageSettings, *, simulated: bool = False) -> Path | str:
    """Return the folder, or a sentence why there is none."""
    if settings.dir == OFF:
        return 'nothing is kept over a boot on this node: its policy has usage.dir = "off"'
    if simulated and not settings.dir:
        return "nothing is kept of a simulated node: name a folder by usage.dir in its policy"
    folder = Path(settings.dir) if settings.dir else unit_folder() or UNIT_FOLDER
    try:
        found = stat_of(folder)
    except OSError as error:
        return f"{folder} cannot be looked at: {cause_of(error)}"
    if found is None:
        return f"{folder} is missing: make it, root's, or name another by usage.dir in the policy"
    if why := why_untrusted(found, folder):
        return f"{folder} cannot be used ({why}): correct that, or name another by usage.dir in the policy"
    if not settings.dir and "KUBERNETES_SERVICE_HOST" in os.environ and not folder.is_mount():
        return f"{folder} is no mount of the node's in this pod, and ends with it"
    return folder
