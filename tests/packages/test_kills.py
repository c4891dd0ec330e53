"""SIGKILL to dpkg in the middle of an upgrade: a whole version runs at every moment, and the next command mends it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Final

from nri_gpu import __version__
from tests.packages.conftest import AT, NEWER, Debs
from tests.support.debian_root import DebianRoot, kill_group
from tests.support.waiting import wait_for

# What dpkg or our scripts have made when they are killed: in the middle of unpacking, of replacing file by file, of the
# new tree, and between two of its steps.
MOMENTS: Final = (
    "usr/lib/nri-gpu/bundle/common/nri_gpu/__init__.py.dpkg-new",
    "usr/bin/nri-gpu.dpkg-tmp",
    "usr/share/nri-gpu/manifests/dra.yaml.dpkg-tmp",
    "usr/lib/nri-gpu/live/.new.*/common/nri_gpu",
    "usr/lib/nri-gpu/live/.new.*/common/nri_gpu/__pycache__",
)
AFTER_S: Final = (0.2, 0.8)
APPEARS_S: Final = 60.0


def test_whatever_is_killed_a_whole_version_runs(installed: DebianRoot, debs: Debs) -> None:
    versions = {__version__: debs.this, NEWER: debs.newer}
    root = installed
    old, new = __version__, NEWER
    for moment in (*MOMENTS, *AFTER_S):
        upgrade = start(root, "dpkg", "-i", f"{AT}/{versions[new]}")
        killed = wait_until(moment, upgrade, root.path)
        kill_group(upgrade, [9])
        said = root.try_run("nri-gpu", "--version").stdout
        assert said in {f"nri-gpu {old}\n", f"nri-gpu {new}\n"}, (moment, said)
        assert root.run("nri-gpu", "check").startswith("/etc/nri-gpu/policy.toml: ok\n"), moment

        # The first mends all but what was not unpacked yet.
        root.try_run("dpkg", "--configure", "-a")
        if root.run("nri-gpu", "--version") != f"nri-gpu {new}\n":
            root.run("dpkg", "-i", f"{AT}/{versions[new]}")
        assert root.run("nri-gpu", "--version") == f"nri-gpu {new}\n", (moment, killed)
        assert "ok installed" in root.run("dpkg", "-s", "nri-gpu")
        [_] = root.run("sh", "-c", "ls -A1 /usr/lib/nri-gpu/live").split()
        old, new = new, old
    root.run("dpkg", "-P", "nri-gpu")
    assert not [path for path in root.files() if "nri-gpu" in path and not path.startswith(AT)]


def start(root: DebianRoot, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        root.command(*words), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_until(moment: str | float, process: subprocess.Popen[bytes], root: Path) -> bool:
    """Until a path has appeared, or so many seconds have passed. Returns whether the process still runs."""
    if isinstance(moment, float):
        time.sleep(moment)
    else:
        wait_for(moment, lambda: process.poll() is not None or any(root.glob(moment)), APPEARS_S, poll_s=0.001)
    return process.poll() is None


def test_an_interrupted_installation_is_mended(bookworm: DebianRoot, debs: Debs) -> None:
    root = bookworm
    install = start(root, "dpkg", "-i", f"{AT}/{debs.this}")
    wait_until("usr/lib/nri-gpu/live/.new.*", install, root.path)
    kill_group(install, [9])
    assert "half-configured" in root.run("dpkg", "-s", "nri-gpu")
    assert root.run("nri-gpu", "--version") == f"nri-gpu {__version__}\n"  # from the files as they were unpacked
    root.run("dpkg", "--configure", "-a")
    assert "ok installed" in root.run("dpkg", "-s", "nri-gpu")
    assert root.run("readlink", "-e", "/usr/lib/nri-gpu/current").startswith("/usr/lib/nri-gpu/live/")
