"""All that NRI's reply adds, for each shipped topology, line by line: a release shows what it injects differently.

    make generate WHAT=goldens

writes tests/fixtures/nri/ anew; read the difference before you commit it. A file has a part for each request; in front
of each line stand the sets of capabilities that it is given with, by their letters, `.` where it is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability, closed_sets, closure
from nri_gpu.domain.node import DriverFiles, DriverTree, Inventory
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.system.state import NodeState
from nri_gpu.ttrpc.frames import Status
from tests.support import builders as make
from tests.support.daemon import TOPOLOGIES
from tests.support.goldens import FILES, FIXTURES, LIBRARIES, compare
from tests.support.plugin import NoRecorder

NAMES: Final = sorted(path.stem for path in TOPOLOGIES.glob("*.toml") if not load_topology(path).script)
# One more with each new capability.
SETS: Final[Mapping[str, Capabilities]] = {
    "c": frozenset({Capability.COMPUTE}),
    "u": frozenset({Capability.UTILITY}),
    "v": frozenset({Capability.VIDEO}),
    "g": frozenset({Capability.GRAPHICS}),
    "d": frozenset({Capability.DISPLAY}),
    "n": frozenset({Capability.NGX}),
    "3": frozenset({Capability.UTILITY, Capability.COMPAT32}),
    "D": DEFAULT_CAPABILITIES,
    "A": frozenset(Capability),
}
MAC: Final = re.compile("mac=[0-9a-f]+")


def tree(capabilities: Capabilities) -> DriverTree:
    """As staged, with a few of the files that go in one by one."""
    places = [place for each in Capability if each in capabilities for place in FILES.get(each, ())]
    binaries = ("nvidia-smi",) if Capability.UTILITY in capabilities else ()
    path = f"/stage/{'+'.join(sorted(capabilities))}"
    return DriverTree(path, binaries, tuple((place, f"extra{place}") for place in places), LIBRARIES)


TREES: Final = {some: tree(some) for some in closed_sets() if some != {Capability.COMPAT32}}


def reply(inventory: Inventory, claim: str) -> pb.CreateContainerResponse | Status:
    """What the runtime is answered, by a plugin that has granted nothing yet."""
    state = NodeState(inventory, later=lambda _: None)
    state.put_driver(DriverFiles("580.95.05", "580.95.05-0a1b2c3d", TREES, {}))
    plugin = Plugin(state, PluginDependencies(lambda: 0.0, lambda _: None, NoRecorder()), bytes(32))
    answer = plugin.create_container(make.create_payload(make.container(claim)))
    return answer if isinstance(answer, Status) else pb.CreateContainerResponse.FromString(answer)


def lines(answer: pb.CreateContainerResponse | Status, folder: str) -> Iterator[str]:
    """Everything that the answer says. folder: of the tree, the one thing in which all sets of capabilities differ."""
    if isinstance(answer, Status):
        yield f"refused {answer.message}"
        return
    adjust = answer.adjust
    yield from (f"annotation {key} {MAC.sub('mac=*', text)}" for key, text in sorted(adjust.annotations.items()))
    yield from (f"env {pair.key}={pair.value}" for pair in adjust.env)
    for node in adjust.linux.devices:
        number = f"{node.type} {node.major}:{node.minor}"
        yield f"node {node.path} {number} {node.file_mode.value:04o} {node.uid.value}:{node.gid.value}"
    for mount in adjust.mounts:
        source = re.sub(rf"\A{re.escape(folder)}(?=/|\Z)", "TREE", mount.source)
        yield f"{mount.type} {mount.destination} from {source} {','.join(mount.options)}"
    told = pb.CreateContainerResponse()
    told.CopyFrom(answer)
    for name in ("annotations", "env", "mounts"):
        told.adjust.ClearField(name)
    told.adjust.linux.ClearField("devices")
    yield from (
        f"also {line.strip()}" for line in str(told).splitlines() if line.strip(" {}") not in ("adjust", "linux", "")
    )


def part(inventory: Inventory, claim: str) -> Iterator[str]:
    """All sets of capabilities of one request, each line once, where the first set that has it has it."""
    said = {}
    for letter, some in SETS.items():
        closed = closure(some)
        answer = reply(inventory, f"{claim};capabilities={','.join(sorted(some))}")
        said[letter] = list(lines(answer, TREES[closed].path))
    yield f"== {claim}"
    for line in dict.fromkeys(line for each in said.values() for line in each):
        yield f"{''.join(letter if line in said[letter] else '.' for letter in SETS)} {line}"


def text_of(topology: str) -> str:
    inventory = load_topology(TOPOLOGIES / f"{topology}.toml", boot_clock=lambda: 0.0)
    claims = ["1", "all", *(f"device={unit.place}" for unit in inventory.parts[:1])]
    names = [f"{letter} {'+'.join(sorted(some))}" for letter, some in SETS.items()]
    return "\n".join([*names, *(line for claim in claims for line in part(inventory, claim))]) + "\n"


@pytest.mark.parametrize("topology", NAMES)
@pytest.mark.usefixtures("on_x86_64")
def test_it_is_what_it_was(topology: str) -> None:
    compare(FIXTURES / "nri" / f"{topology}.txt", text_of(topology))
