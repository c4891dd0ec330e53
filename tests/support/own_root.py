"""The machine's root as one engine's own: what is written below these folders is gone with its mount namespace."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from tests.support.containerd import SYSTEM_PATH

OVERLAID: Final = ("etc", "opt", "run", "usr", "var")
SOCKET: Final = Path("/run/containerd/containerd.sock")
NRI: Final = Path("/run/nri")
SCRIPT_TIMEOUT_S: Final = 120.0
FOLDERS: Final = f"""
set -e
mkdir {{base}}/root/own
for folder in {" ".join(OVERLAID)}; do
    mkdir -p {{base}}/root/own/$folder/upper {{base}}/root/own/$folder/work
    mount -t overlay none /$folder \\
        -o lowerdir=/$folder,upperdir={{base}}/root/own/$folder/upper,workdir={{base}}/root/own/$folder/work
done
# The machine's own nri-gpu, and that of a test beside this one.
rm -rf /etc/nri-gpu /run/nri-gpu /var/lib/nri-gpu
"""
# The runtime's own folder was in memory already, and is covered now.
SOCKETS: Final = f"""
mkdir -p {SOCKET.parent} && mount -t tmpfs none {SOCKET.parent}
ln -s {{base}}/ctrd.sock {SOCKET}
mkdir -p {{base}}/nri {NRI} && mount --bind {{base}}/nri {NRI}
"""


def give_own_root(supervisor_pid: int, base: Path, more: str) -> None:
    """Overlay the root in the mount namespace of an engine that does not run yet, and run a script there.

    base: the engine's folder. more: the script.
    """
    script = (FOLDERS + more).format(base=base)
    done = subprocess.run(
        ["nsenter", f"--mount=/proc/{supervisor_pid}/ns/mnt", "--wd=/", "bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=SCRIPT_TIMEOUT_S,
        env={"PATH": SYSTEM_PATH},
    )
    assert done.returncode == 0, done.stdout
