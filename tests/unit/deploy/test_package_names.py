"""`nri-gpu` on the package index is not ours, and whoever takes that name would be installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_nothing_says_to_install_our_own_name() -> None:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    said = re.compile(r"pip3? install[^\n]*?(?<![\w./-])['\"]?nri-gpu(?![\w/-])")
    texts = {name: (ROOT / name).read_text(errors="replace") for name in listed if (ROOT / name).is_file()}
    assert [name for name, text in texts.items() if said.search(text)] == []
