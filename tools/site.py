"""The site: built into build/site and checked. Any warning is a fault, and so is a link that leads nowhere.

python -m tools.site [FOLDER]      build and check
python -m tools.site --linkcheck   ask each site that pages link to (needs a network)
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from tools.files import ROOT

SITE: Final = ROOT / "build" / "site"
LIST: Final = ROOT / "docs" / "external-links.txt"
# All is built again: what an earlier build warned of, a later one would not repeat.
BUILD: Final = (sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-E", "-a", "-j", "2", "-c", "docs")
START: Final = "docs/index.html"
TO_START: Final = f'<!doctype html><meta http-equiv="refresh" content="0; url={START}"><a href="{START}">nri-gpu</a>\n'
# Where a page needs another site to be shown: its search and its pictures have to work without a network.
LOADED: Final = frozenset({("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src")})


class Page(HTMLParser):
    """A built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()  # what a link into it may name
        self.links: list[str] = []  # of `a`
        self.loads: list[str] = []  # what a browser gets to show it
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)
            elif (tag, name) in LOADED:
                self.loads.append(value)


def build(site: Path = SITE) -> int:
    """Run Sphinx, which prints warnings itself, and return its exit code."""
    done = subprocess.run([*BUILD, ".", str(site)], cwd=ROOT, check=False)
    (site / "index.html").write_text(TO_START, encoding="utf-8")
    return done.returncode


def pages(site: Path) -> dict[Path, Page]:
    """Return the pages of a built site, by path below it."""
    return {file.relative_to(site): Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}


def faults(site: Path, built: Mapping[Path, Page]) -> Iterator[str]:
    """Yield links within the site that lead to no file or no anchor, and what would be fetched from elsewhere."""
    for path, page in built.items():
        for link in dict.fromkeys(page.links + page.loads):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.loads and url.scheme != "data":
                    yield f"{path}: needs {link} to be shown"
                continue
            target = (site / path.parent / unquote(url.path)).resolve() if url.path else site / path
            if not target.is_file():
                yield f"{path}: {link}: no such file"
                continue
            other = built.get(target.relative_to(site.resolve())) if url.path else page
            if url.fragment and other and unquote(url.fragment) not in other.anchors:
                yield f"{path}: {link}: no such anchor"


def external(sources: Iterable[Path]) -> list[str]:
    """Return the URLs that pages link to, sorted: inline links and definitions, and none within code."""
    found: set[str] = set()
    for file in sources:
        text = re.sub(r"(?ms)^ *(```+).*?^ *\1|`[^`\n]*`", "", file.read_text(encoding="utf-8"))
        found |= set(re.findall(r"(?:\]\(<?|^\[[^\]]+\]: |<)(https?://[^)>\s]+)", text, re.MULTILINE))
    return sorted(found)


def reachable(urls: Iterable[str]) -> bool:
    """Return whether one of the sites' names can be resolved."""
    for name in {urlsplit(url).hostname for url in urls}:
        with suppress(OSError):
            return bool(socket.getaddrinfo(name, 443))
    return False


def sources() -> list[Path]:
    """Return the Markdown pages of the site."""
    return sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def links_text() -> str:
    """Return docs/external-links.txt as it has to be."""
    return "".join(f"{url}\n" for url in external(sources()))


def main() -> int:
    """Build and check, or ask the links, and return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=SITE)
    parser.add_argument("--linkcheck", action="store_true", help="ask each of those sites")
    told = parser.parse_args()
    if told.linkcheck:
        if not reachable(external(sources())):
            print("no network: not one name of docs/external-links.txt can be resolved, so no link was checked")
            return os.EX_UNAVAILABLE
        asked = [sys.executable, "-m", "sphinx", "-b", "linkcheck", "-q", "-c", "docs", ".", "build/linkcheck"]
        return subprocess.run(asked, cwd=ROOT, check=False).returncode
    code = build(told.folder)
    wrong = list(faults(told.folder, pages(told.folder)))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return code or bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
