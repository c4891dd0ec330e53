"""Names that several parts share: annotation keys, files and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEFAULT_STATE: Final = Path("/run/nri-gpu")
CONTROL_SOCKET: Final = "control.sock"
LEDGER: Final = "ledger.json"
