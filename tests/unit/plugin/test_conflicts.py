"""Containers that another component gave GPUs which other pods have exclusively: told once each, or kept out."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.overlaps import conflicts, overlaps
from nri_gpu.domain.container import ContainerId, PodId
from nri_gpu.ledger.events import DevicesPrepared
from nri_gpu.ledger.holders import DriverDevice
from nri_gpu.nri.subscription import Event
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import ForeignSettings, OnConflict, Policy
from tests.support import nri_messages as nri
from tests.support.log import Line, Log
from tests.support.plugin import Bench

PHRASE: Final = "container opens GPUs that another pod has exclusively"
REFUSE: Final = Policy(foreign=ForeignSettings(conflict=OnConflict.REFUSE))


def theirs(*minors: int, name: str = "theirs") -> tuple[pb.PodSandbox, pb.Container]:
    """A container that another component gave these nodes."""
    of = nri.pod(name)
    made = nri.container(of)
    for minor in minors:
        made.linux.devices.add(path=f"/dev/nvidia{minor}", type="c", major=195, minor=minor)
    return of, made


def prepare(bench: Bench, of: pb.PodSandbox) -> DriverDevice:
    """GPU 1, by NVIDIA's DRA driver, for a container of that pod."""
    found = DriverDevice(device="gpu-1", namespace="ml", pod_name=of.name, container_name="main", pod_id=PodId(of.id))
    bench.plugin.apply(DevicesPrepared(bench.clock(), (found,)))
    return found


def told(log: Log) -> list[Line]:
    return log.said(PHRASE)


def test_it_runs_and_is_told_once_however_many_gpus_it_opens(log: Log) -> None:
    bench = Bench()
    for index in range(3):
        bench.granted(f"device={index}", f"train-{index}")
    of, made = theirs(0, 1, 2, 3)
    bench.create(of, made)
    (line,) = told(log)
    assert line.level == "ERROR"
    assert (line.fields["container_id"], line.fields["pod_name"]) == (made.id, "theirs")
    assert line.fields["gpu_uuid"].split(",") == [gpu.uuid for gpu in bench.node.gpus[:3]]
    assert line.fields["holder"] == "ml/train-0 and ml/train-1 and ml/train-2"
    fault = line.fields["fault"]
    assert fault.startswith("ml/theirs (not through nri-gpu), container main, has 3 GPUs, held exclusively by ")
    assert "foreign.monitors" in fault
    assert "delete" not in fault
    for event in (Event.START_CONTAINER, Event.POST_START_CONTAINER):
        bench.tell(event, of, made)
    bench.plugin.observe()
    bench.granted("mode=shared; device=3", "later")
    assert told(log) == [line]
    bench.create(*theirs(0, name="next"))
    assert [each.fields["container_id"] for each in told(log)] == [made.id, "container-next-main"]


def test_nothing_is_told_of_shared_gpus_of_its_own_pod_and_of_free_ones(log: Log) -> None:
    bench = Bench()
    bench.granted("device=0; mode=shared", "shared")
    of, made = theirs(0, 1, 2)
    of.annotations["gpu.nri.io/container.asking"] = "device=1"
    bench.create(of, nri.container(of, "asking"))
    bench.create(of, made)
    assert len(bench.plugin.ledger.external) == 1
    assert not log.warnings()


@pytest.mark.parametrize("gone", [Event.STOP_CONTAINER, Event.REMOVE_CONTAINER, Event.STOP_POD_SANDBOX])
@pytest.mark.parametrize("which", ["theirs", "train"])
def test_it_is_over_with_either_of_the_two(log: Log, gone: Event, which: str) -> None:
    bench = Bench()
    holder = bench.granted("device=1", "train")
    other = theirs(1)
    bench.create(*other)
    assert conflicts(bench.plugin.ledger).keys() == {ContainerId(other[1].id)}
    of, made = other if which == "theirs" else holder
    bench.tell(Event.START_CONTAINER, of, made)
    bench.tell(gone, of, None if gone is Event.STOP_POD_SANDBOX else made)
    assert conflicts(bench.plugin.ledger) == {}
    assert len(told(log)) == 1


def test_a_restart_of_the_daemon_tells_it_once_more_and_a_new_connection_does_not(log: Log) -> None:
    bench = Bench()
    holder, other = bench.granted("device=1", "train"), theirs(1)
    bench.create(*other)
    pods, containers = [holder[0], other[0]], [nri.running(holder[1]), nri.running(other[1])]
    bench.synchronize(pods, containers)
    bench.synchronize(pods, containers)
    assert len(told(log)) == 1
    anew = Bench()
    anew.synchronize(pods, containers)
    assert conflicts(anew.plugin.ledger).keys() == {ContainerId(other[1].id)}
    anew.synchronize(pods, containers)
    assert len(told(log)) == 2


def test_gpus_that_nvml_does_not_describe_for_a_while_do_not_tell_it_again(log: Log) -> None:
    bench = Bench()
    bench.granted("device=1", "train")
    bench.create(*theirs(1))
    node = bench.node
    bench.node = replace(node, inventory=replace(node.inventory, gpus=()))
    bench.plugin.observe()
    bench.settle()
    assert conflicts(bench.plugin.ledger) == {}
    bench.node = node
    bench.plugin.observe()
    bench.settle()
    assert conflicts(bench.plugin.ledger)
    assert len(told(log)) == 1


def test_a_monitor_of_an_hour_is_told_again_once_it_is_none(log: Log) -> None:
    """What it holds then may be other pods' than the first time."""
    bench = Bench()
    bench.granted("device=1", "train")
    bench.create(*theirs(1))
    for monitors in (("ml/theirs",), ()):
        bench.state.use(Policy(foreign=ForeignSettings(monitors=Globs(monitors))))
        bench.plugin.observe()
        bench.settle()
        assert bool(conflicts(bench.plugin.ledger)) is not bool(monitors)
    assert len(told(log)) == 2


def test_refuse_keeps_it_out_and_lets_it_in_once_the_holder_is_gone(log: Log) -> None:
    bench = Bench(REFUSE)
    holder = bench.granted("device=1", "train")
    other = theirs(1, 2)
    sentence = bench.refused(*other)
    assert "[gpu-busy]" in sentence
    for word in ("GPU 1", "ml/train", "list this container's pod in foreign.monitors", "foreign.conflict"):
        assert word in sentence
    assert not bench.plugin.ledger.external
    assert bench.refusals.last[-1].code == "gpu-busy"
    bench.create(*theirs(2, name="beside"))
    bench.tell(Event.REMOVE_CONTAINER, *holder)
    bench.create(*other)
    assert not told(log)


def test_refuse_stops_nothing_that_runs(log: Log) -> None:
    """Both are there when the policy comes into force: it is told, and both go on."""
    bench = Bench()
    holder, other = bench.granted("device=1", "train"), theirs(1)
    bench.create(*other)
    bench.state.use(REFUSE)
    bench.synchronize([holder[0], other[0]], [nri.running(holder[1]), nri.created(other[1])])
    assert bench.tell(Event.START_CONTAINER, *other) == b""
    assert len(told(log)) == 1


@pytest.mark.parametrize("held", [True, False])
def test_what_a_plugin_adds_after_us_is_known_at_the_start(log: Log, held: bool) -> None:
    """NVIDIA's toolkit as an NRI plugin, perhaps: the request does not show its nodes, the container does."""
    bench = Bench()
    if held:
        bench.granted("device=1", "train")
    bench.create(*theirs())
    of, made = theirs(1)
    assert bench.tell(Event.START_CONTAINER, of, made) == b""
    assert bench.plugin.ledger.external.keys() == {ContainerId(made.id)}
    assert len(told(log)) == held
    assert "[gpu-busy]" in bench.refused(nri.asking("device=1", "next"))
    bench.tell(Event.STOP_CONTAINER, of, made)
    assert not bench.plugin.ledger.external


@pytest.mark.parametrize("before", ["another GPU", "a device of another kind", "a grant", "a grant of none"])
def test_what_it_had_before_does_not_hide_that(log: Log, before: str) -> None:
    """Devices at its creation and a grant say nothing of what a plugin adds after us."""
    for policy in (Policy(), REFUSE):
        bench = Bench(policy)
        bench.granted("device=1", "train")
        of, made = theirs(2) if before == "another GPU" else theirs()
        if before == "a device of another kind":
            made.linux.devices.add(path="/dev/fuse", type="c", major=10, minor=229)
        if "grant" in before:
            of, made = bench.granted("none" if "none" in before else "device=0; mode=shared", "theirs")
        else:
            bench.create(of, made)
        had = bench.plugin.ledger
        made.linux.devices.add(path="/dev/nvidia1", type="c", major=195, minor=1)
        if policy is REFUSE:
            assert "[gpu-busy]" in bench.not_started(of, made)
            assert bench.plugin.ledger.live == had.live
            bench.plugin.runtime = "cri-o"
        assert bench.tell(Event.START_CONTAINER, of, made) == b""
        assert overlaps(bench.plugin.ledger).keys() == {bench.node.gpus[1].uuid}
        known, now = had.live.get(ContainerId(made.id)), bench.plugin.ledger.live[ContainerId(made.id)]
        assert known is None or (now.numbers > known.numbers and now.staged == known.staged)


def test_what_nvidias_driver_prepared_is_told_once_over_all_attempts_at_its_container(log: Log) -> None:
    bench = Bench()
    bench.granted("device=1", "train")
    of, made = theirs(1)
    prepared = prepare(bench, of)
    for attempt in ("first", "second"):
        made.id = attempt
        bench.create(of, made)
        assert conflicts(bench.plugin.ledger).keys() == {ContainerId(attempt)}
        bench.tell(Event.START_CONTAINER, of, made)
        bench.tell(Event.REMOVE_CONTAINER, of, made)
        assert conflicts(bench.plugin.ledger).keys() == {prepared.id}
    assert len(told(log)) == 1


@pytest.mark.parametrize("policy", [Policy(), REFUSE])
def test_what_is_only_prepared_keeps_no_container_of_the_holder_out(policy: Policy) -> None:
    """Under `refuse` its own container waits for the holder's: both would wait for ever."""
    bench = Bench(policy)
    holder, first = bench.granted("device=1", "train")
    of, made = theirs(1)
    prepare(bench, of)
    bench.create(holder, nri.container(holder, "second"))
    assert "ml/theirs" in bench.refused(nri.asking("device=1", "next"))
    for name in ("main", "second"):
        bench.tell(Event.REMOVE_CONTAINER, holder, first if name == "main" else nri.container(holder, name))
    assert "ml/theirs" in bench.refused(holder)
    bench.create(of, made)


def test_refuse_keeps_that_from_starting() -> None:
    """But on a runtime that starts it whatever we answer, it is told."""
    bench = Bench(REFUSE)
    bench.granted("device=1", "train")
    assert "[gpu-busy]" in bench.not_started(*theirs(1))
    assert not bench.plugin.ledger.external
    bench.plugin.runtime = "cri-o"
    assert bench.tell(Event.START_CONTAINER, *theirs(1)) == b""
    assert conflicts(bench.plugin.ledger)
