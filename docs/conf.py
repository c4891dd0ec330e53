"""The site, by Sphinx: the Markdown pages as they are, in the folders where GitHub shows them.

`make site` builds it, `tools/site.py` says how strictly. The source folder is the repository's root, so that a link
means the same to a reader of the repository and to one of the site.

NRI_GPU_REPOSITORY, where it is set, is the URL to which links to files and folders of the source go. Without it files
are copied into the site, and folders are named without a link.
"""

from __future__ import annotations

import functools
import gc
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from docutils import nodes
from sphinx import addnodes
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

from nri_gpu import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT: Final = Path(__file__).parents[1]
REPOSITORY: Final = os.environ.get("NRI_GPU_REPOSITORY", "").rstrip("/")

project = "nri-gpu"
author = "the authors of nri-gpu"
project_copyright = author
release = version = __version__

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "DECISIONS.md", "ROADMAP.md"]
# Folders without pages, such as .venv with its thousands of files, are not walked.
exclude_patterns = [each.name for each in ROOT.iterdir() if each.is_dir() and each.name != "docs"]

myst_heading_anchors = 4  # made of the heading's words, as GitHub makes them
myst_linkify_fuzzy_links = False
smartquotes = False  # they would make one dash of the two of an option
highlight_language = "text"  # of a block that names no language
pygments_style = "a11y-light"  # comes with the theme
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = f"nri-gpu {release}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_theme_options = {"navigation_with_keys": True}
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]  # GitHub makes anchors of Markdown in the browser
linkcheck_timeout = 20  # seconds


# A link in Markdown, up to its target within the repository.
WITHIN: Final = re.compile(r"\]\((?!https?:)(#?)")
LONG: Final = 24  # characters
BREAKABLE: Final = re.compile(r"(?<=\w[/=,])(?=[^/\s])")
LINKS: Final = (addnodes.pending_xref, addnodes.download_reference)


class SourceLinks(SphinxTransform):
    """Links to what is no page: a folder of the source, and a file where the repository's URL is known."""

    default_priority = 1  # before MyST looks for the file

    def apply(self, **_settings: object) -> None:
        """Replace them in one page."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        for link in [each for kind in LINKS for each in self.document.findall(kind)]:
            target = str(link.get("reftarget", ""))
            path = (here / target).resolve()
            folder = path.is_dir()
            if not path.is_relative_to(ROOT) or not (folder or (REPOSITORY and path.is_file())):
                continue  # a page, a file to copy, or a fault for MyST to report
            if REPOSITORY:
                kind = "tree" if folder else "blob"
                url = f"{REPOSITORY}/{kind}/v{release}/{path.relative_to(ROOT)}"
                link.replace_self(nodes.reference("", "", *link.children, refuri=url, internal=False))
            else:
                link.replace_self(nodes.inline("", "", *link.children, classes=["source-folder"]))


class Titles(SphinxTransform):
    """Links whose text is a page's file name, such as `[install.md](install.md)`: they get the title they lead to."""

    default_priority = 1

    def apply(self, **_settings: object) -> None:
        """Leave the text of such links to MyST."""
        for link in self.document.findall(addnodes.pending_xref):
            if link.get("refdomain") == "doc" and link.astext() == f"{Path(link['reftarget']).name}.md":
                link["refexplicit"] = False
                link.children[0].children = []


class LongWords(SphinxTransform):
    """Long words of code, such as paths: they may break after a slash. docs/static/site.css keeps others whole."""

    default_priority = 1

    def apply(self, **_settings: object) -> None:
        """Put these places in."""
        for code in self.document.findall(nodes.literal):
            text = code.astext()
            if max(map(len, text.split()), default=0) > LONG and not isinstance(code.parent, nodes.title):
                first, *others = BREAKABLE.split(text)
                code.children = []
                code += nodes.Text(first)
                for part in others:
                    code += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def readme_from_docs(_app: Sphinx, path: Path, _page: str, text: list[str]) -> None:
    """Make README's links right in a page of docs/ that includes its beginning."""
    if path.name == "README.md":
        text[0] = WITHIN.sub(lambda link: f"](../{'README.md#' if link[1] else ''}", text[0])


class Search(SearchEnglish):
    """English as Sphinx has it; a word's stem is looked for once, which saves a tenth of the build."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._stem = functools.cache(super().stem)

    def stem(self, word: str) -> str:
        return self._stem(word)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add to Sphinx what this file has."""
    gc.disable()  # the build is short and keeps what it makes
    for each in (SourceLinks, Titles, LongWords):
        app.add_transform(each)
    app.connect("include-read", readme_from_docs)
    app.add_search_language(Search)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
