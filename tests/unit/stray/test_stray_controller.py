"""The controller: what it keeps and logs of each look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Majors
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import ForeignSettings, Policy
from nri_gpu.policy.stray_settings import StraySettings
from nri_gpu.stray.allocated import AllocationsUnknownError
from nri_gpu.stray.judge import Kind, PodName
from nri_gpu.stray.stray_controller import Look, LookError, StrayController
from nri_gpu.stray.uses import Extent, Use
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until
from tests.unit.stray.known import ID, INVENTORY, OTHER_ID, TRAIN, listed, number, use

WHOLE = Extent(100, 0, whole=True)
FOUND = "stray GPU use"
ON = StraySettings(enabled=True)
STRAY = use(number(1))
HOST = use(number(1), cgroup="/a.slice")


class Audited:
    """A controller whose looks find what a test says. given: by the kubelet; None: it does not say."""

    def __init__(self, settings: StraySettings = ON) -> None:
        self.uses: Sequence[Use] = (STRAY,)
        self.extent = WHOLE
        self.given: Mapping[PodName, frozenset[GpuUuid]] | None = {}
        self.containers: Mapping[ContainerId, ListedContainer] = listed()
        self.looks = 0
        self.fails: Exception | None = None
        self.state = NodeState(INVENTORY, policy=replace(Policy.default(), stray=settings))
        self.state.synchronized = True
        self.controller = StrayController(
            self.state, lambda: self.containers, scan=self._scan, allocations=self._allocated
        )

    async def _scan(self, majors: Majors) -> Look:
        assert majors == INVENTORY.majors
        self.looks += 1
        if self.fails:
            raise self.fails
        return Look(tuple(self.uses), self.extent)

    async def _allocated(self, socket: str) -> Mapping[PodName, frozenset[GpuUuid]]:
        assert socket == self.state.settings.kubelet.podresources
        if self.given is None:
            raise AllocationsUnknownError("no answer")
        return self.given

    async def look(self, *uses: Use) -> None:
        self.uses = uses or self.uses
        await self.controller.look_again()

    @property
    def found(self) -> list[str]:
        return [each.container_id or str(each.processes[0].pid) for each in self.controller.findings]


# --- what is kept and logged ------------------------------------------------------------------------------------------


def allocated(audited: Audited) -> None:
    audited.given = {("ml", "train"): frozenset({make.uuid(1)})}


def excepted(audited: Audited) -> None:
    audited.state.use(replace(audited.state.policy, stray=replace(ON, exceptions=Globs(("ml/*",)))))


def monitors(audited: Audited) -> None:
    audited.state.use(replace(audited.state.policy, foreign=ForeignSettings(monitors=Globs(("ml/tr*",)))))


def granted(audited: Audited) -> None:
    audited.state.commit(make.ledger(make.entry(1, to=TRAIN)))


@pytest.mark.parametrize("may", [allocated, excepted, monitors, granted])
async def test_who_may_use_it_is_no_finding_any_more(may: Callable[[Audited], None]) -> None:
    audited = Audited()
    await audited.look()
    assert audited.found == [ID]
    may(audited)
    await audited.look()
    assert audited.found == []


async def test_while_the_kubelet_does_not_say_its_pods_are_findings(log: Log) -> None:
    audited = Audited()
    audited.given = None
    await audited.look()
    assert audited.found == [ID]
    assert "no answer), so its pods are findings, too" in audited.controller.fault
    assert log.one("scan for stray GPU use is incomplete").fields["fault"] == audited.controller.fault
    audited.given = {("ml", "train"): frozenset({make.uuid(1)})}
    await audited.look()
    assert (audited.controller.fault, audited.found) == ("", [])


async def test_a_pid_that_was_used_again_is_another_process() -> None:
    """So is one that a look did not show."""
    audited = Audited()
    for each in (STRAY, replace(STRAY, started=STRAY.started + 1), HOST, STRAY):
        began = time.time()
        await audited.look(each)
        (found,) = audited.controller.findings
        assert found.since_s is not None
        assert found.since_s >= began


async def test_a_finding_is_logged_once_and_shown_as_long_as_it_lasts(log: Log) -> None:
    audited = Audited()
    assert audited.controller.looked_s is None
    await audited.look()
    (first,) = audited.controller.findings
    await audited.look()
    (second,) = audited.controller.findings
    assert first.since_s == second.since_s
    assert (second.kind, audited.controller.looked_s is None) == (Kind.UNGRANTED, False)
    fields = log.one(FOUND).fields
    assert (fields["namespace"], fields["pod_name"], fields["container_id"]) == ("ml", "train", ID)
    assert (fields["gpu_uuid"], fields["pid"], fields["fault"]) == (make.uuid(1), STRAY.pid, first.message)
    await audited.look(use(number(1), cgroup="/kubepods", pid=9))
    assert audited.found == ["9"]
    assert len(log.said(FOUND)) == 2


async def test_a_program_that_the_host_runs_each_minute_is_logged_once(log: Log) -> None:
    audited = Audited()
    for pid in (20, 21, 22):
        await audited.look(replace(HOST, pid=pid))
    assert len(log.said(FOUND)) == 1
    await audited.look(replace(HOST, program="/bin/other"))
    assert len(log.said(FOUND)) == 2


async def test_the_mps_daemons_that_we_started_are_ours() -> None:
    audited = Audited()
    program = f"{audited.state.settings.driver.stage_dir}/580.95.05-1a2b3c4d/all/bin/nvidia-cuda-mps-server"
    await audited.look(replace(HOST, program=program))
    assert audited.found == []
    await audited.look(replace(STRAY, program=program))  # by a path in the container's own files
    assert audited.found == [ID]


@pytest.mark.parametrize("cgroup", [f"/docker/{OTHER_ID}", f"/../cri-containerd-{OTHER_ID}.scope"])
async def test_what_runs_in_our_own_container_is_ours(cgroup: str) -> None:
    audited = Audited()
    audited.extent = replace(WHOLE, cgroups=(cgroup,))
    await audited.look(use(number(1), cgroup=cgroup))
    assert audited.found == []
    await audited.look(use(number(1), cgroup=f"{cgroup}/{ID}"))  # a runtime inside of it, whose container is known
    assert audited.found == [ID]


async def test_on_the_host_whoever_shares_our_cgroup_is_no_part_of_us() -> None:
    audited = Audited()
    audited.extent = replace(WHOLE, cgroups=HOST.cgroups)
    await audited.look(HOST)
    assert audited.found == [str(HOST.pid)]


UNSEEN = {
    "the host's processes are hidden": (Extent(3, 0, whole=False), "the chart: stray.enabled=true"),
    "into some it may not look": (Extent(100, 98, whole=True), "nri-gpu cannot see what some processes have open"),
}


@pytest.mark.parametrize(("extent", "sentence"), UNSEEN.values(), ids=UNSEEN.keys())
async def test_what_it_cannot_see_it_says_once(log: Log, extent: Extent, sentence: str) -> None:
    audited = Audited()
    audited.extent = extent
    await audited.look()
    await audited.look()
    assert sentence.removeprefix("the ") in audited.controller.fault
    assert log.one("scan for stray GPU use is incomplete").fields["fault"] == audited.controller.fault
    assert audited.found == [ID]


@pytest.mark.parametrize("lacking", ["list", "driver"])
async def test_without_a_list_of_containers_or_a_driver_nobody_is_judged(log: Log, lacking: str) -> None:
    audited = Audited()
    audited.state.synchronized = lacking != "list"
    if lacking == "driver":
        audited.state.put_inventory(make.inventory([], majors=Majors()))
    await audited.look()
    assert (audited.looks, audited.found, log.warnings()) == (0, [], [])
    assert audited.controller.fault


# --- as it runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [LookError("too slow"), ZeroDivisionError()])
async def test_a_look_that_fails_is_said_and_the_next_one_comes(log: Log, fails: Exception) -> None:
    audited = Audited(replace(ON, every_s=1))
    audited.fails = fails
    async with running(audited.controller.run()):
        audited.state.use(audited.state.policy)
        await until("a fault", lambda: audited.looks == 1 and bool(audited.controller.fault))
        await until("another", lambda: audited.looks == 2)
        assert len(log.warnings()) == 1  # once, as long as it is the same
        assert audited.controller.looked_s is None
        audited.fails = None
        await until("a finding", lambda: audited.found == [ID])
    assert audited.controller.fault == ""


async def test_the_policy_switches_it_on_and_off() -> None:
    audited = Audited(StraySettings())
    async with running(audited.controller.run()):
        await asyncio.sleep(0)
        audited.state.use(replace(Policy.default(), stray=replace(ON, every_s=3600)))
        await until("a finding", lambda: audited.found == [ID])
        assert audited.controller.looked_s
        audited.state.use(Policy.default())
        await until("no finding", lambda: not audited.controller.findings)
        assert audited.controller.looked_s is None
    assert audited.looks == 1
