"""The site builds without a warning, and its links lead somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.built_site import site as site
from tools.site import LIST, Page, external, faults, links_text, pages, reachable


def test_it_builds_without_a_warning_and_every_link_leads_somewhere(site: Path) -> None:
    built = pages(site)
    assert {Path("index.html"), Path("docs/index.html"), Path("docs/policy.html"), Path("README.html")} <= built.keys()
    assert (site / "searchindex.js").is_file()


def test_the_landing_page_is_the_beginning_of_readme_with_its_links(site: Path) -> None:
    landing, readme = ((site / name).read_text() for name in ("docs/index.html", "README.html"))
    assert ["When to use it, and when not" in page for page in (landing, readme)] == [False, True]
    assert '<a class="reference external" href="https://github.com/containerd/nri">NRI</a>' in landing


def test_a_link_with_a_file_name_for_text_shows_the_title(site: Path) -> None:
    page = (site / "docs/reference/policy.html").read_text()  # in Markdown: [policy.md](../policy.md)
    assert 'href="../policy.html"><span class="std std-doc">The policy file</span></a>' in page


def test_an_option_in_prose_keeps_its_two_dashes(site: Path) -> None:
    assert "unless --socket says which" in (site / "docs/reference/verbs.html").read_text()


def test_a_long_path_may_break_after_a_slash_and_a_short_one_not(site: Path) -> None:
    page = (site / "docs/reference/policy.html").read_text()
    assert '&quot;/var/</span><wbr><span class="pre">lib/</span><wbr>' in page
    assert "&quot;/var/run/nri/nri.sock&quot;</span>" in page


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ('<a href="#there">', None),
        ('<a href="b.html#here">', None),
        ('<a href="https://example.org/">', None),
        ('<a href="#gone">', "#gone: no such anchor"),
        ('<a href="b.html#gone">', "b.html#gone: no such anchor"),
        ('<a href="c.html">', "c.html: no such file"),
        ('<img src="c.svg">', "c.svg: no such file"),
        ('<script src="https://example.org/x.js">', "needs https://example.org/x.js to be shown"),
    ],
)
def test_a_link_that_leads_nowhere_is_told(tmp_path: Path, link: str, fault: str | None) -> None:
    (tmp_path / "a.html").write_text(f'<p id="there">{link}')
    (tmp_path / "b.html").write_text('<p id="here">')
    assert list(faults(tmp_path, pages(tmp_path))) == ([f"a.html: {fault}"] if fault else [])


def test_links_to_other_sites_are_listed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](https://a.example/x) and [b][], <https://c.example>, `[no](https://code.example)`\n\n"
        "[b]: https://b.example/y\n\n```sh\ncurl <https://block.example>\n```\n"
    )
    assert external([page]) == ["https://a.example/x", "https://b.example/y", "https://c.example"]
    assert LIST.read_text() == links_text()


def test_anchors_are_those_of_the_page() -> None:
    assert Page('<h1 id="one"></h1><a name="two">').anchors == {"one", "two"}


def test_without_a_network_it_is_known_before_each_link_is_asked_for() -> None:
    assert reachable(["https://127.0.0.1/x"])
    assert not reachable(["https://name.invalid/x", "https://other.invalid/"])
