"""All findings of a node, in the order in which a GPU comes to a container."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from msgspec import Struct, to_builtins

from nri_gpu.doctor.daemon import daemon_findings
from nri_gpu.doctor.driver import driver_findings
from nri_gpu.doctor.files import files_findings
from nri_gpu.doctor.finding import DoctorFinding, Examined, Level, unseen
from nri_gpu.doctor.host import host_findings
from nri_gpu.doctor.kubelet import kubelet_findings
from nri_gpu.doctor.nri import runtime_findings
from nri_gpu.doctor.others import other_findings
from nri_gpu.doctor.runtime import ContainerRuntime

WIDTH_MIN: Final = 40
_INDENT: Final = " " * 10
_COMMENT: Final = f"  {_INDENT}# "
_SIGNS: Final = {Level.OK: "ok", Level.WARNING: "WARNING", Level.ERROR: "ERROR", Level.UNSEEN: "not seen"}


class Section(Struct, frozen=True):
    """The findings about one part of the node."""

    name: str
    findings: tuple[DoctorFinding, ...]


class Examination(Struct, frozen=True):
    """Everything that was found."""

    sections: tuple[Section, ...]

    @property
    def findings(self) -> Iterator[DoctorFinding]:
        return (finding for section in self.sections for finding in section.findings)

    def count(self, level: Level) -> int:
        return Counter(finding.level for finding in self.findings)[level]


class DoctorDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/doctor/v1"):
    """The findings, from kernel to container. counts: how many there are of each level."""

    counts: Mapping[str, int]
    sections: tuple[Section, ...]


Part = Callable[[Examined, ContainerRuntime | None], Iterator[DoctorFinding]]
PARTS: Final[tuple[tuple[str, Part], ...]] = (
    ("driver", lambda seen, _: driver_findings(seen)),
    ("host", host_findings),
    ("container runtime", runtime_findings),
    ("nri-gpu", lambda seen, _: daemon_findings(seen)),
    ("nri-gpu's files", lambda seen, _: files_findings(seen)),
    ("other components", other_findings),
    ("kubelet", kubelet_findings),
)


def examine(seen: Examined, runtime: ContainerRuntime | None) -> Examination:
    """Looks at everything once. A part that fails is a finding, and the others are there all the same."""
    return Examination(tuple(_section(name, part, seen, runtime) for name, part in PARTS))


def _section(name: str, part: Part, seen: Examined, runtime: ContainerRuntime | None) -> Section:
    findings: list[DoctorFinding] = []
    try:
        findings.extend(part(seen, runtime))
    except OSError as error:
        findings.append(unseen(name, f"the rest of this part cannot be looked at: {error}", "sudo nri-gpu doctor"))
    return Section(name, tuple(findings))


def to_json(found: Examination) -> str:
    counts = {level.value: found.count(level) for level in Level}
    return json.dumps(to_builtins(DoctorDocument(counts, found.sections)), indent=1)


def paragraphs(found: Examination, width: int) -> Iterator[tuple[str, Level | None]]:
    """The report's lines, each with the level of its finding; none for headings. A line to copy is never broken.

    width: columns.
    """
    width = max(width, WIDTH_MIN)
    for section in found.sections:
        yield section.name, None
        for each in section.findings:
            yield from ((line, each.level) for line in _lines(each, width))
        yield "", None
    yield from ((line, None) for line in textwrap.wrap(summary(found), width))


def to_text(found: Examination, width: int) -> str:
    """The same as text."""
    return "\n".join(line for line, _ in paragraphs(found, width))


def _lines(finding: DoctorFinding, width: int) -> Iterator[str]:
    start = f"{_SIGNS[finding.level]:<10}"
    yield from _wrapped(f"{finding.subject}: {finding.meaning}", width, f"  {start}", f"  {_INDENT}")
    for each in finding.fix:
        yield from _fix_lines(each, width)


def _fix_lines(line: str, width: int) -> Iterator[str]:
    """A line to copy is whole; what is said about it goes above it, wrapped, where both do not fit."""
    command, _, comment = line.partition("    # ")
    whole = f"  {_INDENT}{line}"
    if len(whole) <= width:
        yield whole
        return
    if not command.startswith("# "):
        yield from _wrapped(comment, width, _COMMENT, _COMMENT)
        yield f"  {_INDENT}{command.rstrip()}"
    else:
        yield from _wrapped(line.removeprefix("# "), width, _COMMENT, _COMMENT)


def _wrapped(text: str, width: int, first: str, then: str) -> list[str]:
    """Words whole, to be copied. first, then: what lines begin with."""
    wrapper = textwrap.TextWrapper(width, first, then, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def summary(found: Examination) -> str:
    """`2 errors, 1 warning, 9 ok.` and how to see the rest."""
    errors, warnings, unseens = (found.count(level) for level in (Level.ERROR, Level.WARNING, Level.UNSEEN))
    parts = [_number(errors, "error"), _number(warnings, "warning"), f"{found.count(Level.OK)} ok"]
    sentence = ", ".join(parts)
    return f"{sentence}, {unseens} could not be seen." if unseens else f"{sentence}."


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
