"""What pods in user namespaces take of a node: a pod network, folders that mapped users may enter, nodes on the host.

Nodes are made in the private containerd's own mount namespace, on a /dev of its own: never on the host's.
"""

import json
import subprocess
from collections.abc import Mapping
from typing import Final

from tests.support.containerd import Containerd

# Answers as a plugin would that made an interface, and makes none: nobody here talks to anybody.
PLUGIN: Final = """\
#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]}' ;;
ADD) echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "'$CNI_NETNS'"}],' \\
    '"ips": [{"interface": 0, "address": "10.99.0.2/24"}]}' ;;
*) echo '{}' ;;
esac
"""
# All that runc and the test image take from /dev, in a folder that then takes its place.
OWN_DEV: Final = """\
set -e
mkdir -p {new}
mount -t tmpfs none {new}
for node in null zero full random urandom tty; do touch {new}/$node; mount --bind /dev/$node {new}/$node; done
mkdir {new}/pts {new}/shm
mount --rbind /dev/pts {new}/pts
ln -s /proc/self/fd {new}/fd
ln -s pts/ptmx {new}/ptmx
{nodes}
mount --move {new} /dev
"""


def prepare(node: Containerd) -> None:
    """Before it boots."""
    node.base.chmod(0o755)
    folder = node.base / "cni"
    folder.mkdir()
    for name in ("loopback", "silent"):
        (folder / name).write_text(PLUGIN)
        (folder / name).chmod(0o755)
    network = {"cniVersion": "1.0.0", "name": "tests", "plugins": [{"type": "silent"}]}
    (folder / "10-tests.conflist").write_text(json.dumps(network))


def make_nodes(node: Containerd, numbers: Mapping[str, tuple[int, int]]) -> None:
    """Character devices in the /dev that this containerd and its runc see: name -> major and minor."""
    lines = (f"mknod -m 666 {{new}}/{name} c {major} {minor}" for name, (major, minor) in numbers.items())
    new = node.base / "dev"
    script = OWN_DEV.format(new=new, nodes="\n".join(lines).format(new=new))
    subprocess.run(
        ["nsenter", "--mount", "--target", str(node.supervisor_pid), "sh", "-c", script], check=True, timeout=30
    )
