"""The catalogue of refusals and log phrases: complete, as written in the docs, and readable."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.decision import Code
from nri_gpu.domain.phrases import CATALOGUE
from nri_gpu.policy.document import SECTIONS
from nri_gpu.policy.forms import settings_of
from tests.support.pages import anchors
from tools.messages import (
    CODES,
    LASTING,
    MADE,
    MANUAL,
    PACKAGE,
    REFUSED,
    SENTENCES,
    Row,
    Source,
    alert_rules,
    faults,
    page,
    rows,
    slug,
    sources,
    unlike,
)

ROWS: Final = tuple(rows(MANUAL.read_text()))
SAID_OF_ALL: Final = (
    *((row.cause, row.fix) for row in ROWS),
    *(each for phrases in CATALOGUE.values() for each in phrases.values()),
)


def names(table: str) -> list[str]:
    return [row.name for row in ROWS if row.table == table]


def test_every_phrase_that_is_logged_has_its_cause_and_fix() -> None:
    assert list(faults(sources())) == []
    assert sum(map(len, CATALOGUE.values())) > 80


def test_every_code_that_a_refusal_can_have_is_there() -> None:
    written = {
        code for file in sources() for text in file.strings for code in re.findall(r"nri-gpu \[([a-z-]+)\]", text)
    }
    assert sorted(names(CODES)) == sorted({code.value for code in Code} | written)


def test_every_refusals_phrase_is_there() -> None:
    phrases = {text for file in sources() for text in file.strings if re.fullmatch(r"\w+ (refused|rejected)", text)}
    assert sorted(phrases - {"request rejected"}) == sorted(names(REFUSED))


@pytest.mark.parametrize("file", ["decision/start_check.py", "plugin/starts.py"])
def test_every_sentence_of_validation_and_starts_is_there(file: str) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for within in [*functions, *(node for node in tree.body if isinstance(node, ast.AnnAssign))]:
        reasons = [
            node for node in ast.walk(within) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Reason"
        ]
        if any(not isinstance(node.args[1], ast.Name) for node in reasons):
            assert any(words in ast.unparse(within) for words in names(SENTENCES)), ast.unparse(within)


def test_words_of_a_sentence_are_words_of_one() -> None:
    said = "\n".join(text for file in sources() for text in file.strings)
    assert [words for words in names(SENTENCES) if words not in said] == []


def test_cause_and_fix_are_one_short_sentence_each() -> None:
    for sentence in chain.from_iterable(SAID_OF_ALL):
        assert sentence[0].isupper() or sentence.startswith(("nri-gpu ", "ledger.json ", "grpcio ", "containerd "))
        assert sentence.endswith(".")
        assert not re.search(r"[.!?] [A-Z]", sentence)
        assert len(sentence) <= 120


def test_each_message_and_each_alert_has_a_heading_of_its_own() -> None:
    there = anchors(MANUAL)
    assert len(set(there)) == len(there)
    assert {slug(each) for phrases in CATALOGUE.values() for each in phrases} <= set(there)
    assert [slug(rule["alert"]) for rule in alert_rules()] == there[-len(alert_rules()) :]
    assert list(unlike()) == []


def test_an_alert_names_what_prometheus_puts_in_and_leads_to_the_log() -> None:
    rule = {
        "alert": "NriGpuStrayUse",
        "annotations": {"summary": "{{ $value | humanize }} on {{ $labels.instance }}", "description": "Look."},
        "labels": {"severity": "warning"},
        "for": "2m",
    }
    shown = page("", [], {}, [rule]).partition("### NriGpuStrayUse")[2]
    assert shown.split("\n\n")[1:] == [
        "`value` on `instance` (warning, after 2m).",
        "Look.",
        "In the log: [stray GPU use](#stray-gpu-use).\n",
    ]


def test_settings_that_a_fix_names_exist() -> None:
    known = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in settings_of(kind)}
    sections = "|".join(SECTIONS)
    named = {name for each in SAID_OF_ALL for name in re.findall(rf"\b(?:{sections})\.[a-z_]+", " ".join(each))}
    named = {name for name in named if not name.endswith((".md", ".conf", ".json"))}
    assert len(named) > 5
    assert named <= known


# ---- how phrases are found

SAYS: Final = """
CONSTANT: Final = "a constant"

class Part:
    def run(self, worse):
        logger.bind(x=1).warning("a literal")
        logger.error(CONSTANT)
        self._log.warning("said by LogOnce", "fault", path="/x")
        self._log.note("a note", "fault")
        folder.note(process)
        refusals.log(fields, reason, f"{worse} is an answer")
        self._said("given", "first")
        logger.log("INFO" if worse else "DEBUG", "quiet")
        logger.log(LEVELS.get(worse, "INFO"), "loud" if worse else "louder")
        raise clause.error(f"{worse} is no fault of ours")

    def _said(self, phrase, what):
        logger.critical(phrase)
"""


SAID: Final = """logger.warning("new")
logger.warning(f"{name} broke")
logger.info("WARNING lost x=")
logger.error("worse")
faults.warning("`x` lasts", "fault")
"""
BROKEN: Final = ("It is broken.", "Mend it.")


def source(folder: Path, text: str) -> Source:
    (folder / "part.py").write_text(text)
    return Source(folder / "part.py")


def test_phrases_are_found_however_they_are_said(tmp_path: Path) -> None:
    found = source(tmp_path, SAYS)
    assert found.found == {
        "a literal": "warning",
        "a constant": "error",
        "said by LogOnce": LASTING,
        "a note": "warning",
        "given": "error",
        "loud": "warning",
        "louder": "warning",
    }
    assert found.loose == []


def test_what_is_missing_or_too_much_is_told(tmp_path: Path) -> None:
    found = source(tmp_path, SAID)
    catalogue = {
        "A": dict.fromkeys(("old", "lost", "worse"), BROKEN),
        "B": dict.fromkeys(("lost", "`x` lasts"), BROKEN),
    }
    assert list(faults([found], catalogue)) == [
        f"{tmp_path}/part.py:2: the phrase is not fixed: put what varies in a field",
        "phrases.py has no cause and fix of 'new'",
        "nothing logs 'old', which phrases.py has",
        *["phrases.py has 'lost' twice"] * 2,
    ]


def test_the_page_has_each_phrase_with_its_level(tmp_path: Path) -> None:
    found = source(tmp_path, SAID)
    made = page(f"Head.\n\n{MADE}old tables\n", [found], {"A": dict.fromkeys(("worse", "`x` lasts"), BROKEN)})
    assert made.startswith(f"Head.\n\n{MADE}\n### A\n\n#### `worse`\n\n- Level: error\n- Cause: It is broken.\n")
    assert f"\n#### `x lasts`\n\n- Level: {LASTING}\n- Cause: It is broken.\n- Fix: Mend it.\n" in made


def test_rows_are_read_from_their_tables() -> None:
    text = f"{CODES}\n|---|\n| `late` | It was late. | Try again. |\n"
    assert list(rows(text)) == [Row(CODES, "late", "It was late.", "Try again.")]
    with pytest.raises(ValueError, match=r"not a row of .*: \| `lost` \| It is\."):
        list(rows(f"{CODES}\n| `lost` | It is. |\n"))
