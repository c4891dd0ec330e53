"""The look that a child's lines make, and users' own containers in it."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from nri_gpu.domain.container import ContainerId
from nri_gpu.observe.look import USES_BYTES_MAX, bounded
from nri_gpu.observe.looker import HIDDEN, look_of, rootless
from nri_gpu.observe.looks import USES_MAX, SeenContainer, Unseen
from nri_gpu.observe.runtime_table import CONTAINERD, DOCKER, PODMAN
from nri_gpu.stray.judge import container_of
from nri_gpu.stray.uses import Extent, Use

ID, OTHER = ContainerId("ab" * 32), ContainerId("cd" * 32)


def used(*cgroups: str) -> Use:
    return Use(7, 1, "/bin/x", cgroups, ((195, 0),))


HOME: Final = "/user.slice/user-1000.slice/user@1000.service/user.slice"


def test_rootless_containers_by_their_processes() -> None:
    uses = [
        used(f"{HOME}/libpod-{ID}.scope/container"),
        used(f"{HOME}/libpod-{ID}.scope"),
        used(f"/../..{HOME}/docker-{OTHER}.scope"),
        used(f"/machine.slice/libpod-{'ef' * 32}.scope"),
        used(f"{HOME}/libpod-conmon-{'01' * 32}.scope"),
        used(f"{HOME}/app.slice/x.service"),
    ]
    found = [*rootless(uses, frozenset())]
    assert [(each.id, each.runtime, each.user, each.name) for each in found] == [
        (ID, PODMAN, "1000", ID[:12]),
        (OTHER, DOCKER, "1000", OTHER[:12]),
    ]


def test_a_users_cgroup_of_a_known_containers_name_is_no_container() -> None:
    assert [*rootless([used(f"{HOME}/libpod-{ID}.scope")], {ID})] == []


def test_lines_of_each_kind() -> None:
    container, use, extent = SeenContainer(id=ID, runtime=CONTAINERD), used(f"/kubepods/{ID}"), Extent(5, 0, whole=True)
    unseen = Unseen("rules", "why")
    look = look_of(3.0, [container, unseen, use, extent], [Unseen("processes", "before")])
    assert (look.at, look.containers, look.uses, look.extent) == (3.0, (container,), (use,), extent)
    assert look.unseen == (Unseen("processes", "before"), unseen)


@pytest.mark.parametrize(
    ("extent", "sentences"),
    [
        (Extent(5, 0, whole=False), [HIDDEN]),
        (Extent(5, 2, whole=True), ["what 2 of 5 processes have open: the observer needs the capabilities"]),
        (Extent(5, 0, whole=True), []),
    ],
)
def test_a_reach_that_is_not_whole_is_told(extent: Extent, sentences: list[str]) -> None:
    found = look_of(0.0, [extent]).unseen
    assert [each.sentence.startswith(start) for each, start in zip(found, sentences, strict=True)] == [True] * len(
        found
    )
    assert {each.what for each in found} <= {"processes"}


def test_a_user_who_takes_the_name_of_anothers_container_blames_nobody() -> None:
    """Names of cgroups can be read by all."""
    uses = [used(f"{each}/libpod-{ID}.scope") for each in (HOME.replace("1000", "1001"), HOME, HOME)]
    assert [each.user for each in rootless(uses, frozenset())] == ["1001 or 1000"]


def test_processes_beyond_the_limit_are_counted_and_the_few_of_others_are_kept() -> None:
    """A container has as many as it likes; what is left out of it is not known of it, and of no other."""
    uses = [Use(pid, 1, "/bin/x", ("/many",), ((195, 0),)) for pid in range(USES_MAX + 2)]
    lines = [*bounded(iter([*uses, used("/one"), Extent(9, 0, True)]))]
    *kept, unseen, extent = lines
    assert (len(kept), kept[-1]) == (USES_MAX, used("/one"))
    assert unseen == Unseen("processes", "3 more processes that have a node open")
    assert extent == Extent(9, 0, True, closed_in=("/many",))


def test_processes_of_long_names_take_no_more_memory() -> None:
    uses = [Use(pid, 1, "\N{PILE OF POO}" * 256, ("/many",), ()) for pid in range(USES_MAX)]
    kept = [each for each in bounded(iter([*uses, Extent(9, 0, True)])) if isinstance(each, Use)]
    assert 0 < len(msgspec.json.encode(kept)) <= USES_BYTES_MAX + USES_MAX
    assert len(kept) < USES_MAX


class _Known(frozenset[ContainerId]):
    def knows(self, container_id: ContainerId) -> bool:
        return container_id in self


def test_a_rootless_container_is_the_one_that_its_processes_are_in() -> None:
    use = used(f"{HOME}/libpod-{ID}.scope/container")
    [found] = look_of(0.0, [use]).containers
    assert container_of(use.cgroups, _Known()) == found.id
