"""SIGKILL to dpkg in the middle of an upgrade: a whole version runs at every moment, and the next command mends it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from deploy.bundle import COMMON, DAEMON
from nri_gpu import __version__
from tests.packages.conftest import AT, DAEMONS, NEWER, Debs
from tests.support import packages
from tests.support.debian_root import DebianRoot, kill_group
from tests.support.waiting import wait_for

# Where dpkg is killed. While it unpacks one of the two: it has got so much of the files' archive, and waits for more.
UNPACKED_BYTES: Final = 4 << 20
# While it replaces file by file: at its rename(2) of this number, which strace counts.
RENAMES: Final = (50, 700)
# In postinst: before the new tree is filled, before it has its name, and before it is switched to.
PROGRAMS: Final = ("cp", "mv", "ln")
REACHED_S: Final = 60.0
# Come first in PATH. They tell that they were called, and wait to be killed.
STUBS: Final = Path("usr/local/sbin")
WAITS: Final = "#!/bin/sh\ntouch /run/reached\nexec sleep 600\n"
CUTS: Final = f"""#!/bin/sh
case "$1 $2" in
"--fsys-tarfile "*/{{package}}_*)
    /usr/bin/dpkg-deb "$@" | head -c {UNPACKED_BYTES}
    touch /run/reached
    exec sleep 600
    ;;
esac
exec /usr/bin/dpkg-deb "$@"
"""


def test_whatever_is_killed_a_whole_version_runs(installed: DebianRoot, debs: Debs) -> None:
    versions = {__version__: debs.this, NEWER: debs.newer}
    root = installed
    old, new = __version__, NEWER
    for moment in (COMMON, *RENAMES, DAEMON, *PROGRAMS):
        kill_at(moment, root, "dpkg", "-i", *versions[new])
        said = root.try_run("nri-gpu", "--version").stdout
        assert said in {f"nri-gpu {old}\n", f"nri-gpu {new}\n"}, (moment, said)
        assert root.run("nri-gpu", "check").startswith("/etc/nri-gpu/policy.toml: ok\n"), moment

        # The first mends all but what was not unpacked yet.
        root.try_run("dpkg", "--configure", "-a")
        if root.run("nri-gpu", "--version") != f"nri-gpu {new}\n" or root.run("dpkg", "--audit"):
            root.run("dpkg", "-i", *versions[new])
        assert root.run("nri-gpu", "--version") == f"nri-gpu {new}\n", moment
        for package in DAEMONS:
            assert "ok installed" in root.run("dpkg", "-s", package)
        [_] = root.run("sh", "-c", "ls -A1 /usr/lib/nri-gpu/live").split()
        old, new = new, old
    root.run("dpkg", "-P", *DAEMONS)
    assert not [path for path in root.files() if "nri-gpu" in path and not path.startswith(AT)]


def kill_at(moment: str | int, root: DebianRoot, *words: str) -> None:
    """Run it until it calls the program of that name, or its rename(2) of that number, and kill it all there."""
    if isinstance(moment, int):
        options = ["-f", "-o/dev/null", "-etrace=rename", f"-einject=rename:signal=KILL:when={moment}"]
        strace = [*packages.command("strace"), *options]
        done = subprocess.run([*strace, *root.command(*words)], capture_output=True, check=False)
        assert done.returncode == -9, done.stderr  # strace ends as what it traced
        return
    stub, reached = root.path / STUBS / ("dpkg-deb" if moment in DAEMONS else moment), root.path / "run/reached"
    stub.write_text(CUTS.format(package=moment) if moment in DAEMONS else WAITS)
    stub.chmod(0o755)
    command = start(root, *words)
    wait_for(f"dpkg to reach {moment}", reached.exists, REACHED_S)
    assert command.poll() is None
    kill_group(command, [9])
    stub.unlink()
    reached.unlink()


def start(root: DebianRoot, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        root.command(*words), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_an_interrupted_installation_is_mended(bookworm: DebianRoot, debs: Debs) -> None:
    root = bookworm
    kill_at("mv", root, "dpkg", "-i", *debs.this)
    assert "half-configured" in root.run("dpkg", "-s", COMMON)
    assert root.run("nri-gpu", "--version") == f"nri-gpu {__version__}\n"  # from the files as they were unpacked
    root.run("dpkg", "--configure", "-a")
    assert "ok installed" in root.run("dpkg", "-s", DAEMON)
    assert root.run("readlink", "-e", "/usr/lib/nri-gpu/current").startswith("/usr/lib/nri-gpu/live/")
