"""Whatever changes a topology file tells of: it is refused with places, or it plays, and each change is said."""

from __future__ import annotations

import contextlib

from hypothesis import assume, given
from hypothesis import strategies as st

from nri_gpu.domain.errors import InventoryError
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.scenario import Scenario
from nri_gpu.inventory.topology_file import TopologyError, parse_scenario
from tests.support.daemon import FOUR_GPUS

NODE = FOUR_GPUS.read_text()
DEVICE = '{ gi = 9, ci = 0, uuid = "MIG-0000000%d-0000-5000-8000-000000000000", profile = "1g.5gb", memory_bytes = 7 }'
LOST = st.sampled_from(["lost = true", "lost = false", 'unavailable = "no"', 'unavailable = ""'])
OTHERS = [
    "signs = []",
    'signs = ["thermal"]',
    "mig = true",
    f"mig = [{DEVICE % 1}]",
    f"mig = [{DEVICE % 1}, {DEVICE % 2}]",
]
OF_A_GPU = st.one_of(LOST, st.sampled_from(OTHERS), st.sampled_from(["present = false", "present = true"]))
OF_THE_NODE = ['driver = "590.10"', "majors = {}", "majors = { nvidia = 195 }", 'fault = ""', 'fault = "no driver"']
WRONG = ["signs = [7]", "majors = { nvidia = 0 }", "gpu = 9\nlost = true", "", "lost = true"]
CHANGE = st.one_of(
    st.builds("gpu = {}\n{}".format, st.integers(0, 3), OF_A_GPU),
    st.builds("gpu = {}\n{}".format, st.integers(0, 3), OF_A_GPU),
    st.sampled_from(OF_THE_NODE),
)
TOLD = st.lists(CHANGE, max_size=6)


def text(told: list[str]) -> str:
    """Each a second after the one before."""
    return "\n".join([NODE, *(f"[[change]]\nat_s = {at_s}\n{said}\n" for at_s, said in enumerate(told, 1))])


def parsed(told: list[str]) -> Scenario | None:
    try:
        return parse_scenario(text(told), "node.toml", 1.0)
    except TopologyError as error:
        assert all(fault.key.startswith("change[") for fault in error.faults)
        return None


@given(TOLD)
def test_what_happens_and_what_is_said_of_it_agree(told: list[str]) -> None:
    scenario = parsed(told)
    assume(scenario)
    assert scenario
    last = scenario.inventory
    for at_s in range(len(told) + 1):
        with contextlib.suppress(InventoryError):
            before, last = last, scenario.after(at_s)
            assert (changes(before, last) == ()) == (before == last)
            assert len({part.uuid for part in last.parts}) == len(last.parts)
            assert {end for link in last.links for end in (link.a, link.b)} <= {gpu.index for gpu in last.gpus}


@given(TOLD, st.sampled_from(WRONG), st.integers(0, 6))
def test_one_that_is_wrong_is_refused_wherever_it_stands(told: list[str], wrong: str, place: int) -> None:
    assert parsed([*told[:place], wrong, *told[place:]]) is None
