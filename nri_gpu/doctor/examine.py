"""The findings of a node, in the order in which a GPU comes to a container."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.doctor.boot_checks import boot_findings
from nri_gpu.doctor.cdi_checks import cdi_findings, serves_by_cdi, serves_by_cdi_alone
from nri_gpu.doctor.component_checks import external_findings, other_findings
from nri_gpu.doctor.daemon_checks import cordon_findings, daemon_findings, health_findings
from nri_gpu.doctor.driver_checks import driver_findings
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.file_checks import files_findings
from nri_gpu.doctor.host_checks import host_findings
from nri_gpu.doctor.kubelet_checks import kubelet_findings
from nri_gpu.doctor.observer_checks import observed_alone, observer_findings
from nri_gpu.doctor.programs import ON_THE_HOST
from nri_gpu.doctor.runtime_checks import runtime_findings
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.doctor.unit_checks import unit_findings
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.finding import Finding, Level, unseen
from nri_gpu.domain.text import counted
from nri_gpu.system.node_name import NamedNode, this_node

WIDTH_MIN: Final = 40
SIMULATED: Final = "SIMULATED: the GPUs are those of a topology file; all else is this machine's"
_INDENT: Final = " " * 10
_COMMENT: Final = f"  {_INDENT}# "
_IN_POD: Final = ("kubectl ", "ls ", "crictl ", "#")  # what else is advised is for the node
_SIGNS: Final = {
    Level.OK: "ok",
    Level.NOTE: "note",
    Level.WARNING: "WARNING",
    Level.ERROR: "ERROR",
    Level.UNSEEN: "not seen",
}


class Section(Struct, frozen=True):
    """The findings about one part of the node."""

    name: str
    findings: tuple[Finding, ...]


class DoctorDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/doctor/v1"):
    """The findings, from kernel to container. counts: how many of each level. simulated: GPUs of a topology file."""

    node: NamedNode
    counts: Mapping[str, int]
    sections: tuple[Section, ...]
    simulated: bool = False

    @classmethod
    def of(cls, node: NamedNode, *sections: Section) -> Self:
        levels = [finding.level for section in sections for finding in section.findings]
        return cls(node, {level.value: levels.count(level) for level in Level}, sections)

    @property
    def findings(self) -> Iterator[Finding]:
        return (finding for section in self.sections for finding in section.findings)


Part = Callable[[Examined, ContainerRuntime | None], Iterator[Finding]]
_GRANTING: Final = frozenset({"container runtime", "nri-gpu", "other components", "kubelet"})
PARTS: Final[tuple[tuple[str, Part], ...]] = (
    ("driver", lambda seen, _: driver_findings(seen)),
    ("host", host_findings),
    ("container runtime", runtime_findings),
    (
        "nri-gpu",
        lambda seen, runtime: chain(
            daemon_findings(seen, runtime), boot_findings(seen, runtime), health_findings(seen), cordon_findings(seen)
        ),
    ),
    ("observer", lambda seen, _: observer_findings(seen)),
    ("CDI", lambda seen, _: cdi_findings(seen)),
    ("nri-gpu's files", lambda seen, _: chain(files_findings(seen), unit_findings(seen))),
    ("other components", lambda seen, runtime: chain(other_findings(seen, runtime), external_findings(seen))),
    ("kubelet", kubelet_findings),
)


def examine(seen: Examined, runtime: ContainerRuntime | None) -> DoctorDocument:
    """Look at everything once. A part that fails is a finding, and the other parts are there all the same."""
    passed_over = set() if serves_by_cdi(seen) else {"CDI"}
    if serves_by_cdi_alone(seen):
        passed_over = {"container runtime", "nri-gpu"}
    if seen.observer is None:
        passed_over |= {"observer"}
    elif observed_alone(seen):
        passed_over |= _GRANTING
    parts = ((name, part) for name, part in PARTS if name not in passed_over)
    found = DoctorDocument.of(this_node(), *(_section(name, part, seen, runtime) for name, part in parts))
    return replace(found, simulated=seen.simulated)


def _section(name: str, part: Part, seen: Examined, runtime: ContainerRuntime | None) -> Section:
    findings: list[Finding] = []
    try:
        findings.extend(part(seen, runtime))
    except OSError as error:
        findings.append(
            unseen(name, f"the rest of this part cannot be examined: {fault_of(error)}", "sudo nri-gpu doctor")
        )
    return Section(name, tuple(_for_pod(each) if seen.in_pod else each for each in findings))


def _for_pod(finding: Finding) -> Finding:
    """Return the finding with a word above lines that a pod cannot carry out."""
    if all(line.startswith(_IN_POD) or line == ON_THE_HOST for line in finding.fix):
        return finding
    return replace(finding, fix=("# on the node, not in this pod:", *finding.fix))


def paragraphs(found: DoctorDocument, width: int) -> Iterator[tuple[str, Level | None]]:
    """Yield the report's lines, each with the level of its finding, or None for headings. No line to copy is broken.

    width: columns.
    """
    width = max(width, WIDTH_MIN)
    yield f"node {found.node.name}", None
    if found.simulated:
        yield from ((line, None) for line in textwrap.wrap(SIMULATED, width))
    yield "", None
    for section in found.sections:
        yield section.name, None
        for each in section.findings:
            yield from ((line, each.level) for line in _lines(each, width))
        yield "", None
    yield from ((line, None) for line in textwrap.wrap(summary(found), width))


def to_text(found: DoctorDocument, width: int) -> str:
    return "\n".join(line for line, _ in paragraphs(found, width))


def _lines(finding: Finding, width: int) -> Iterator[str]:
    start = f"{_SIGNS[finding.level]:<10}"
    yield from _wrapped(f"{finding.subject}: {finding.meaning}", width, f"  {start}", f"  {_INDENT}")
    for each in finding.fix:
        yield from _fix_lines(each, width)


def _fix_lines(line: str, width: int) -> Iterator[str]:
    """Yield a line to copy whole; its comment goes above it, wrapped, if both do not fit."""
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
    """Wrap a text with its words whole, to be copied. first, then: what lines begin with."""
    wrapper = textwrap.TextWrapper(width, first, then, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def summary(found: DoctorDocument) -> str:
    """Return the number of findings of each level as `2 errors, 1 warning, 9 ok`."""
    counts = found.counts
    told = [counted(counts[level], level) for level in (Level.ERROR, Level.WARNING)]
    if counts[Level.NOTE]:
        told.append(counted(counts[Level.NOTE], Level.NOTE))
    told.append(f"{counts[Level.OK]} ok")
    if counts[Level.UNSEEN]:
        told.append(f"{counts[Level.UNSEEN]} could not be seen")
    return f"{', '.join(told)}."
