"""Python packages that not every installation has, and how to install one: by its own name, with this interpreter.

Never as an extra of `nri-gpu`: that name on the package index is not ours, and whoever takes it would be installed.
"""

from __future__ import annotations

import shlex
import sys
from typing import Final

PACKAGES: Final = {"grpc": "grpcio", "prometheus_client": "prometheus-client", "urllib3": "urllib3"}  # by their modules


def how_to_install(module: str) -> str:
    """Return the command, for a module of PACKAGES."""
    return f"{shlex.quote(sys.executable or 'python3')} -m pip install {PACKAGES[module]}"


def not_installed(module: str) -> str:
    """Return a sentence for people: what is missing, and the command."""
    return f"{PACKAGES[module]} is not installed: {how_to_install(module)}"


def import_failed(error: ImportError) -> str:
    """Return the same for a failed import; of another module, which came with a package, only what Python says."""
    module = (error.name or "").partition(".")[0]
    return not_installed(module) if module in PACKAGES else str(error)
