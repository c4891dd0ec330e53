"""Ask systemd itself whether our units are well-formed, and as tight as they say. No systemd needs to run."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.support import packages

# Tenths of the figure of `systemd-analyze security`, which has to stay below. The unit gives 9 on systemd 252; newer
# ones ask more questions, so there is room for a few, and none for losing a line that counts.
THRESHOLD: Final = 15
# Making nodes and loading modules takes four capabilities that the daemon does without.
# The drop-in for MPS opens the unit for other programs than ours.
# The one for metrics gives it the loopback. The DRA driver talks to the API server.
THRESHOLDS: Final = {
    **{"nri-gpu-prepare.service": 25, "nri-gpu-dra.service": 22},
    **{"mps.conf": 28, "metrics.conf": 22},
}
TIMEOUT_S: Final = 60
_EXEC: Final = re.compile(r"^(Exec\w+=[-@:+!]*)(\S+)", re.MULTILINE)
_FIGURE: Final = re.compile(r"exposure level for \S+: (\d+\.\d)")


def runnable(text: str) -> str:
    """A unit's text with every Exec line's program replaced: ours is not installed where this runs."""
    return _EXEC.sub(lambda match: match[1] + "/bin/true", text)


def figure(report: str) -> str:
    """The exposure figure of a report of `security`; empty where there is none."""
    match = _FIGURE.search(report)
    return match[1] if match else ""


def installed_name(unit: Path) -> str:
    """What a unit file is called where it is installed: systemd names a mount after its folder, escaped."""
    where = re.search(r"^Where=(.+)$", unit.read_text(), re.MULTILINE)
    if where is None:
        return unit.name
    escape = [*packages.command("systemd-escape", "systemd"), "--path", f"--suffix={unit.suffix.strip('.')}", where[1]]
    return subprocess.run(escape, capture_output=True, text=True, check=True).stdout.strip()


def faults(unit: Path, threshold: int | None = None) -> list[str]:
    """Sentences on what systemd has against a unit file; none is good. Only services have an exposure."""
    limit = THRESHOLDS.get(unit.name, THRESHOLD) if threshold is None else threshold
    if unit.suffix == ".conf":
        return _faults_with(unit, limit)
    with tempfile.TemporaryDirectory() as folder:
        # A path unit is nothing without its service.
        for each in {unit, unit.with_suffix(".service")} if unit.suffix == ".path" else {unit}:
            (Path(folder) / installed_name(each)).write_text(runnable(each.read_text()))
        copy = Path(folder) / installed_name(unit)
        return [*malformed(copy), *(_exposed(copy, limit) if unit.suffix == ".service" else ())]


def _faults_with(drop_in: Path, limit: int) -> list[str]:
    """Of a unit with its drop-in, as systemd reads the two: lists add up, other keys of the drop-in win."""
    service = drop_in.parent.with_suffix("")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / service.name
        # One file of both: offline, `security` does not look for drop-ins.
        copy.write_text(runnable(f"{service.read_text()}\n{drop_in.read_text()}"))
        return [*malformed(copy), *_exposed(copy, limit)]


def malformed(unit: Path) -> list[str]:
    done = run("verify", "--man=no", str(unit))
    # An unknown key is only a warning to `verify`, so whatever it says of our file counts; it may speak of others too.
    lines = [line.replace(f"{unit}:", "line ") for line in done.stderr.splitlines() if unit.name in line]
    if done.returncode and not lines:
        lines = [f"verify ends with {done.returncode}: {done.stderr.strip()}"]
    return lines


def _exposed(unit: Path, threshold: int) -> list[str]:
    done = run("security", "--offline=true", f"--threshold={threshold}", "--no-pager", str(unit))
    if not done.returncode:
        return []
    exposure = figure(done.stdout)
    if not exposure:
        return [f"security ends with {done.returncode}: {done.stderr.strip()}"]
    open_lines = [line for line in done.stdout.splitlines() if line.startswith("✗")]
    return [f"exposure {exposure} is above {threshold / 10}:", *open_lines]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The report's marks and width depend on both.
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "COLUMNS": "200"}
    return subprocess.run(
        [*packages.command("systemd-analyze", "systemd"), *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env=environment,
        timeout=TIMEOUT_S,
    )
