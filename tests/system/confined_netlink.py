"""Opens the socket for device events with no more calls than nri-gpu.service has.

python -m tests.system.confined_netlink
"""

from __future__ import annotations

import errno
import socket
import sys

from nri_gpu.inventory.node_watch import netlink
from tests.support.seccomp import load_filters
from tests.support.unit_file import Unit


def main() -> int:
    """Whether the unit lets in what it must, and nothing else."""
    load_filters(Unit.read())
    netlink().close()
    try:
        socket.socket(socket.AF_INET)
    except OSError as error:
        return int(error.errno != errno.EAFNOSUPPORT)
    return 2


if __name__ == "__main__":
    sys.exit(main())
