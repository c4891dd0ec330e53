"""The site in a browser: words stay whole, no page is wider than a phone, pictures follow the theme, code is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from matplotlib.image import imread

from tests.support.browser import answers, screenshot
from tests.support.built_site import site as site
from tools.files import ROOT
from tools.svg_theme import DARK

# Per page: how many keys and options it has, which of them are on two lines, which letters in a row are though they fit
# in one, and how much wider than its window the page is.
WORDS: Final = r"""(page) => {
  const article = page.querySelector("article");
  const cut = (node, from, to) => {
    const range = page.createRange();
    range.setStart(node, from);
    range.setEnd(node, to);
    const boxes = [...range.getClientRects()];
    const fits = boxes.reduce((sum, box) => sum + box.width, 0) < article.clientWidth;
    return fits && new Set(boxes.map((box) => Math.round(box.top))).size > 1;
  };
  const keys = [...article.querySelectorAll("code")].filter(
    (code) => code.closest("td:first-child") || code.textContent.startsWith("--"));
  const words = keys.flatMap((code) => [...code.querySelectorAll(".pre")]);
  const broken = words.map((word) => word.textContent).filter((text, at) => cut(words[at].firstChild, 0, text.length));
  const texts = page.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (texts.nextNode())
    for (const word of texts.currentNode.data.matchAll(/\w{4,}/g))
      if (cut(texts.currentNode, word.index, word.index + word[0].length)) broken.push(word[0]);
  const root = page.documentElement;
  return { count: words.length, broken, wider: Math.max(0, root.scrollWidth - root.clientWidth) };
}"""
BOX: Final = "#eef4fb"  # of our programs in diagrams
ALONE: Final = """async (page) => {
  page.body.dataset.theme = "%s";
  const article = page.querySelector("article");
  article.replaceChildren(article.querySelector("img"));
  page.body.replaceChildren(article);
}"""
BLOCKS: Final = """<!doctype html><script src="copy.js"></script>
<div class="highlight-sh notranslate"><div class="highlight"><pre>a # not root
b
</pre></div></div>
<div class="highlight-text notranslate"><div class="highlight"><pre>$ a \\
    --long
what it prints
# b
</pre></div></div>
<div class="highlight-console notranslate"><div class="highlight"><pre>what something prints
</pre></div></div>
"""
CLICKS: Final = """async (page, window) => {
  const copied = [];
  const clipboard = { writeText: async (text) => copied.push(text) };
  Object.defineProperty(window.navigator, "clipboard", { value: clipboard });
  for (const button of page.querySelectorAll("button.copy")) button.click();
  return copied;
}"""


@pytest.mark.parametrize("width", [1280, 400])
def test_words_are_whole_and_no_page_scrolls_sideways(site: Path, width: int) -> None:
    pages = [site / "README.html", *sorted((site / "docs").rglob("*.html"))]
    found = dict(zip(pages, answers(pages, width, WORDS), strict=True))
    assert {str(page): each for page, each in found.items() if each["broken"] or each["wider"]} == {}
    assert found[site / "docs/reference/policy.html"]["count"] > 100


@pytest.mark.parametrize(("theme", "box", "page"), [("light", BOX, "bright"), ("dark", DARK[BOX], "dark")])
def test_a_picture_is_drawn_in_the_theme_that_the_reader_chose(
    site: Path, tmp_path: Path, theme: str, box: str, page: str
) -> None:
    screenshot(site / "docs/how-it-works.html", 800, ALONE % theme, tmp_path / "shot.png")
    points = (imread(tmp_path / "shot.png")[:, :, :3] * 255).round()
    colour = [int(box[at : at + 2], 16) for at in (1, 3, 5)]
    assert (points == colour).all(axis=2).mean() > 0.01
    ground = points > 230 if page == "bright" else points < 60
    assert ground.all(axis=2).mean() > 0.9  # also in the picture, which has no ground of its own


def test_a_button_copies_commands_without_prompts_and_output_has_none(tmp_path: Path) -> None:
    (tmp_path / "copy.js").write_text((ROOT / "docs/static/copy.js").read_text())
    (tmp_path / "page.html").write_text(BLOCKS)
    assert answers([tmp_path / "page.html"], 800, CLICKS) == [["a # not root\nb", "a \\\n    --long\nb"]]


def test_code_on_the_site_has_buttons(site: Path) -> None:
    asked = '(page) => page.querySelectorAll(".highlight-sh button.copy").length'
    assert answers([site / "docs/install.html"], 800, asked) > [1]
