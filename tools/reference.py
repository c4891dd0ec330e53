"""The page of verbs in docs/reference, which is made of declarations, and diagrams in docs/pictures, drawn by graphviz.

A diagram's text is a .dot file in docs/diagrams, or a table of the program.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Final

from nri_gpu.cli.main import EXIT_HELP, GROUPS, VERBS, Verb
from nri_gpu.domain.health import HealthState
from nri_gpu.health.states import TRANSITIONS
from tools.files import ROOT, Files, picture
from tools.share import Argument, Takes, arguments_of
from tools.svg_theme import with_dark_colours

DOCS: Final = ROOT / "docs"
REFERENCE: Final = DOCS / "reference"
DIAGRAMS: Final = DOCS / "diagrams"
PICTURES: Final = DOCS / "pictures"
MADE: Final = "<!-- Made by tools/reference.py: run `make generate`. -->\n\n"
FILES: Final = (
    "A file that the command line names ends a verb with 78 if it is missing or cannot be understood, and with 77 if\n"
    "it may not be read. 2 is a wrong command line alone."
)
STYLE: Final = """  bgcolor="transparent"; fontname="Helvetica"; rankdir=LR; nodesep=0.5; ranksep=1.1;
  node [shape=box, style="rounded,filled", fillcolor="#eef4fb", color="#33658a", fontname="Helvetica", fontsize=13];
  edge [color="#444444", fontname="Helvetica", fontsize=11];
"""


def verbs_page() -> str:
    """Return a page of every verb, its options and the exit codes."""
    told = "`nri-gpu help VERB` prints the same, and so do the man pages; `nri-gpu` alone lists the verbs."
    lines = ["# Verbs", "", told, "", "| | verb | what it does |", "|---|---|---|"]
    helps = {verb.name: _cell(verb.help) for verb in VERBS}
    for group, names in GROUPS.items():
        rows = ((group if name == names[0] else "", name) for name in names)
        lines += [f"| {head} | [`{name}`](#nri-gpu-{name}) | {helps[name]} |" for head, name in rows]
    lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    for each in EXIT_HELP.splitlines()[1].split("   "):
        code, _, meaning = each.strip().partition(" ")
        lines.append(f"| {code} | {meaning} |")
    lines += ["", FILES]
    for verb in VERBS:
        lines += ["", *_verb(verb)]
    return "\n".join(lines) + "\n"


def _verb(verb: Verb) -> Iterator[str]:
    yield from (f"## nri-gpu {verb.name}", "")
    examples = False
    for line in verb.teach.splitlines():
        if line.startswith("  ") != examples:
            examples = not examples
            yield from (("", "```sh") if examples else ("```", ""))
        yield line.strip() if examples else _text(line)
    if examples:
        yield "```"
    yield from ("", "| option | what it is |", "|---|---|")
    for each in arguments_of(verb)[:-1]:  # the last one is --help, of every verb
        yield f"| {_spelled(each)} | {_cell(each.help)} |"


def _spelled(argument: Argument) -> str:
    value = "" if argument.takes is Takes.NOTHING else " ".join(argument.words) or argument.name
    if not argument.flags:
        return f"`{' '.join(argument.words) or argument.name}`"
    return ", ".join(f"`{flag}`" for flag in argument.flags) + (f" `{value}`" if value else "")


def linked(text: str) -> str:
    """Return a text of a page in docs/reference, in which the manual's pages are links."""
    return re.sub(r"(?<![\w/])docs/([\w/-]+\.md)", r"[\1](../\1)", text)


def _text(line: str) -> str:
    """Escape for Markdown what looks like a tag or emphasis, and link pages."""
    return linked("".join(f"\\{letter}" if letter in "<>*_[]" else letter for letter in line))


def _cell(line: str) -> str:
    return _text(line).replace("|", "\\|")


def health_dot() -> str:
    """Return the states of a GPU's health as a diagram, read from the table that decides."""
    edges: defaultdict[tuple[HealthState, HealthState], list[str]] = defaultdict(list)
    for state, after in TRANSITIONS.items():
        for signal, following in after.items():
            edges[state, following].append(signal)
    newline = "\\n"  # of graphviz
    withheld = (HealthState.BAD, HealthState.RECOVERING)
    lines = [f'  "{state}" [fillcolor="#fbe3d6", color="#a63d00"];' for state in HealthState if state in withheld]
    lines += [f'  "{a}" -> "{b}" [label="{newline.join(signals)}"];' for (a, b), signals in edges.items()]
    first = f'  {{ rank=source; "{HealthState.HEALTHY}" }}\n'
    return "digraph health {\n" + STYLE + first + "\n".join(lines) + "\n}\n"


def diagrams() -> Files:
    """Return each picture, of which the text is the source."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(DIAGRAMS.glob("*.dot"))}
    texts["health-states"] = health_dot()
    return {PICTURES / f"{name}.svg": picture(text.encode(), partial(draw, text)) for name, text in texts.items()}


def draw(text: str) -> str:
    """Run graphviz on a text."""
    drawn = subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True, check=True).stdout
    return with_dark_colours(drawn)


def pages() -> Files:
    """Return the reference's page."""
    return {REFERENCE / "verbs.md": MADE + verbs_page()}
