"""The machine's root as one containerd's own: what is written below these folders is gone with its mount namespace.

node = Containerd(runtime)
shell = OwnRoot(node)         # before it boots: containers must see the same folders
node.boot()
shell.run("nri-gpu status")   # with the paths that an operator uses: /run/containerd, /etc/nri-gpu, ...
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from tests.support.containerd import SYSTEM_PATH, Containerd

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


class OwnRoot:
    """A shell in the mount namespace of an engine that does not run yet.

    base: its folder. more: a script to begin with.
    """

    def __init__(self, supervisor_pid: int, base: Path, more: str = "") -> None:
        self._namespace = f"--mount=/proc/{supervisor_pid}/ns/mnt"
        done = self.run((FOLDERS + more).format(base=base))
        assert done.returncode == 0, done.stdout

    @classmethod
    def of(cls, node: Containerd) -> Self:
        """With the runtime's sockets where its package has them."""
        return cls(node.supervisor_pid, node.base, SOCKETS)

    def words(self, *command: str | Path) -> list[str]:
        """The command that runs another one there."""
        return ["nsenter", self._namespace, "--wd=/", *map(str, command)]

    def run(self, script: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A script of bash; its output and its errors come together, as on a terminal."""
        return subprocess.run(
            self.words("bash", "-c", script),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SCRIPT_TIMEOUT_S,
            env={"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": os.environ.get("LANG", "C.UTF-8")}
            | dict(environment or {}),
        )

    def write_program(self, path: Path, text: str) -> None:
        """A script there, such as in /usr/local/bin."""
        done = subprocess.run(
            self.words("sh", "-c", f"cat > {path} && chmod 0755 {path}"), input=text, text=True, check=False
        )
        assert done.returncode == 0
