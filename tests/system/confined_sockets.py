"""Opens sockets with no more calls than nri-gpu.service has.

python -m tests.system.confined_sockets
"""

from __future__ import annotations

import errno
import socket
import sys

from tests.support.seccomp import load_filters
from tests.support.unit_file import Unit


def main() -> int:
    """Whether the unit lets in what it must, and nothing else."""
    load_filters(Unit.read())
    socket.socket(socket.AF_UNIX).close()
    for family in (socket.AF_INET, socket.AF_NETLINK):
        try:
            socket.socket(family)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                continue
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
