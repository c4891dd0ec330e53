"""A daemon whose mount shows a folder of the kubelet's that is not there any more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from nri_gpu.kubelet.required_device import KEY_FILE
from tests.support.daemon import FOUR_GPUS
from tests.support.waiting import wait_for


def emptied(folder: Path) -> bool:
    """Whether it is gone, since it was emptied before anything more came into it."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
    return not folder.exists()


MOUNTED = """
set -e
mkdir "$1/kubelet" "$1/seen"
mount --bind "$1/kubelet" "$1/seen"
exec "$2" -m nri_gpu run --gpus "$3" --state-dir "$1/state" --socket "$1/no.sock" \\
    --stage-dir "$1/drivers" --policy "$1/policy.toml"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_folder_made_anew_behind_a_mount_ends_the_process(folder: Path) -> None:
    """A pod's mount of the folder above pins the one that was removed, and only a new container has the next."""
    own = folder / "kubelet" / "device-plugins"
    seen = folder / "seen" / "device-plugins"
    (folder / "policy.toml").write_text(
        f'[kubelet]\nenabled = true\ndir = "{seen}"\nregistry_dir = "{seen}"\n'
        f'registration = "watcher"\ncdi_dir = "{folder}/cdi"\n'
    )
    alone = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", MOUNTED, "sh"]
    command = [*alone, str(folder), sys.executable, str(FOUR_GPUS)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            wait_for("mount", (folder / "seen").exists, 20)
            own.mkdir()
            wait_for("key", (own / KEY_FILE).exists, 20)
            wait_for("folder gone", lambda: emptied(own), 20)
            wait_for("folder gone", lambda: emptied(folder / "kubelet"), 20)
            (folder / "kubelet").mkdir()
            _, said = daemon.communicate(timeout=20)
        finally:
            daemon.kill()
    assert daemon.returncode == Exit.UNAVAILABLE
    assert "does not show its replacement" in said
    assert "Traceback" not in said
