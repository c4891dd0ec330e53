"""Whatever a topology file says, it is a node or a TopologyError with places: nothing else happens."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nri_gpu.domain.errors import InventoryError
from nri_gpu.simulation.scenario import Scenario
from nri_gpu.simulation.topology import TopologyError, parse_scenario
from tests.support.daemon import TOPOLOGIES
from tests.unit.simulation.files import GPU, LINK, MIG, NODE, PLAYED, SECOND

CUT = MIG + "ci_minor = 85\n" + MIG.replace("0123", "1123").replace("gi = 9", "gi = 10") + "gi_minor = 7\n"
SHARED = "drm = [{ name = 'card0', major = 226, minor = 0 }]\nfabric = { state = 'completed' }\necc = true\n"
TEXTS = (
    PLAYED,
    NODE + GPU + SHARED + CUT + SECOND + MIG.replace("0123", "2123") + LINK + "nvlink = 18\n",
    Path(TOPOLOGIES / "mig-a100.toml").read_text(),
)
VALUES = ("0", "1", "-1", "9", "195", "true", "''", "'1g.10gb'", "[]", "[1]", "{}", "[{}]", "1e99", "nan", "'7g.80gb'")
EDITS = ("drop", "double", "swap", "value")


@st.composite
def broken(draw: st.DrawFn) -> str:
    """A file that was right, after a few slips of the hand."""
    lines = draw(st.sampled_from(TEXTS)).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        match draw(st.sampled_from(EDITS)):
            case "drop" if len(lines) > 1:
                del lines[at]
            case "double":
                lines.insert(other, lines[at])
            case "swap":
                lines[at], lines[other] = lines[other], lines[at]
            case _:
                lines[at] = f"{lines[at].partition('=')[0]}= {draw(st.sampled_from(VALUES))}"
    return "\n".join(lines)


@settings(max_examples=150)
@given(broken())
def test_a_slip_of_the_hand(text: str) -> None:
    try:
        scenario = parse_scenario(text, "node.toml", 1.0)
    except TopologyError as error:
        assert error.faults
        assert all(fault.message and (fault.key or fault.line or "node" in str(fault)) for fault in error.faults)
        assert all(fault.line is None or 1 <= fault.line <= text.count("\n") + 1 for fault in error.faults)
        return
    for at_s in (0.0, *(change.at_s for change in scenario.changes)):
        stands(scenario, at_s)


def stands(scenario: Scenario, at_s: float) -> None:
    """Nothing is two things at any time."""
    try:
        inventory = scenario.after(at_s)
    except InventoryError:
        return  # nobody can be asked by then
    units = [unit.uuid for unit in inventory.units]
    assert len(set(units)) == len(units)
    minors = [part.device.compute_instance_minor for part in inventory.parts]
    known = [minor for minor in minors if minor is not None]
    assert len(set(known)) == len(known)
    for gpu in inventory.gpus:
        of_instances = {part.gpu_instance_id: part.memory_bytes for part in gpu.mig}
        assert not gpu.memory_bytes or sum(of_instances.values()) <= gpu.memory_bytes
