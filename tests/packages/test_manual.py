"""The manual in the packages: what help, units, policy and messages name is there, and its own links hold."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from deploy.bundle import MANUAL, UNITS
from nri_gpu.cli import main as cli
from tests.packages.conftest import Debs
from tests.support.debian_root import DebianRoot

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = re.compile(r"(?<![\w/])docs/[\w/-]+\.md")
SHARED: Final = re.compile(r"/usr/share/(?:doc/)?nri-gpu(?:/[\w.-]+)+")
MAN: Final = re.compile(r"(?<![\w/-])(nri-gpu(?:-[a-z]+)?)\((\d)\)|\bman (nri-gpu(?:-[a-z]+)?)")
IN_CHECKOUT: Final = re.compile(r"(?<![\w/-])(?:config|deploy|systemd|share)/[\w.-]+")
# Where README and manual lead those who work on the program, whose files no package has.
FOR_DEVELOPERS: Final = (
    *("CONTRIBUTING.md", "DECISIONS.md", "ROADMAP.md", "LICENSE", "tests", "tools", "bench", "nri_gpu", ".ci"),
    *("deploy/locks", "Makefile"),
)


def helps() -> Iterator[str]:
    """What `--help` prints for each verb, before it is fit to this installation."""
    for verb in cli.VERBS:
        options = [str(settings["help"]) for _, settings in verb.options]
        yield "\n".join((verb.help, verb.teach, *options, cli.MANUAL_HELP.format(verb=f"-{verb.name}")))


def texts_of_programs() -> Iterator[str]:
    """Every string of the program, without what stands above a module for its readers."""
    for file in (ROOT / "nri_gpu").rglob("*.py"):
        module = ast.parse(file.read_text())
        said_above = ast.get_docstring(module, clean=False)
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != said_above:
                yield node.value


def missing(text: str, tree: Path) -> Iterator[str]:
    """What a text names and a package does not have."""
    paths = [f"{MANUAL}/{page}" for page in PAGE.findall(text)] + [each.strip("/.") for each in SHARED.findall(text)]
    yield from (path for path in paths if not (tree / path).exists())
    for name, section, plain in MAN.findall(text):
        if not list((tree / "usr/share/man").glob(f"man{section or '?'}/{name or plain}.{section or '?'}")):
            yield f"man {name or plain}"


def test_what_texts_name_is_in_the_packages(laid_out: Path) -> None:
    units = [path.read_text() for path in (laid_out / UNITS).iterdir()]
    drop_ins = [path.read_text() for path in (ROOT / "systemd/nri-gpu.service.d").iterdir()]
    policy = (ROOT / "config/policy.toml").read_text()
    pages = [path.read_text().replace("\\-", "-") for path in (laid_out / "usr/share/man").rglob("*.[157]")]
    read = [*helps(), *units, *drop_ins, policy, *pages]
    assert all("man:nri-gpu" in unit for unit in units)
    assert len(PAGE.findall("\n".join(read))) > 50
    assert [each for text in (*read, *texts_of_programs()) for each in missing(text, laid_out)] == []
    assert [each for text in (*helps(), policy) for each in IN_CHECKOUT.findall(text)] == []


def test_links_of_the_manual_hold_where_it_is_installed(laid_out: Path) -> None:
    """As on the site, links to what is installed lead somewhere."""
    manual = laid_out / MANUAL
    pages = [manual / "README.md", *(manual / "docs").rglob("*.md")]
    assert len(pages) > 40
    dangling = set()
    for page in pages:
        text = re.sub(r"(?ms)^ *(```+).*?^ *\1|`[^`\n]*`", "", page.read_text())
        for link in re.findall(r"(?:\]\(<?|<img src=\")([^)>\s\"#]+)", text):
            if "://" not in link and not (page.parent / link).exists():
                dangling.add(posixpath.normpath(page.relative_to(manual).parent / link))
    assert {each for each in dangling if not each.startswith(FOR_DEVELOPERS)} == set()
    assert not {path.name for path in (manual / "docs").iterdir()} & {"conf.py", "static", "diagrams"}


@pytest.mark.parametrize("excluded", [False, True])
def test_help_names_pages_by_their_paths_where_they_are(bookworm: DebianRoot, debs: Debs, excluded: bool) -> None:
    root = bookworm
    options = ("--path-exclude=/usr/share/doc/*",) if excluded else ()
    root.run("dpkg", *options, "-i", *debs.this)
    said = " ".join(root.run("nri-gpu", "history", "--help").split())
    assert ("(docs/record.md)" if excluded else f"(/{MANUAL}/docs/record.md)") in said
    assert "man nri-gpu-history; man nri-gpu-request (annotations); man nri-gpu-policy" in said
    example = root.run("nri-gpu", "gpus", "--help").partition("  nri-gpu gpus ")[2].split("\n")[0]
    assert "four-gpus" in root.run("sh", "-c", f"nri-gpu gpus {example} && echo {example}")
    assert ".TH NRI-GPU-REQUEST 7 " in root.run("zcat", "/usr/share/man/man7/nri-gpu-request.7.gz")
