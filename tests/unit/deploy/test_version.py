"""What files that users read and copy call this version, and never what they install it by."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import yaml

from nri_gpu import __version__

ROOT: Final = Path(__file__).parents[3]
# An image tag, as in `nri-gpu:0.1.0`, or a file of a release, as in `nri-gpu_0.1.0_amd64.deb`.
NAMED: Final = re.compile(r"nri[-_]gpu[:_-](\d+\.\d+\.\d+)")


def test_the_chart_has_it() -> None:
    """As the program's version: the chart's own is raised with its values."""
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "nri-gpu" / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_what_users_copy_has_it() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), version)
        for folder in ("docs", "deploy", "systemd")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix != ".svg"
        for version in NAMED.findall(path.read_text(errors="replace"))
    }
    assert ("docs/kubernetes-install.md", __version__) in named
    assert {version for _, version in named} == {__version__}


def test_the_changelog_begins_with_it() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", __version__]


def test_nothing_says_to_install_our_own_name() -> None:
    """`nri-gpu` on the package index is not ours, and whoever takes that name would be installed."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    said = re.compile(r"pip3? install[^\n]*?(?<![\w./-])['\"]?nri-gpu(?![\w/-])")
    texts = {name: (ROOT / name).read_text(errors="replace") for name in listed if (ROOT / name).is_file()}
    assert [name for name, text in texts.items() if said.search(text)] == []
