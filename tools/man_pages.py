"""The man pages nri-gpu-request(7), made of docs/requests.md, and nri-gpu-policy(5), made of the declared settings."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from nri_gpu.policy.document import LISTS, SECTIONS, section_help
from nri_gpu.policy.forms import Setting, settings_of
from tools.files import ROOT

REQUESTS: Final = "docs/requests.md"
# What roff would take for a command, or print as another sign.
ESCAPED: Final = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
EXAMPLE_COLUMNS: Final = 72  # of 80, with the margin
HEADING_MAX: Final = 20
PAGES: Final = (
    "Names such as docs/install.md are of pages of the manual. Packages have them below /usr/share/doc/nri-gpu, a "
    "checkout in its own folder."
)
POLICY: Final = """
The file says who may have which GPUs of this node, and how. It is written in TOML, and begins with `schema = 1`.
A key or section that is left out keeps its default; without the file, every one does. An option of `nri-gpu run` that
is named below overrides its key.

`nri-gpu check` reports every fault in it, and what is allowed but unwise; `systemctl reload nri-gpu` loads what was
changed. [policy.md](policy.md) explains rules and pools.
"""
POLICY_FILES: Final = {
    "/etc/nri-gpu/policy.toml": "The policy. The first installation copies it; it is yours from then on.",
    "/usr/share/nri-gpu/policy.toml": "Every key with its default and a comment, of the version that is installed.",
    "/usr/share/nri-gpu/policy.schema.json": "A JSON Schema, for editors.",
    "/usr/share/nri-gpu/examples/": "Policies of a single machine, a shared cluster and others.",
}
_markdown: Final = MarkdownIt("commonmark").enable("table")


class UnknownMarkdownError(Exception):
    """A page has Markdown that no man page can show so far. Says which."""


def roff(text: str) -> str:
    """Return plain text as roff takes it, in a line of its own or within one."""
    return _no_command("".join(ESCAPED.get(letter, letter) for letter in text))


def _no_command(text: str) -> str:
    """Return a text of which roff takes no line for a command."""
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in text.split("\n"))


def head(name: str, section: int, about: str, source: str) -> list[str]:
    """Return the first lines of a page. source: what it is made of."""
    return [
        f'.\\" Made by tools/ from {source}: run `make generate`.',
        f'.TH {name.upper()} {section} "" "nri-gpu" "nri-gpu manual"',
        ".SH NAME",
        f"{roff(name)} \\- {roff(about)}",
    ]


def see_also(*pages: str) -> list[str]:
    """Return the last section. pages: NAME(SECTION)."""
    named = [f".BR {roff(name)} ({section}" for name, _, section in (page.partition("(") for page in pages)]
    return [".SH SEE ALSO", *(f"{each}," for each in named[:-1]), named[-1], ".PP", roff(PAGES)]


def request() -> str:
    """Return nri-gpu-request(7)."""
    text = (ROOT / REQUESTS).read_text(encoding="utf-8")
    title, body = text.split("\n", 1)
    if not title.startswith("# "):
        raise UnknownMarkdownError(f"{REQUESTS} does not begin with a title")
    lines = head("nri-gpu-request", 7, "how pods ask for GPUs by annotation", REQUESTS)
    lines += [".SH DESCRIPTION", *blocks(body)]
    lines += see_also("nri-gpu(1)", "nri-gpu-explain(1)", "nri-gpu-status(1)", "nri-gpu-policy(5)")
    return "\n".join(lines) + "\n"


def policy() -> str:
    """Return nri-gpu-policy(5)."""
    lines = head("nri-gpu-policy", 5, "the policy file of nri-gpu", "nri_gpu/policy")
    lines += [".SH SYNOPSIS", ".I /etc/nri\\-gpu/policy.toml", ".SH DESCRIPTION", *blocks(POLICY), ".SH SECTIONS"]
    for name, cls in {**SECTIONS, **LISTS}.items():
        title = f"[[{name}]]" if name in LISTS else f"[{name}]"
        lines += [f'.SS "{title}"', *blocks(section_help(name))]
        lines += [line for each in settings_of(cls).values() for line in _setting(each)]
    lines.append(".SH FILES")
    for path, what in POLICY_FILES.items():
        lines += [".TP", f".I {roff(path)}", roff(what)]
    lines += see_also("nri-gpu(1)", "nri-gpu-check(1)", "nri-gpu-run(1)", "nri-gpu-request(7)")
    return "\n".join(lines) + "\n"


def _setting(setting: Setting) -> Iterator[str]:
    """Yield a key with its default as the file writes it. One of a list has none: it may be left out, or not."""
    yield from (".TP", f".B {roff(setting.key)}")
    if setting.default is msgspec.NODEFAULT:
        yield "Must be there."
    elif setting.default is not None:
        option = f", option \\fB{roff(setting.flag)}\\fR" if setting.flag else ""
        yield from (f"Default: {roff(json.dumps(setting.written_default))}{option}", ".br")
    yield from blocks(setting.help)


# --- Markdown ---------------------------------------------------------------------------------------------------------


def blocks(text: str) -> list[str]:
    """Return Markdown of a page in docs/ as lines of man(7). Raises: UnknownMarkdownError."""
    lines = [line for node in SyntaxTreeNode(_markdown.parse(text)).children for line in _block(node)]
    opened = (".SH", ".SS", ".IP", ".TP", ".RS")  # after these a paragraph begins by itself
    return [
        line for before, line in zip([".SH", *lines], lines, strict=False) if line != ".PP" or before[:3] not in opened
    ]


def _block(node: SyntaxTreeNode) -> Iterator[str]:
    match node.type:
        case "heading":
            text = _inline(node)
            yield f'.SH "{text.upper()}"' if node.tag == "h2" else f'.SS "{text}"'
        case "paragraph":
            yield from (".PP", _inline(node))
        case "fence":
            text = roff(node.content.rstrip("\n"))
            fits = max(map(len, node.content.splitlines())) <= EXAMPLE_COLUMNS
            yield from (".IP", ".EX", text, ".EE") if fits else (".IP", text)
        case "bullet_list" | "ordered_list":
            for number, item in enumerate(node.children, 1):
                yield f".IP {number}. 4" if node.type == "ordered_list" else ".IP \\(bu 2"
                yield from (line for child in item.children for line in _block(child))
        case "table":
            yield from _table(node)
        case "html_block":
            pass  # a comment
        case unknown:
            raise UnknownMarkdownError(f"no man page has {unknown} so far: teach tools/man_pages.py: {node.content}")


def _table(node: SyntaxTreeNode) -> Iterator[str]:
    """Yield a paragraph for each row, headed by its first cell. Of several others each names its column, if short."""
    header, body = ([row.children for row in part.children] for part in node.children)
    columns = [_inline(cell) for cell in header[0]][1:]
    for first, *others in body:
        yield from (".TP", _inline(first))
        told = [(column, text) for column, cell in zip(columns, others, strict=True) if (text := _inline(cell))]
        for number, (column, text) in enumerate(told):
            if number:
                yield ".br"
            yield f"\\fI{column}:\\fR {text}" if len(columns) > 1 and 0 < len(column) <= HEADING_MAX else text
        if not told:
            yield "\\&"


def _inline(node: SyntaxTreeNode) -> str:
    """Return text with fonts."""
    return _no_command("".join(_spans(node.children)))


def _spans(nodes: Sequence[SyntaxTreeNode]) -> Iterator[str]:
    for node in nodes:
        match node.type:
            case "inline":
                yield from _spans(node.children)
            case "text":
                yield roff(node.content)
            case "softbreak" | "hardbreak":
                yield "\n"
            case "code_inline":
                yield f"\\fB{roff(node.content)}\\fR"
            case "strong" | "em":
                yield "\\fI" + "".join(_spans(node.children)) + "\\fR"
            case "link":
                yield _link(node)
            case unknown:
                raise UnknownMarkdownError(f"no man page has {unknown} so far: teach tools/man_pages.py")


def _link(node: SyntaxTreeNode) -> str:
    """Return its text and the page, which has no name of its own where it is this one."""
    text, target = "".join(_spans(node.children)), str(node.attrs["href"])
    path = target.partition("#")[0]
    if not path or path == posixpath.basename(REQUESTS):
        return text
    where = roff(target if "://" in target else posixpath.normpath(posixpath.join("docs", path)))
    return where if text == roff(path) else f"{text} ({where})"
