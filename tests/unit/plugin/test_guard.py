"""The guard on the wire of each NRI version: what it subscribes to, what it refuses, what it reads of the daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import ContainerId
from nri_gpu.nri.convert import DecodeError
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.guard import Guard
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.plugin.supervisor import Identity, SessionFollowers, Supervisor
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import NamespaceRules, Otherwise, Policy
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.ttrpc import OK, Status
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.nri_messages import CRI_O, FLAVOURS, NRI_0_8, NRI_0_10, NRI_0_12, Flavour
from tests.support.plugin import KEY, Bench, ServedPlugin, listed
from tests.support.running import running
from tests.support.scripted_runtime import Listener, ScriptedRuntime

US: Final = "10-nri-gpu"
each_version = pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
each_validating = pytest.mark.parametrize("flavour", [NRI_0_10, NRI_0_12], ids=["nri 0.10", "nri 0.12"])


class Known:
    """The daemon's state folder, in memory."""

    def __init__(self, key: bytes | None = KEY, policy: Policy | None = None) -> None:
        self.now_key = key
        self.now_policy = policy or Policy.default()
        self.now_revoked: frozenset[ContainerId] | OSError = frozenset()
        self.policies_read = 0

    def key(self) -> bytes | None:
        return self.now_key

    def revoked(self) -> frozenset[ContainerId]:
        if isinstance(self.now_revoked, OSError):
            raise self.now_revoked
        return self.now_revoked

    def policy(self) -> Policy:
        self.policies_read += 1
        return self.now_policy


def make_guard(state: Known | None = None) -> Guard:
    return Guard(state or Known(), lambda action: action())


def start(guard: Guard, of: pb.PodSandbox, made: pb.Container | None = None) -> bytes | Status:
    return guard.lifecycle(nri.event(Event.START_CONTAINER, of, made or nri.container(of))[1])


@asynccontextmanager
async def guarding(folder: Path, flavour: Flavour) -> AsyncIterator[ScriptedRuntime]:
    """A runtime with the guard registered."""
    async with Listener(folder / "nri.sock") as listener:
        guard = make_guard()
        guard.runtime, guard.version = flavour.configure["runtime_name"], flavour.configure["runtime_version"]
        supervisor = Supervisor(
            guard,
            lambda: Identity("nri-gpu-guard", "90"),
            SessionFollowers(lambda _: None, lambda: None, lambda _: None, lambda _: None),
            Sizes(PluginSettings, lambda action: action(), counts=False),
        )
        async with running(supervisor.run(listener.path)):
            runtime = await listener.accept()
            registered = await runtime.handshake(flavour)
            assert registered.events == sum(1 << (event - 1) for event in guard.events) & flavour.known_mask
            yield runtime
            await supervisor.stop(0.0)


@each_version
async def test_what_asked_and_holds_nothing_does_not_start(folder: Path, log: Log, flavour: Flavour) -> None:
    of, made = Bench().granted()
    async with guarding(folder, flavour) as runtime:
        assert await runtime.event(Event.START_CONTAINER, of, made) == OK
        for free in (nri.pod("quiet"), nri.asking("none", "out")):
            assert await runtime.event(Event.START_CONTAINER, free, nri.container(free)) == OK
            assert await runtime.create(free, nri.container(free)) == pb.CreateContainerResponse()
        late = nri.asking("1", "late")
        refused = await runtime.event(Event.START_CONTAINER, late, nri.container(late))
        assert refused.message.startswith(
            "nri-gpu [not-granted]: gpu.nri.io asks for GPUs, but nri-gpu granted it none"
        )
        for event in (Event.RUN_POD_SANDBOX, Event.STOP_CONTAINER, Event.REMOVE_CONTAINER, Event.POST_START_CONTAINER):
            assert await runtime.event(event, late, nri.container(late)) == OK
    assert log.one("start refused").fields["pod_name"] == "late"


@pytest.mark.parametrize("flavour", [*FLAVOURS.values(), CRI_O], ids=[*FLAVOURS, "CRI-O"])
def test_creations_are_subscribed_to_only_where_neither_start_nor_validation_will_do(flavour: Flavour) -> None:
    guard = make_guard()
    assert Event.CREATE_CONTAINER in guard.events  # as long as the runtime is not known
    guard.runtime, guard.version = flavour.configure["runtime_name"], flavour.configure["runtime_version"]
    assert (Event.CREATE_CONTAINER in guard.events) is (flavour in (CRI_O, NRI_0_8))


@pytest.mark.parametrize("flavour", [NRI_0_8, NRI_0_10, NRI_0_12, CRI_O])
async def test_a_checkpoint_is_not_restored_in_a_pod_that_asks(folder: Path, log: Log, flavour: Flavour) -> None:
    """Also where nobody else will say so, and whatever the pod's container is called."""
    quiet, asking = nri.pod("quiet"), nri.pod("asks", annotations={"gpu.nri.io/container.main": "1"})
    async with guarding(folder, flavour) as runtime:
        if flavour in (NRI_0_8, CRI_O):
            refused = await runtime.create(asking, nri.restored(asking))
            assert isinstance(refused, Status)
            sentence = refused.message
            assert await runtime.create(quiet, nri.restored(quiet)) == pb.CreateContainerResponse()
            assert await runtime.create(asking, nri.container(asking, "side")) == pb.CreateContainerResponse()
        else:
            sentence = await runtime.validate(asking, nri.restored(asking), {})
            assert await runtime.validate(quiet, nri.restored(quiet), {}) == ""
    assert sentence.startswith(
        "nri-gpu [restored]: its pod asks for GPUs by gpu.nri.io/container.main, and its image is"
    )
    assert (
        log.one("container refused" if flavour in (NRI_0_8, CRI_O) else "container rejected").fields["code"]
        == "restored"
    )


async def test_a_runtime_that_heeds_no_start_has_its_creations_validated(folder: Path, log: Log) -> None:
    of, made = Bench().granted()  # as a plugin behind the injector is shown it
    late, quiet = nri.asking("1", "late"), nri.pod("quiet")
    async with guarding(folder, CRI_O) as runtime:
        assert await runtime.create(of, made) == pb.CreateContainerResponse()
        assert await runtime.create(quiet, nri.container(quiet)) == pb.CreateContainerResponse()
        refused = await runtime.create(late, nri.container(late))
        assert isinstance(refused, Status)
        assert "[not-granted]" in refused.message
    assert log.one("container refused").fields["pod_name"] == "late"


@each_validating
async def test_what_plugins_added_is_validated_by_guard_and_plugin(folder: Path, log: Log, flavour: Flavour) -> None:
    of, quiet = nri.asking("2"), nri.pod("quiet")
    made = nri.container(of)
    gpu = pb.LinuxContainerAdjustment(devices=[pb.LinuxDevice(path="/dev/nvidia3", type="c", major=195, minor=3)])
    theirs = pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(linux=gpu))
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(flavour)
        ours = await runtime.create(of, made)
        assert isinstance(ours, pb.CreateContainerResponse)
        assert await runtime.validate(of, made, {US: ours}) == ""
        assert "[not-granted]" in await runtime.validate(of, made, {})
        assert "[ungranted-nodes]" in await runtime.validate(of, made, {US: ours, "20-x": theirs})
        assert await runtime.validate(quiet, nri.container(quiet), {"20-x": theirs}) == ""  # the guard's business
    assert len(log.said("container rejected")) == 2
    async with guarding(folder, flavour) as runtime:
        assert await runtime.validate(of, made, {US: ours}) == ""
        assert await runtime.validate(quiet, nri.container(quiet), {}) == ""
        assert "[not-granted]" in await runtime.validate(of, made, {})
        assert "NRI plugin 20-x added /dev/nvidia3" in await runtime.validate(of, made, {US: ours, "20-x": theirs})
        assert "[ungranted-nodes]" in await runtime.validate(quiet, nri.container(quiet), {"20-x": theirs})
    assert len(log.said("container rejected")) == 5


def test_the_policy_is_read_for_those_without_a_grant_only() -> None:
    state = Known()
    assert start(make_guard(state), *Bench().granted()) == b""
    assert state.policies_read == 0
    assert isinstance(start(make_guard(state), nri.asking("1")), Status)
    assert state.policies_read == 1


def test_the_key_is_the_one_of_now() -> None:
    """Nothing is kept of it: it may be made, or replaced, while the guard runs."""
    state = Known()
    guard, granted = make_guard(state), Bench().granted()
    for key in (None, KEY, bytes(32)):
        state.now_key = key
        assert (start(guard, *granted) == b"") is (key == KEY)


def test_what_runs_already_is_told_apart(log: Log) -> None:
    of, made = Bench().granted()
    forged = pb.Container()
    forged.CopyFrom(made)
    forged.id = "copied"
    asking, quiet = nri.asking("1", "late"), nri.pod("quiet")
    late, waiting = nri.container(asking), nri.container(asking, "side")
    running = [nri.running(each) for each in (made, forged, late, nri.container(quiet))]
    guard = make_guard()
    guard.synchronized(listed([of, asking, quiet], [*running, nri.created(waiting)]))
    found = guard.found
    assert [each.id for each in found.running] == [late.id]
    assert [each.id for each in found.doubtful] == ["copied"]
    assert [each.id for each in found.waiting] == [waiting.id]
    assert log.one("container runs without the GPUs it asked for").level == "WARNING"
    assert "mac" in log.one("container runs with a grant that is not valid").fields["fault"]
    assert log.one("container asked for GPUs and holds no grant: it will not start").level == "INFO"
    guard.synchronized(())
    assert guard.found.running == []


def test_what_lacks_its_nodes_is_not_started_where_that_is_heeded(log: Log) -> None:
    guard = make_guard()
    of, made = Bench().granted("2")
    lacking = pb.Container()
    lacking.CopyFrom(made)
    del lacking.linux.devices[0]
    guard.runtime = "cri-o"
    assert start(guard, of, lacking) == b""
    guard.runtime = "containerd"
    assert start(guard, of, made) == b""
    refused = start(guard, of, lacking)
    assert isinstance(refused, Status)
    assert "[incomplete-grant]" in refused.message
    assert log.one("start refused").fields["code"] == "incomplete-grant"


def test_garbage_is_refused_where_it_may_ask() -> None:
    with pytest.raises(DecodeError):
        make_guard().lifecycle(b"\xff gpu.nri.io")
    assert make_guard().lifecycle(b"\xff") == b""


def test_a_container_whose_gpus_went_to_another_does_not_start(log: Log) -> None:
    """Though its grant is valid; and nobody with a grant starts where that cannot be told."""
    state, granted = Known(), Bench().granted()
    guard = make_guard(state)
    assert start(guard, *granted) == b""
    state.now_revoked = frozenset({ContainerId(granted[1].id)})
    assert "they have since been granted to another container" in str(start(guard, *granted))
    assert start(guard, *Bench().granted(name="other")) == b""
    state.now_revoked = PermissionError(13, "denied")
    assert "the journal in the state folder" in str(start(guard, *granted))
    assert len(log.said("start refused")) == 2


@pytest.mark.parametrize(
    ("claims", "killed"),
    [
        (("device=0", "device=0"), True),
        (("device=0; mode=shared", "device=0; mode=shared"), False),
        (("device=0", "device=1"), False),
    ],
    ids=["alone", "shared", "of another GPU"],
)
def test_who_lost_its_gpus_and_runs_beside_their_holder_is_found(
    log: Log, claims: tuple[str, str], killed: bool
) -> None:
    """By the signed grants of the runtime's list; where nobody has them any more, it goes on."""
    (one, lost), (two, holder) = Bench().granted(claims[0], "lost"), Bench().granted(claims[1], "holder")
    state = Known()
    guard = make_guard(state)
    state.now_revoked = frozenset({ContainerId(lost.id)})
    guard.synchronized(listed([one, two], [nri.running(lost), nri.running(holder)]))
    assert [each.id for each in guard.found.revoked] == [lost.id] * killed
    assert len(log.said("container runs on GPUs that another pod holds")) == killed
    for alone in ([nri.running(lost), nri.created(holder)], [nri.created(lost), nri.running(holder)]):
        guard.synchronized(listed([one, two], alone))
        assert not guard.found.revoked
    state.now_revoked = PermissionError(13, "denied")
    guard.synchronized(listed([one, two], [nri.running(lost), nri.running(holder)]))
    assert not guard.found.revoked


def test_a_decision_to_ignore_a_request_outlives_the_policy_that_made_it(log: Log) -> None:
    """Its proof is no grant: the ledger has none, and what other plugins add is the guard's business alone."""
    ignoring = Policy(namespaces=NamespaceRules(deny=Globs(("*",)), otherwise=Otherwise.IGNORE))
    bench, of = Bench(ignoring), nri.asking("1")
    ours = bench.create(of)
    made = nri.adjusted(nri.container(of), ours)
    gpu = pb.LinuxContainerAdjustment(devices=[pb.LinuxDevice(path="/dev/nvidia3", type="c", major=195, minor=3)])
    theirs = pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(linux=gpu))
    verdict = bench.plugin.validate(nri.validate(of, nri.container(of), {US: ours, "20-x": theirs}))
    assert isinstance(verdict, bytes)
    assert not pb.ValidateContainerAdjustmentResponse.FromString(verdict).reject
    assert not bench.phases()
    bench.tell(Event.START_CONTAINER, of, made)
    bench.synchronize([of], [nri.running(made)])
    assert not bench.phases()
    guard = make_guard(Known(policy=Policy.default()))  # the namespace may ask now
    assert start(guard, of, made) == b""
    guard.synchronized(listed([of], [nri.running(made)]))
    assert not guard.found.running
    guard.synchronized(listed([of], [nri.running(nri.container(of))]))  # one that nobody decided on
    assert [each.id for each in guard.found.running] == [made.id]
