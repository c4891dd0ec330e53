"""Law: a container that only its name tells of holds as long as a cgroup of that name does that it can have.

No cgroup below one of a container of this runtime is: its programs may give any name. The hierarchy is of v1, in a
folder of the test's own: whether a cgroup has a process is what its file says.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.system.cgroups import DEVICES, ContainerCgroups, Mounted

SOUGHT, OTHER = ContainerId("5eed"), ContainerId("cafe")
NAMES: Final = {  # a cgroup's name -> whose it is, if a container's of this runtime
    "pods": None,
    "d0cc": None,  # of another runtime: a node that is a container
    "docker-d0cc.scope": None,
    "5eed": SOUGHT,
    "cri-containerd-5eed.scope": SOUGHT,
    "crio-conmon-5eed.scope": None,
    "05eed": None,
    "cafe": OTHER,
    "cri-containerd-cafe.scope": OTHER,
}
paths = st.lists(st.sampled_from(sorted(NAMES)), min_size=1, max_size=4).map(tuple)


class Host(RuleBasedStateMachine):
    """occupied: the cgroups with processes, by the names on the way to each. known: what an earlier look found."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        mount = Mounted("0:1", "/", self.folder.name, "cgroup", frozenset({DEVICES}))
        self.cgroups = ContainerCgroups([mount], same_pids=True)
        self.occupied: set[tuple[str, ...]] = set()
        self.known: FirstProcess | None = None

    @rule(path=paths)
    def make(self, path: tuple[str, ...]) -> None:
        Path(self.folder.name, *path).mkdir(parents=True, exist_ok=True)

    @rule(path=paths)
    def occupy(self, path: tuple[str, ...]) -> None:
        self.make(path)
        Path(self.folder.name, *path, "cgroup.procs").write_text("100\n")
        self.occupied.add(path)

    @rule(number=st.integers(0, 9))
    def leave(self, number: int) -> None:
        if self.occupied:
            path = sorted(self.occupied)[number % len(self.occupied)]
            Path(self.folder.name, *path, "cgroup.procs").write_text("")
            self.occupied.remove(path)

    @rule()
    def look(self) -> None:
        self.known = self.cgroups.named(frozenset({SOUGHT}), frozenset({OTHER})).get(SOUGHT)

    @invariant()
    def it_holds_by_each_cgroup_of_its_name(self) -> None:
        firsts = {path: next((each for each in path if NAMES[each]), None) for path in self.occupied}
        own = {path[: path.index(name) + 1] for path, name in firsts.items() if name and NAMES[name] == SOUGHT}
        found = self.cgroups.named(frozenset({SOUGHT}), frozenset({OTHER}))
        assert found.keys() <= {SOUGHT}
        assert paths_of(found.get(SOUGHT)) == {f"/{'/'.join(each)}" for each in own}
        if self.known:
            below = paths_of(self.known)
            lives = any(f"/{'/'.join(path)}/".startswith(f"{each}/") for path in self.occupied for each in below)
            assert self.cgroups.lives(self.known) is lives

    def teardown(self) -> None:
        self.folder.cleanup()


def paths_of(process: FirstProcess | None) -> set[str]:
    return {each.path for each in (process.cgroup, *process.others) if each} if process else set()


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=100, stateful_step_count=20)
