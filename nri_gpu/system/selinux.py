"""SELinux labels on what confined containers are to read or share: an unlabelled file inherits that of /var or /run.

Source: container-selinux, container.te: `container_t` reads `container_ro_file_t` and writes `container_file_t`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from nri_gpu.system.storage import text_of

READ_ONLY: Final = "system_u:object_r:container_ro_file_t:s0"
SHARED: Final = "system_u:object_r:container_file_t:s0"
READABLE: Final = frozenset({"container_ro_file_t", "container_file_t", "container_share_t"})
_NAME: Final = "security.selinux"
_FILESYSTEMS: Final = Path("/proc/filesystems")


def label_if_enabled(label: str, filesystems: Path = _FILESYSTEMS) -> str:
    """Return the label if the kernel has SELinux, else empty. A pod sees this file, but not /sys/fs/selinux."""
    return label if "selinuxfs" in (text_of(filesystems) or "") else ""


def set_label(path: Path, label: str) -> None:
    """Label a file, folder or symlink of our own, never a hard link to a foreign file, which would be labelled, too.

    A file system or policy that does not know the label is no fault: then no container is confined by it.
    """
    if label:
        with suppress(OSError):
            os.setxattr(path, _NAME, label.encode() + b"\0", follow_symlinks=False)


def label_of(path: Path) -> str:
    """Return a file's label, or empty if it has none."""
    try:
        return os.getxattr(path, _NAME, follow_symlinks=False).rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""
