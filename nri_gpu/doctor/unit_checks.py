"""The checks of nri-gpu's units in /etc: one may hide its package's, or start a program that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import UNIT_FOLDERS, is_enabled
from nri_gpu.domain.finding import Finding, error, warning
from nri_gpu.system.storage import is_there, text_of

_SUBJECT: Final = "units"
_ETC, _PACKAGES, _ = UNIT_FOLDERS
_OURS: Final = ("nri-gpu*.service", "nri-gpu*.path", r"run-nri\x2dgpu-mps-clients.mount")
_UNIT_MAX: Final = 1 << 16  # bytes
# The program of a line, with its marks for systemd; in quotes where it has blanks.
_STARTS: Final = re.compile(r"""^[ \t]*ExecStart[ \t]*=[ \t]*[-@:+!|]*("[^"\n]*"|'[^'\n]*'|[^\s"']+)""", re.MULTILINE)


def unit_findings(seen: Examined) -> Iterator[Finding]:
    """Report units of ours in /etc that are at fault. A unit that is masked is the administrator's choice."""
    for unit in _units(seen):
        yield from _hidden(seen, unit)
        yield from _absent(seen, unit)
    for pattern in _OURS:
        yield from _dangling(seen, pattern)


def _units(seen: Examined) -> Iterator[str]:
    """Yield the names of units that are files, not links: systemd makes those to mask a unit, and for an alias."""
    for pattern in _OURS:
        for path in sorted(seen.at(_ETC).glob(pattern)):
            if path.is_file() and not path.is_symlink():
                yield path.name


def _hidden(seen: Examined, unit: str) -> Iterator[Finding]:
    if is_there(seen.at(f"{_PACKAGES}/{unit}")):
        read_again = f"systemctl reenable '{unit}'" if is_enabled(seen, unit) else "systemctl daemon-reload"
        yield warning(
            _SUBJECT,
            f"{_ETC}/{unit} hides the package's {_PACKAGES}/{unit}, so upgrades do not change what runs",
            f"{_set_aside(unit)}    # your changes belong into a drop-in: systemctl edit",
            f"{read_again} && systemctl try-restart '{unit}'",
        )


def _absent(seen: Examined, unit: str) -> Iterator[Finding]:
    """Report programs that a unit starts and that are missing, unless a drop-in names others."""
    if any("ExecStart" in (text_of(path, _UNIT_MAX) or "") for path in seen.at(f"{_ETC}/{unit}.d").glob("*.conf")):
        return
    for word in _STARTS.findall(text_of(seen.at(f"{_ETC}/{unit}"), _UNIT_MAX, "utf-8") or ""):
        program = word.strip("\"'").replace("%%", "%")
        if program.startswith("/") and not is_there(seen.at(program)):
            yield error(
                _SUBJECT,
                f"{_ETC}/{unit} starts {program}, which is not there",
                f"{_set_aside(unit)}    # or install that program again",
                "systemctl daemon-reload",
            )


def _set_aside(unit: str) -> str:
    """Return the command that moves a unit away, and overwrites nothing that was moved before."""
    return f"mv --backup=numbered '{_ETC}/{unit}' '{_ETC}/{unit}.old'"


def _dangling(seen: Examined, pattern: str) -> Iterator[Finding]:
    """Report drop-ins that are links to what is not there."""
    for path in sorted(seen.at(_ETC).glob(f"{pattern}.d/*.conf")):
        if path.is_symlink() and not is_there(seen.at(path.readlink()) if path.readlink().is_absolute() else path):
            name = f"{_ETC}/{path.parent.name}/{path.name}"
            yield error(_SUBJECT, f"{name} leads to {path.readlink()}, which is not there", f"rm '{name}'")
