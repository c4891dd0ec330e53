"""The guard on the wire of each NRI version: what it subscribes to, what it refuses, what it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container
from nri_gpu.nri.convert import DecodeError
from nri_gpu.nri.events import Event
from nri_gpu.nri.session import Listed, Parts
from nri_gpu.plugin.guard import Guard
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import Identity, SessionFollowers, Supervisor
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import EnvironmentSettings, NamespaceRules, Otherwise, Policy
from nri_gpu.policy.service import REQUEST_BYTES
from nri_gpu.ttrpc import OK, Status, StatusCode
from tests.support import builders as make
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.nri_messages import CRI_O, FLAVOURS, NRI_0_10, NRI_0_12, Flavour
from tests.support.plugin import KEY, Bench, Station
from tests.support.scripted_runtime import Listener, ScriptedRuntime
from tests.unit.plugin.test_handlers import granted

US: Final = "10-nri-gpu"
IGNORING: Final = Policy(namespaces=NamespaceRules(allow=Globs(("web",)), otherwise=Otherwise.IGNORE))
each_version = pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
each_validating = pytest.mark.parametrize("flavour", [NRI_0_10, NRI_0_12], ids=["nri 0.10", "nri 0.12"])


class Known:
    """The daemon's state folder, in memory."""

    def __init__(self, key: bytes | None = KEY, policy: Policy | None = None) -> None:
        self.now_key = key
        self.now_policy = Policy.default() if policy is None else policy
        self.policies_read = 0

    def key(self) -> bytes | None:
        return self.now_key

    def policy(self) -> Policy:
        self.policies_read += 1
        return self.now_policy


def guard(state: Known | None = None) -> Guard:
    return Guard(state or Known(), lambda action: action())


@asynccontextmanager
async def guarding(folder: Path, flavour: Flavour, state: Known | None = None) -> AsyncIterator[ScriptedRuntime]:
    """A runtime with the guard registered."""
    async with Listener(folder / "nri.sock") as listener:
        watchers = SessionFollowers(lambda _: None, lambda: None, lambda _: None)
        judge = guard(state)
        judge.runtime = flavour.configure["runtime_name"]
        supervisor = Supervisor(
            judge,
            lambda: Identity("nri-gpu-guard", "90"),
            watchers,
            Sizes(lambda: REQUEST_BYTES, lambda action: action(), counts=False),
        )
        serving = asyncio.create_task(supervisor.run(listener.path))
        runtime = await listener.accept()
        registered = await runtime.handshake(flavour)
        assert registered.events == sum(1 << (event - 1) for event in judge.events) & flavour.known_mask
        yield runtime
        await supervisor.stop(0.0)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@each_version
async def test_what_asked_and_holds_nothing_does_not_start(folder: Path, log: Log, flavour: Flavour) -> None:
    of, made = granted(Bench())
    async with guarding(folder, flavour) as runtime:
        assert await runtime.event(Event.START_CONTAINER, of, made) == OK
        quiet = nri.pod("quiet")
        assert await runtime.event(Event.START_CONTAINER, quiet, nri.container(quiet)) == OK
        out = nri.asking("none", "out")
        assert await runtime.event(Event.START_CONTAINER, out, nri.container(out)) == OK
        late = nri.asking("1", "late")
        refused = await runtime.event(Event.START_CONTAINER, late, nri.container(late))
        assert refused.code is StatusCode.FAILED_PRECONDITION
        assert refused.message.startswith(
            "nri-gpu [not-granted]: gpu.nri.io asks for GPUs, but nri-gpu granted it none"
        )
    assert log.one("start refused").fields["pod_name"] == "late"


@each_version
async def test_events_it_never_asked_for_are_answered(folder: Path, flavour: Flavour) -> None:
    of, quiet = nri.asking("1"), nri.pod("quiet")
    async with guarding(folder, flavour) as runtime:
        assert await runtime.create(quiet, nri.container(quiet)) == pb.CreateContainerResponse()
        for event in (Event.RUN_POD_SANDBOX, Event.STOP_CONTAINER, Event.REMOVE_CONTAINER, Event.POST_START_CONTAINER):
            assert await runtime.event(event, of, nri.container(of)) == OK


@pytest.mark.parametrize("flavour", [*FLAVOURS.values(), CRI_O], ids=[*FLAVOURS, "CRI-O"])
def test_creations_are_asked_for_only_where_starts_cannot_be_refused(flavour: Flavour) -> None:
    judge = guard()
    assert Event.CREATE_CONTAINER in judge.events  # as long as it is not known who asks
    judge.runtime = flavour.configure["runtime_name"]
    assert (Event.CREATE_CONTAINER in judge.events) is (flavour is CRI_O)


async def test_a_runtime_that_heeds_no_start_has_its_creations_judged(folder: Path, log: Log) -> None:
    of, made = granted(Bench())  # as a plugin behind the injector is shown it
    late, quiet = nri.asking("1", "late"), nri.pod("quiet")
    async with guarding(folder, CRI_O) as runtime:
        assert await runtime.create(of, made) == pb.CreateContainerResponse()
        assert await runtime.create(quiet, nri.container(quiet)) == pb.CreateContainerResponse()
        refused = await runtime.create(late, nri.container(late))
        assert isinstance(refused, Status)
        assert "[not-granted]" in refused.message
    assert log.one("container refused").fields["pod_name"] == "late"


@each_validating
async def test_creations_are_judged_where_the_runtime_asks(folder: Path, log: Log, flavour: Flavour) -> None:
    of = nri.asking("2")
    made = nri.container(of)
    bench = Bench()
    ours = pb.CreateContainerResponse.FromString(bytes_of(bench.plugin.create_container(nri.create(of, made))))
    gpu = pb.LinuxContainerAdjustment(devices=[pb.LinuxDevice(path="/dev/nvidia3", type="c", major=195, minor=3)])
    theirs = pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(linux=gpu))
    quiet = nri.pod("quiet")
    async with guarding(folder, flavour) as runtime:
        assert await runtime.validate(of, made, {US: ours}) == ""
        assert await runtime.validate(quiet, nri.container(quiet), {}) == ""
        assert "[not-granted]" in await runtime.validate(of, made, {})
        assert "NRI plugin 20-x added /dev/nvidia3" in await runtime.validate(of, made, {US: ours, "20-x": theirs})
        assert "[ungranted-nodes]" in await runtime.validate(quiet, nri.container(quiet), {"20-x": theirs})
    assert len(log.said("container rejected")) == 3


@each_validating
async def test_the_injector_judges_its_own_work_too(folder: Path, log: Log, flavour: Flavour) -> None:
    of = nri.asking("2")
    made = nri.container(of)
    gpu = pb.LinuxContainerAdjustment(devices=[pb.LinuxDevice(path="/dev/nvidia3", type="c", major=195, minor=3)])
    theirs = pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(linux=gpu))
    async with Station(folder) as station:
        runtime = await station.connected(flavour)
        ours = await runtime.create(of, made)
        assert isinstance(ours, pb.CreateContainerResponse)
        assert await runtime.validate(of, made, {US: ours}) == ""
        assert "[not-granted]" in await runtime.validate(of, made, {})
        assert "[ungranted-nodes]" in await runtime.validate(of, made, {US: ours, "20-x": theirs})
        quiet = nri.pod("quiet")
        assert await runtime.validate(quiet, nri.container(quiet), {"20-x": theirs}) == ""  # the guard's business
    assert len(log.said("container rejected")) == 2


async def test_a_runtime_that_hangs_up_after_configure_is_asked_for_less(folder: Path) -> None:
    """Whatever its version made us think: one that does not know a bit drops the plugin, and fails open."""
    async with Station(folder, waits_s=(0.01,)) as station:
        masks = []
        for _ in range(2):
            runtime = await station.listener.accept()
            masks.append((await runtime.register(NRI_0_10)).events)
            runtime.close()
        runtime = await station.listener.accept()
        masks.append((await runtime.handshake(NRI_0_10)).events)
        validate = 1 << (Event.VALIDATE_CONTAINER_ADJUSTMENT - 1)
        assert [bool(mask & validate) for mask in masks] == [True, False, True]


def test_the_policy_is_looked_at_for_the_ungranted_only() -> None:
    state = Known()
    of, made = granted(Bench())
    assert start(guard(state), of, made) == b""
    assert state.policies_read == 0
    assert isinstance(start(guard(state), nri.asking("1"), nri.container(nri.asking("1"))), Status)
    assert state.policies_read == 1


@pytest.mark.parametrize(
    ("policy", "starts"),
    [(IGNORING, True), (Policy.broken("bad"), False), (Policy(namespaces=NamespaceRules(allow=Globs(()))), False)],
    ids=["ignored", "broken", "denied"],
)
def test_only_a_policy_that_ignores_lets_go(policy: Policy, starts: bool) -> None:
    of = nri.asking("1")
    assert (start(guard(Known(policy=policy)), of, nri.container(of)) == b"") is starts


def test_the_key_is_the_one_of_now() -> None:
    """Nothing is kept of it: it may be made, or replaced, while the guard runs."""
    state = Known(key=None)
    judge = guard(state)
    of, made = granted(Bench())
    assert isinstance(start(judge, of, made), Status)
    state.now_key = KEY
    assert start(judge, of, made) == b""
    state.now_key = bytes(32)
    assert isinstance(start(judge, of, made), Status)


def test_what_runs_already_is_told_apart(log: Log) -> None:
    of, made = granted(Bench())
    forged = pb.Container()
    forged.CopyFrom(made)
    forged.id = "copied"
    asking, quiet = nri.asking("1", "late"), nri.pod("quiet")
    late, waiting = nri.container(asking), nri.container(asking, "side")
    listed = [nri.running(made), nri.running(forged), nri.running(late), nri.created(waiting)]
    judge = guard()
    synchronize(judge, [of, asking, quiet], [*listed, nri.running(nri.container(quiet))])
    found = judge.found
    assert [each.id for each in found.running] == [late.id]
    assert [each.id for each in found.doubtful] == ["copied"]
    assert [each.id for each in found.waiting] == [waiting.id]
    assert log.one("container runs without the GPUs it asked for").level == "WARNING"
    assert "mac" in log.one("container runs with a grant that is not valid").fields["fault"]
    assert log.one("container asked for GPUs and holds no grant: it will not start").level == "INFO"
    synchronize(judge, [], [])
    assert judge.found.running == ()


def test_garbage_is_an_answer() -> None:
    """Whoever asked is refused: the request may be of a container that must not start."""
    with pytest.raises(DecodeError):
        guard().lifecycle(b"\xff gpu.nri.io")
    assert guard().lifecycle(b"\xff") == b""


def start(judge: Guard, of: pb.PodSandbox, made: pb.Container) -> bytes | Status:
    method, payload = nri.event(Event.START_CONTAINER, of, made)
    assert method == "StateChange"
    return judge.lifecycle(payload)


def synchronize(judge: Guard, pods: list[pb.PodSandbox], containers: list[pb.Container]) -> None:
    parts = Parts()
    for payload in nri.synchronize(pods, containers):
        parts.add(payload)
    judge.synchronized(parts.listed())


def bytes_of(reply: bytes | Status) -> bytes:
    assert isinstance(reply, bytes)
    return reply


def asking_by_environment(value: str) -> Container:
    return make.container(env={"NVIDIA_VISIBLE_DEVICES": value})


@pytest.mark.parametrize(
    ("policy", "value", "starts"),
    [
        (Policy.default(), "0", True),
        (Policy(environment=EnvironmentSettings(may_ask=Globs(("ml",)))), "0", False),
        (Policy(environment=EnvironmentSettings(may_ask=Globs(("ml",)))), "void", True),
        (Policy(environment=EnvironmentSettings(may_ask=Globs(("web",)))), "0", True),
    ],
    ids=["nobody may", "it may", "it may and does not", "others may"],
)
def test_requests_by_environment_need_a_grant_too(policy: Policy, value: str, starts: bool) -> None:
    judge = guard(Known(policy=policy))
    reply = judge.lifecycle(make.event_payload(Event.START_CONTAINER, asking_by_environment(value)))
    assert isinstance(reply, bytes) is starts
    listed = Listed(asking_by_environment(value), created=False)
    judge.synchronized((listed,))
    assert bool(judge.found.running) is not starts


def test_the_size_of_an_ordinary_container_takes_no_look_at_the_policy() -> None:
    """The guard reads the limit off files, and every container of the node starts through it."""
    asked: list[int] = []
    sizes = Sizes(lambda: asked.append(1) or REQUEST_BYTES, lambda action: action(), counts=False)  # type: ignore[func-returns-value]
    plain = nri.pod("plain")
    assert sizes.start_refusal(nri.create(plain, nri.container(plain))) is None
    assert asked == []
    assert sizes.start_refusal(b"\x0a\x00" * REQUEST_BYTES) is not None
    assert asked == [1]
