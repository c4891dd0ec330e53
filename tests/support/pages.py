"""The command blocks of a Markdown page, and what the page says that each prints.

    ```sh        commands, run by a test as they stand
    ```console   behind one of those, what it prints: a line `...` stands for any lines, a word in <...> for any text

A comment right above a block of commands changes that, and a reader of the source sees why:

    <!-- not run: REASON -->   <!-- exits with 1 -->
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from msgspec import Struct

from tests.support.errors import HarnessError

DOCS: Final = Path(__file__).parents[2] / "docs"
FOLDER: Final = DOCS / "quickstart"
ELSEWHERE: Final = ("helm", "kubectl", "systemctl", "podman")  # run where a cluster or a service manager is
ENDS: Final = re.compile(r"(.*?)@@(\d+)\n", re.DOTALL)  # of what one block prints, and the code of what failed in it
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN: Final = re.compile(r"<!-- not run: (.+) -->\n$")
EXITS: Final = re.compile(r"<!-- exits with (\d+) -->\n$")
SHELL_TIMEOUT_S: Final = 300.0
PLACEHOLDER: Final = re.compile(r"<\w+>")


class Block(Struct, frozen=True):
    """One block of commands. line: of its fence. shown: what it prints, None where the page does not say.

    not_run: why no test runs it, else empty.
    """

    line: int
    script: str
    shown: str | None
    exit_code: int
    not_run: str


def blocks(page: Path) -> list[Block]:
    """In the page's order. Raises: HarnessError: output with no command above it."""
    text, found = page.read_text(), list[Block]()
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        above = text[: fence.start()]
        match fence[1]:
            case "sh":
                left_out, code = NOT_RUN.search(above), EXITS.search(above)
                reason = left_out[1] if left_out else ""
                found.append(Block(line, fence[2], None, int(code[1]) if code else 0, reason))
            case "console":
                if not found or found[-1].shown is not None:
                    raise HarnessError(f"{page}:{line}: this output has no block of commands above it")
                last = found.pop()
                found.append(Block(last.line, last.script, fence[2], last.exit_code, last.not_run))
    return found


def anchors(page: Path) -> list[str]:
    """Of the page's headings, as GitHub and the site make them: a second of one name ends with a number."""
    found = MarkdownIt().use(anchors_plugin, max_level=6).parse(page.read_text())
    return [str(each.attrs["id"]) for each in found if each.type == "heading_open"]


def prints(shown: str, said: str) -> bool:
    """Whether a program's output is what the page shows. Runs of blanks count as one, and blank ends not at all."""
    lines = ["(?:.*\n)*?" if line.strip() == "..." else f"{_pattern(line)}\n" for line in shown.splitlines()]
    text = "".join(f"{' '.join(line.split())}\n" for line in said.splitlines())
    return re.fullmatch("".join(lines), text) is not None


def follow(page: Path, shell: Callable[[str], str], *, compare: bool = True) -> None:
    """Run a page's blocks in one shell, and hold against the page what each prints and how it ends.

    compare: false where programs are stand-ins that print something else.
    """
    found = [each for each in blocks(page) if not each.not_run]
    said = shell("".join(f"trap 'failed=$?' ERR; failed=0\n{each.script}echo \"@@$failed\"\n" for each in found))
    ran = ENDS.findall(said)
    for block, (printed, code) in zip(found, ran, strict=False):
        where = f"{page.name}:{block.line} exits with {code} and prints\n{printed}"
        assert int(code) == (block.exit_code if compare else 0), where
        assert not compare or block.shown is None or prints(block.shown, printed), where
    assert len(ran) == len(found), f"the shell ended early:\n{said}"


def shell(folder: Path, programs: Mapping[str, str], environment: Mapping[str, str]) -> Callable[[str], str]:
    """What runs a page's blocks in a folder, with stand-ins of these programs: name -> lines of bash."""
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/bash\nset -o pipefail\n{lines}\n")
        (folder / name).chmod(0o755)

    def run(script: str) -> str:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**environment, "PATH": f"{folder}:{environment['PATH']}"},
            timeout=SHELL_TIMEOUT_S,
        ).stdout

    return run


def commands(page: str, section: str) -> list[str]:
    """The lines of a section's blocks of commands that are run on the node itself."""
    part = re.split(r"^## ", (DOCS / page).read_text().partition(f"## {section}\n")[2], flags=re.MULTILINE)[0]
    shell = [fence[2] for fence in FENCE.finditer(part) if fence[1] == "sh"]
    lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
    # A command line of theirs may go on over several lines; what goes on begins with blanks.
    return [line for line in lines if line and not line.startswith((*ELSEWHERE, " ", "#"))]


def _pattern(line: str) -> str:
    return ".*?".join(re.escape(part) for part in PLACEHOLDER.split(" ".join(line.split())))
