"""The list of seeded faults keeps up with the code: told at once, and not half an hour into `make gates`."""

from __future__ import annotations

from bench.seeded_faults import ROOT, faults, seeded


def test_each_fault_has_its_text_once_and_its_tests() -> None:
    for fault in faults():
        assert seeded(fault, (ROOT / fault.file).read_text())
        assert [each for each in fault.tests if not (ROOT / each.partition("::")[0]).exists()] == []
