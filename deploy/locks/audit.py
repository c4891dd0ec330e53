"""Tells whether a package of a release has a known vulnerability: pip-audit, on deploy/locks/runtime.txt.

    python deploy/locks/audit.py

It asks OSV, or the service of the same interface that $PIP_AUDIT_OSV_URL names. Where that cannot be reached it says so
in one line and ends well, because a network is no fault of the tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Final

LOCK: Final = Path(__file__).with_name("runtime.txt")
SERVICE: Final = "PIP_AUDIT_OSV_URL"
PUBLIC: Final = "https://api.osv.dev/v1/query"
# For looking up a name, too, which urllib's own timeout leaves out.
REACHED_WITHIN_S: Final = 3.0
QUESTION: Final = b'{"package": {"name": "pip", "ecosystem": "PyPI"}, "version": "25.0"}'


def unreachable(url: str) -> str | None:
    """Why the service does not answer, or None when it does."""
    fault = [f"no answer in {REACHED_WITHIN_S:.0f} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, QUESTION), timeout=REACHED_WITHIN_S):
                fault.clear()
        except OSError as error:
            fault[:] = [str(error)]

    # A daemon, because a look-up of a name that hangs must not keep this process.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(REACHED_WITHIN_S)
    return fault[0] if fault else None


def main() -> int:
    """Audit. Returns an exit code: 0 also where nothing could be asked."""
    url = os.environ.get(SERVICE, PUBLIC)
    if fault := unreachable(url):
        print(f"not audited: no vulnerability is known or excluded, because {url} cannot be reached: {fault}")
        return 0
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service=osv", f"--osv-url={url}"]
    # pip itself is not asked for anything: the lock names all versions.
    quiet = ["--disable-pip", "--no-deps", "--progress-spinner=off"]
    return subprocess.run([*command, *quiet, "--requirement", str(LOCK)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
