"""The policy for the API server knows the grammar's words, and tells of nothing that a node takes.

tests/cluster has it on a real API server.
"""

import re
from typing import Any

import pytest
from hypothesis import given

from nri_gpu.domain.edits import FORMER_EXTRAS, Extra
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.request.annotation import CLAUSES, VALUE_MAX, WORDS, parse_claim
from tests.property.test_request_parse import sentences
from tests.support.helm import documents
from tests.unit.request.samples import GOOD


def policy(**values: Any) -> dict[str, Any]:  # noqa: ANN401 - values of the chart
    (found,) = (each for each in documents(**values) if each["kind"] == "ValidatingAdmissionPolicy")
    spec: dict[str, Any] = found["spec"]
    return spec


def expression(name: str, **values: Any) -> str:  # noqa: ANN401 - likewise
    (found,) = (each["expression"] for each in policy(**values)["variables"] if each["name"] == name)
    return str(found)


@pytest.mark.parametrize("prefixes", ["a.io/", ["a.io/", "b.io/"]], ids=str)
def test_what_is_counted_has_one_of_the_prefixes(prefixes: str | list[str]) -> None:
    values = {"kubelet": {"enabled": True}, "admission": {"resourcePrefix": prefixes}}
    starts = re.findall(r'resource\.startsWith\("([^"]+)"\)', expression("counted", **values))
    assert starts == ([prefixes] if isinstance(prefixes, str) else prefixes)
    (said,) = (each["messageExpression"] for each in policy(**values)["validations"] if "uncounted" in str(each))
    assert """write ' + "a.io/" + 'gpu: 1 into its limits""" in said


# Python's $ would match before a line break, too.
CLAUSE = re.compile(re.findall(r"r'([^']*)'", expression("refused"))[0].replace("$", r"\Z"))


def told(value: str) -> bool:
    """Whether the policy says something of a value: its expression, in Python."""
    return not value.strip() or not all(CLAUSE.search(clause) for clause in value.split(";"))


@given(sentences)
def test_what_a_node_takes_is_not_told_of(value: str) -> None:
    try:
        parse_claim("gpu.nri.io", value, given=True)
    except RequestError:
        return
    assert not told(value)


@pytest.mark.parametrize("value", [claim.text for claim in GOOD.values()])
def test_nor_is_any_example_of_the_grammar(value: str) -> None:
    assert not told(value)


@pytest.mark.parametrize(
    ("value", "counted"),
    [("none", True), ("1;mode=mps", True), ("1; mode = mps ;sharing=threads:50", True), ("1;mode=shared", False)],
)
def test_what_needs_no_resource_that_the_scheduler_counts(value: str, counted: bool) -> None:
    (pattern,) = re.findall(r"r'([^']*)'", expression("uncounted"))
    assert bool(re.search(pattern, value)) is counted


def test_it_knows_every_word() -> None:
    names = {"count": "2", "device": "0,1", "mig": "1g.10gb:2", "model": "*H100*", "memory": "40Gi", "arch": "9.0"}
    for name in CLAUSES.keys() - names.keys() - {"mode", "capabilities", "extras", "sharing"}:
        pytest.fail(f"a new clause, {name}: teach it to templates/admission.yaml")
    extras = [each.value + ":0" * (each is Extra.IMEX) for each in Extra] + [*FORMER_EXTRAS]
    said = [*WORDS, *(f"{name} = {text}" for name, text in names.items()), *(f"mode={each}" for each in Mode)]
    said += [f"capabilities={','.join(Capability)}", f"extras={' , '.join(extras)}", "sharing=memory:10Gi,threads:50"]
    assert [value for value in said if told(value)] == []
    assert f"> {VALUE_MAX} " in expression("refused")


@pytest.mark.parametrize(
    "value", ["", " ", "yes", "gpu=1", "1.5", "0", "mode=share", "capabilities=all", "extras=imex", "all\n", "GPU-8f3a"]
)
def test_slips_are_told_of(value: str) -> None:
    assert told(value)
    with pytest.raises(RequestError):
        parse_claim("gpu.nri.io", value)
