"""The catalogue of refusals and log phrases: complete, as written in the docs, and readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from docs.messages import LASTING, MANUAL, PACKAGE, Source, faults, page, sources
from nri_gpu.domain.decision import Code
from nri_gpu.domain.log_remedies import LOG, SUBJECTS
from nri_gpu.domain.remedies import REFUSALS, REFUSED, VALIDATION, Remedy
from nri_gpu.policy.forms import settings_of
from nri_gpu.policy.schema import SECTIONS

FILES: Final = sources()
TABLES: Final[Mapping[str, Mapping[str, Remedy]]] = {
    "refusals": REFUSALS,
    "refused": REFUSED,
    "validation": VALIDATION,
    **SUBJECTS,
}
ALL: Final = [remedy for table in TABLES.values() for remedy in table.values()]


def test_every_phrase_that_is_logged_has_its_cause_and_fix() -> None:
    assert list(faults(FILES)) == []
    assert len(LOG) == sum(len(subject) for subject in SUBJECTS.values())


def test_the_page_has_the_catalogue() -> None:
    text = MANUAL.read_text()
    assert page(text, FILES) == text
    done = subprocess.run([sys.executable, MANUAL.with_suffix(".py"), "--check"], cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0


def test_every_code_that_a_refusal_can_have_is_there() -> None:
    written = {code for file in FILES for text in file.strings for code in re.findall(r"nri-gpu \[([a-z-]+)\]", text)}
    assert set(REFUSALS) == {code.value for code in Code} | written


def test_every_refusals_phrase_is_there() -> None:
    phrases = {text for file in FILES for text in file.strings if re.fullmatch(r"\w+ (refused|rejected)", text)}
    assert phrases - {"request rejected"} == set(REFUSED)


@pytest.mark.parametrize("file", ["decision/validate.py", "plugin/starts.py"])
def test_every_sentence_of_validation_and_starts_is_there(file: str) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for within in [*functions, *(node for node in tree.body if isinstance(node, ast.AnnAssign))]:
        reasons = [
            node for node in ast.walk(within) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Reason"
        ]
        if any(not isinstance(node.args[1], ast.Name) for node in reasons):
            assert any(words in ast.unparse(within) for words in VALIDATION), ast.unparse(within)


def test_words_of_a_sentence_are_words_of_one() -> None:
    said = "\n".join(text for file in FILES for text in file.strings)
    assert [words for words in VALIDATION if words not in said] == []


def test_cause_and_fix_are_one_short_sentence_each() -> None:
    for sentence in (sentence for remedy in ALL for sentence in remedy):
        assert sentence[0].isupper() or sentence.startswith(("nri-gpu ", "ledger.json ", "grpcio ", "containerd "))
        assert sentence.endswith(".")
        assert not re.search(r"[.!?] [A-Z]", sentence)
        assert len(sentence) <= 120
        assert "|" not in sentence


def test_settings_that_a_fix_names_exist() -> None:
    known = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in settings_of(kind)}
    sections = "|".join(SECTIONS)
    named = {name for each in ALL for name in re.findall(rf"\b(?:{sections})\.[a-z_]+", " ".join(each))}
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
    remedy = Remedy("It is broken.", "Mend it.")
    found = source(tmp_path, 'logger.warning("new")\nlogger.warning(f"{name} broke")\nlogger.info("WARNING lost x=")\n')
    assert list(faults([found], {"old": remedy, "lost": remedy})) == [
        f"{tmp_path}/part.py:2: the phrase is not fixed: put what varies in a field",
        "log_remedies.py has no cause and fix of 'new'",
        "nothing logs 'old', which log_remedies.py has",
    ]
