"""Completions in real shells, and man pages by a real formatter."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from shlex import quote

import pytest

from nri_gpu.cli.main import VERBS
from nri_gpu.policy.document import SECTIONS
from nri_gpu.policy.forms import settings_of
from nri_gpu.request.annotation import CLAUSES
from tests.support import packages
from tests.support.tmux import Terminal
from tools import man_pages

ROOT = Path(__file__).parents[3]
SHARE = ROOT / "share"
BASH = SHARE / "bash-completion/completions/nri-gpu"
ZSH = SHARE / "zsh/site-functions"
FISH = SHARE / "fish/vendor_completions.d/nri-gpu.fish"
PAGES = sorted((SHARE / "man/man1").iterdir())
NAMES = [verb.name for verb in VERBS]
OPTIONS = {
    verb.name: {flag for flags, told in verb.options if told["help"] != argparse.SUPPRESS for flag in flags}
    for verb in VERBS
}


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# --- bash -------------------------------------------------------------------------------------------------------------


def in_bash(*words: str) -> set[str]:
    """What bash offers for the last of these words."""
    script = (
        f'. {quote(str(BASH))}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nri_gpu; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    return {*run("bash", "--norc", "-c", script, "bash", "nri-gpu", *words).split()}


def test_bash_offers_every_verb_and_every_option() -> None:
    assert in_bash("") == {*NAMES, "help", "version", "--help", "--version"}
    assert in_bash("help", "") == {*NAMES}
    assert in_bash("repl") == {"replay"}
    for name in NAMES:
        assert in_bash(name, "--") >= {flag for flag in OPTIONS[name] if flag.startswith("--")}
    assert "--watch" not in in_bash("gpus", "--")  # it is ignored
    assert {"--kubelet", "--no-kubelet"} <= in_bash("run", "--")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("status", "-o", ""), {"text", "wide", "name", "json"}),
        (("status", "--output", "=", "j"), {"json"}),
        (("status", "--output", "="), {"text", "wide", "name", "json"}),
        (("run", "--log-level", "W"), {"WARNING"}),
        (("cdi", ""), {"generate"}),
        (("run", "--index", ""), set()),
        (("status", ""), set()),
    ],
)
def test_bash_offers_the_words_of_an_option(words: tuple[str, ...], offered: set[str]) -> None:
    assert in_bash(*words) == offered


def test_a_real_bash_completes_verbs_options_files_and_folders(folder: Path) -> None:
    (folder / "my topology.toml").touch()
    (folder / "state").mkdir()
    (folder / "rc").write_text(f"PS1='> '\ncd {folder}\n. {quote(str(BASH))}\n")
    with Terminal(folder, ["bash", "--rcfile", str(folder / "rc"), "-i"], columns=120, rows=20) as terminal:
        terminal.wait_for(">")
        terminal.write("nri-gpu gp\t--gpus my\t--state-dir st\t")
        terminal.wait_for("nri-gpu gpus --gpus my\\ topology.toml --state-dir state/")


# --- zsh and fish -----------------------------------------------------------------------------------------------------


def test_a_real_zsh(folder: Path) -> None:
    (folder / "setup").write_text(
        f"fpath=({quote(str(ZSH))} $fpath)\nautoload -U compinit\ncompinit -u -D\nPS1='ready> '\n"
    )
    (folder / "node.toml").touch()
    with Terminal(folder, [*packages.command("zsh"), "-f"], columns=120, rows=40) as terminal:
        terminal.write(f"cd {folder}; source setup\n")
        terminal.wait_for("ready>")
        terminal.write("nri-gpu stat\t--wat\t-o j\t")
        terminal.wait_for("nri-gpu status --watch -o json")
        terminal.press("C-u")
        terminal.write("nri-gpu gpus --gpus=no\t")
        terminal.wait_for("nri-gpu gpus --gpus=node.toml")
        terminal.press("C-u")
        terminal.write("nri-gpu \t")
        terminal.wait_for(*(f"{verb.name} " for verb in VERBS), "serve the container runtime: decide")


def test_a_real_fish(tmp_path: Path) -> None:
    fish = ["env", f"HOME={tmp_path}", *packages.command("fish"), "--no-config"]

    def offered(line: str) -> list[str]:
        said = run(*fish, "-c", f"source {quote(str(FISH))}; complete -C '{line}'")
        return [each.partition("\t")[0] for each in said.splitlines()]

    assert sorted(offered("nri-gpu ")) == sorted([*NAMES, "help", "version"])
    assert sorted(offered("nri-gpu help ")) == sorted(NAMES)
    assert set(offered("nri-gpu status --")) >= OPTIONS["status"] - {"-n", "-o"}
    assert offered("nri-gpu status -o ") == ["json", "name", "text", "wide"]
    assert offered("nri-gpu cdi ") == ["generate"]
    assert offered("nri-gpu check pyp") == ["pyproject.toml"]
    assert offered("nri-gpu status --state-dir conf") == ["config/"]


# --- man pages --------------------------------------------------------------------------------------------------------


def test_there_is_a_page_for_each_verb() -> None:
    assert [page.name for page in PAGES] == sorted(["nri-gpu.1", *(f"nri-gpu-{name}.1" for name in NAMES)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_formatted_without_a_warning(page: Path) -> None:
    text = " ".join(formatted(page).split())
    verb = next((each for each in VERBS if page.stem == f"nri-gpu-{each.name}"), None)
    for section in ("NAME", "SYNOPSIS", "EXIT STATUS", "SEE ALSO", "78 configuration", "nri-gpu-request(7)"):
        assert section in text
    for flag in OPTIONS[verb.name] if verb else NAMES:
        assert flag in text or not flag.startswith("-")


def formatted(page: Path) -> str:
    return run(*packages.command("groff", "groff-base"), "-man", "-Tascii", "-ww", "-P-cbou", page)


def test_the_page_of_requests_has_what_the_manual_has() -> None:
    text = formatted(SHARE / "man/man7/nri-gpu-request.7")
    assert max(map(len, text.splitlines())) <= 80
    source = (ROOT / "docs/requests.md").read_text()
    words = " ".join(text.split())
    for clause in CLAUSES:
        assert clause in words
    for heading in re.findall(r"^## (.+)$", source, re.MULTILINE):
        assert f"\n{heading.upper()}\n" in text
    examples = re.findall(r"^```(\w*)\n(.*?)^```$", source, re.MULTILINE | re.DOTALL)
    lines = [line for kind, example in examples if kind != "text" for line in example.splitlines()]
    assert len(lines) > 10
    assert [line for line in lines if f"       {line}\n" not in text] == []
    assert not re.search(r"\]\(|\*\*|`", text)  # nothing is left of Markdown


def test_the_page_of_the_policy_has_each_key() -> None:
    text = formatted(SHARE / "man/man5/nri-gpu-policy.5")
    assert max(map(len, text.splitlines())) <= 80
    for name, cls in SECTIONS.items():
        _, found, section = text.partition(f"\n   [{name}]\n")
        assert found, name
        for key in settings_of(cls):
            assert re.search(rf"^       {key}\b", section.partition("\n   [")[0], re.MULTILINE), key


def test_no_page_has_what_mandoc_warns_of() -> None:
    """But for the date, which would be another one each time that a page is made."""
    pages = sorted(SHARE.glob("man/man?/*"))
    command = [*packages.command("mandoc", "mandoc"), "-T", "lint", "-W", "warning", *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    said = (done.stdout + done.stderr).splitlines()
    assert len(said) >= len(pages)
    assert [line for line in said if "missing date" not in line] == []


def test_markdown_that_no_page_can_show_is_named() -> None:
    with pytest.raises(man_pages.UnknownMarkdownError, match="no man page has blockquote so far"):
        man_pages.blocks("> quoted")
    with pytest.raises(man_pages.UnknownMarkdownError, match="no man page has image so far"):
        man_pages.blocks("![a picture](x.svg)")


@pytest.mark.parametrize(
    ("markdown", "lines"),
    [
        (".hidden 'is' no command", ["\\&.hidden \\(aqis\\(aq no command"]),
        ("one\n.two `a-b`", ["one\n\\&.two \\fBa\\-b\\fR"]),
        ("[Extras](extras.md#drm), [extras.md](extras.md)", ["Extras (docs/extras.md), docs/extras.md"]),
        ("[below](#mig-devices)", ["below"]),
        ("1. one\n2. two", [".IP 1. 4", "one", ".IP 2. 4", "two"]),
        ("| a | b |\n|---|---|\n| `x` | y |", [".TP", "\\fBx\\fR", "y"]),
        ("| a | b | c |\n|---|---|---|\n| x | | z |", [".TP", "x", "\\fIc:\\fR z"]),
        ("<!-- not shown -->\n\ntext", ["text"]),
    ],
)
def test_markdown_becomes_roff(markdown: str, lines: list[str]) -> None:
    assert man_pages.blocks(markdown) == lines
