"""Law: no reachable Ledger is over capacity; release undoes a grant; the ledger rebuilt by Synchronize lived before.

Nor is a GPU granted exclusively whose number a live container opens, whatever that one was granted; where the kubelet
allocated it to that container's pod, it counts once. But a monitor keeps
nobody from a GPU, unless the kubelet allocated it to its pod; one that is none any more holds it again, beside whoever
came meanwhile, and nobody else gets it.

A runtime is played here with all its silences (containerd, seen on 1.7 and 2.1): a failed start sends no event, a
created container may be stopped and start all the same, and nothing is told that happens while the plugin is away.
Nor is it of a container whose creation failed behind the plugin's answer, or that the runtime's list lacks yet: for
those, and for the moment in which a daemon dies with its answer, there is the journal, until the grace is over.

Who opens by another component what a pod has exclusively is told, once by each daemon, with every holder; or kept out,
where policy says so.

"Lived before" means: what ran, runs, and what held as created holds as created. Three differences are allowed, all
among containers that never ran:
- one whose start failed in silence held until its grace was over; the list lacks it, so it is gone at once;
- one that had lapsed, or gave way to its pod's next attempt, holds anew where its GPUs are free: no list tells;
- one that held may find such a revenant listed before it and lapse: then its start is refused, and it is made again.

A machine that boots again has neither key nor journal: what was created before and is started after holds no grant.

A container that lapsed, and is started while the plugin is away, may find its GPUs another's: the journal says so, and
the guard, which reads it, refuses that start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.decide import decide
from nri_gpu.decision.overlaps import conflicts, overlaps
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import (
    TOLD_WITHIN_S,
    Cgroup,
    Container,
    ContainerId,
    DeviceRef,
    FirstProcess,
    PodId,
    PodUid,
)
from nri_gpu.domain.decision import Grant, Inject
from nri_gpu.domain.edits import NO_EDITS
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Node
from nri_gpu.kubelet.allocations import held_by_others
from nri_gpu.ledger.apply import apply
from nri_gpu.ledger.events import ListedDevice, Reconciled, Started, Stopped, Ticked
from nri_gpu.ledger.grant_text import SignedGrant, verify_grant
from nri_gpu.ledger.holders import Usage
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.ledger.opened import numbers_of, opened_uuids, seen
from nri_gpu.ledger.processes import Began, Exited
from nri_gpu.ledger.recording import Remembered
from nri_gpu.nri.session import Listed
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.policy.forms import NOTHING, Globs
from nri_gpu.policy.model import ClaimDefaults, OnConflict, Policy
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.system.cgroups import UNIFIED, ContainerCgroups
from nri_gpu.system.state import NodeState
from nri_gpu.ttrpc import Status
from tests.property import strategies
from tests.support import builders as make
from tests.support.ledgers import after, decided
from tests.support.log import Line, log_lines
from tests.support.plugin import NoRecorder

KEY: Final = bytes(32)
GRACE_S: Final = 60.0
CONFLICT: Final = "container opens GPUs that another pod has exclusively"
PID, UID = os.getpid(), os.geteuid()  # of every container's process
REQUEST_S: Final = 2.0  # as long as the runtime waits for the plugin, and as a grant is kept that it does not list
GPUS: Final = (*make.gpus(2), make.mig_gpu(2))  # few, so that requests meet
MINORS: Final = tuple(gpu.minor_number for gpu in GPUS)
Cut = Literal["as before", "made again", "made the other way round", "not at all"]
MPS: Final = MpsSettings(enabled=True)
State = Literal["created", "running", "exited"]
Fate = Literal["made", "made and not listed yet", "failed", "answer lost", "answer lost, not listed yet"]

pods = st.sampled_from(strategies.POD_NAMES)
names = st.sampled_from(strategies.CONTAINER_NAMES)
claims = st.sampled_from(
    [
        *("1", "all", "device=0", "device=0;mode=exclusive", "device=0;mode=shared", "none"),
        *("1;mode=mps", "device=0;mode=mps;sharing=memory:15Gi,threads:50"),
        *("mig=1g.5gb", "mig=1g.5gb:2;mode=shared", "device=2:0", "device=0,2:1;mode=exclusive"),
    ]
)
fates = st.sampled_from((*(["made"] * 3), *get_args(Fate)[1:]))
waits = st.sampled_from([0.5, 0.5, REQUEST_S + 0.5, GRACE_S + 1])  # seconds
cuts = st.sampled_from(get_args(Cut))
picks = st.integers(0, 99)


@dataclass
class Made:
    """A container as the runtime keeps it. listed: whether it would be told at a Synchronize."""

    container: Container
    number: int
    state: State = "created"
    listed: bool = True


def exclusive(use: Usage) -> list[Grant]:
    """The grants of a GPU that a pod has exclusively; none of another GPU."""
    return [*use.grants.values()] if use.mode is Mode.EXCLUSIVE else []


def adjusted(of: Container, reply: bytes, grant: Grant) -> Container:
    """As the runtime makes it of the answer."""
    adjust = pb.CreateContainerResponse.FromString(reply).adjust
    return replace(
        of,
        annotations=dict(adjust.annotations),
        env={pair.key: pair.value for pair in adjust.env},
        devices=tuple(DeviceRef(each.path, each.major, each.minor) for each in adjust.linux.devices),
        mps_folder=grant.seat.folder if grant.seat else "",
    )


class Journal(NoRecorder):
    """In memory, which outlives the daemon as /run does."""

    def __init__(self) -> None:
        self.grants: dict[ContainerId, Remembered] = {}
        self.known: dict[ContainerId, PodId] = {}

    def granted(self, grant: Grant, signed: str, now: float, revoked: Mapping[ContainerId, PodId]) -> bool:
        self.grants[grant.container_id] = Remembered(grant, now)
        self.known.update(revoked)
        return True

    def revoked(self) -> Mapping[ContainerId, PodId]:
        return self.known

    def removed(self, container_ids: Collection[ContainerId]) -> None:
        for each in container_ids:
            self.known.pop(each, None)

    def settled(self, *container_ids: ContainerId) -> None:
        for each in container_ids:
            self.grants.pop(each, None)

    def remembered(self, since: float) -> Iterable[Remembered]:
        return [each for each in self.grants.values() if each.at >= since]


class Cgroups(ContainerCgroups):
    """Those of the containers that run, and of those that ended with a process left."""

    def __init__(self, living: Callable[[ContainerId], bool]) -> None:
        super().__init__()
        self._living = living

    def first_process(self, pid: int, container_id: ContainerId) -> FirstProcess | None:
        return FirstProcess(pid, 1, Cgroup(UNIFIED, container_id)) if pid else None

    def lives(self, process: FirstProcess) -> bool:
        assert process.cgroup
        return self._living(ContainerId(process.cgroup.path))


class Runtime(RuleBasedStateMachine):
    """Containers as they really are, and a plugin that is told what a runtime tells."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[ContainerId, Made] = {}
        self.gpus = GPUS
        self.now = 0.0
        self.number = 0
        self.away = False
        self.left: set[ContainerId] = set()  # ended, with a process that lives on
        self.given: dict[ContainerId, float] = {}  # when a grant was
        self.monitors = NOTHING
        self.allocated: dict[PodId, frozenset[GpuUuid]] = {}  # that the kubelet has told
        self.unseen: set[ContainerId] = set()  # that the last Synchronize took from the journal
        self.journal, self.key, self.boots = Journal(), KEY, 0
        self.told: dict[tuple[str, str], set[str]] = {}  # conflicts by pod and container, by the daemon of now
        self.told_twice: list[Line] = []
        self.log = log_lines(self.take, "ERROR")
        self.log.__enter__()
        inventory = make.inventory(GPUS, simulated=True)
        self.state = NodeState(inventory, policy=Policy(mps=MPS), later=lambda action: action())
        self.state.put_driver(make.driver())
        self.start_daemon()

    def teardown(self) -> None:
        self.log.__exit__(None, None, None)

    def take(self, line: Line) -> None:
        """A conflict is told once for a container and a GPU, until the container ends or is a monitor."""
        if line.text == CONFLICT:
            of = f"{line.fields['namespace']}/{line.fields['pod_name']}", line.fields["container_name"]
            known, uuids = self.told.setdefault(of, set()), line.fields["gpu_uuid"].split(",")
            self.told_twice += [line] if known.issuperset(uuids) else []
            known.update(uuids)

    def start_daemon(self) -> None:
        """A new process: of what was in memory ledger.json has who ran, and their first processes."""
        before, last = self.state, self.state.ledger
        ran = {name: entry for name, entry in last.entries.items() if entry.ran}
        live = {name: each for name, each in last.live.items() if name in last.processes}
        kept = {name: each for name, each in last.external.items() if name in live and (each.watched or each.regained)}
        self.state = NodeState(before.node.inventory, policy=before.policy, later=lambda action: action())
        self.state.node = before.node
        self.state.ledger = Ledger(ran, kept, live=live, processes=last.processes)
        needs = PluginDependencies(lambda: self.now, lambda _: None, self.journal, cgroups=Cgroups(self.lives))
        self.plugin, self.told = Plugin(self.state, needs, self.key), {}
        self.allocated = {}

    def lives(self, name: ContainerId) -> bool:
        return name in self.left or (name in self.made and self.made[name].state == "running")

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def node(self) -> Node:
        return self.state.node

    def on(self, gpus: Iterable[Gpu]) -> None:
        """The node looks like this from here on."""
        self.state.put_inventory(replace(self.node.inventory, gpus=tuple(gpus)))
        if not self.away:
            self.plugin.observe()

    def tell(self, event: pb.Event, of: Container) -> bool:
        """Whether it was answered with nothing: a start that is refused is not."""
        if self.away:
            return True
        message = make.container_message(of, pid=PID)
        change = pb.StateChangeEvent(event=event, pod=make.pod_message(of.pod), container=message)
        taken = self.plugin.lifecycle(change.SerializeToString()) == b""
        self.plugin.processes.look()
        return taken

    def signed(self, container: Container) -> SignedGrant | None:
        text = container.annotations.get(GRANT_KEY, "")
        signed = verify_grant(text, container.pod.uid, container.id, self.key)
        return signed if isinstance(signed, SignedGrant) else None

    def relist(self, order: Sequence[int]) -> None:
        """Synchronize: the runtime's list comes in any order."""
        listed = [made for made in self.made.values() if made.state != "exited" and made.listed]
        listed.sort(key=lambda made: order[made.number % len(order)])
        self.unseen = {each.grant.container_id for each in self.journal.remembered(self.now - GRACE_S)}
        self.unseen -= {made.container.id for made in listed} | self.ledger.processes.keys()  # whose ends are seen
        self.plugin.synchronized(tuple(Listed(made.container, made.state == "created", PID) for made in listed))
        self.plugin.processes.look()

    # What can happen on a machine.

    def some(self, pick: int, *states: State) -> Made | None:
        found = [made for made in self.made.values() if made.state in states]
        return found[pick % len(found)] if found else None

    def sandbox(self, pod: str) -> PodId:
        living = [made.container.pod.id for made in self.made.values() if made.container.pod.name == pod]
        return living[0] if living else PodId(f"sandbox-{pod}-{self.number}")

    @rule(pod=pods, name=names, claim=claims, wait_s=waits, fate=fates)
    def create(self, pod: str, name: str, claim: str, wait_s: float, fate: Fate) -> None:
        self.now += wait_s
        self.number += 1
        of = make.pod(pod, claim, id=self.sandbox(pod))
        container = make.container(of=of, name=name, id=ContainerId(f"{pod}.{name}.{self.number}"), uid=UID)
        listed = "not listed" not in fate
        if self.away:
            self.made[container.id] = Made(container, self.number, listed=listed)  # the runtime fails open
            return
        reply = self.plugin.create_container(make.create_payload(container))
        if isinstance(reply, Status):
            return
        assert self.plugin.create_container(make.create_payload(container)) == reply
        grant = self.ledger.entries[container.id].grant
        self.check_new(grant)
        self.given[container.id] = self.now
        if "answer lost" not in fate:
            container = adjusted(container, reply, grant)
        if fate != "failed":
            self.made[container.id] = Made(container, self.number, listed=listed)
        if "answer lost" in fate:  # with the plugin, which is back at once
            self.start_daemon()
            self.relist(range(7))

    @precondition(lambda self: not self.away)
    @rule(pick=picks)
    def ask_again(self, pick: int) -> None:
        self.plugin.lapse()
        made = self.some(pick, "created")
        entry = made and self.ledger.entries.get(made.container.id)
        if made is None or not entry or not entry.holds or not self.on_node(entry.grant):
            return
        if self.state.policy.defaults.mode is Mode.MPS and entry.grant.mode is not Mode.MPS:
            return  # mode=mps takes claims for one GPU only, and is asked before what is held
        asking = replace(made.container, annotations={}, env={}, devices=(), mps_folder="")
        reply = self.plugin.create_container(make.create_payload(asking))
        assert not isinstance(reply, Status)
        assert self.ledger.entries[asking.id].grant == entry.grant
        made.container = adjusted(asking, reply, entry.grant)

    def on_node(self, grant: Grant) -> bool:
        return set(grant.uuids) <= {unit.uuid for unit in self.node.inventory.units if not why_not(unit)}

    def check_new(self, grant: Grant) -> None:
        """A new grant meets nobody it must not meet, however that one came by its GPUs."""
        faults = strategies.capacity_faults(self.ledger)
        assert not [fault for fault in faults if grant.container_id in fault.split(" and ")]
        if grant.mode is Mode.EXCLUSIVE:
            # Another component may give a sandbox what one of its containers was granted.
            entries = self.ledger.entries.items()
            ours = {each.grant.pod_id for id_, each in entries if each.holds and id_ != grant.container_id}
            others = [
                made
                for made in self.made.values()
                if made.state != "exited" and made.container.id != grant.container_id
                if made.container.pod.id not in ours & {grant.pod_id}
            ]
            assert all(self.opened(made).isdisjoint(grant.uuids) for made in others)

    def check_stranger(self) -> None:
        """Nor does somebody who asks for it now and did not before."""
        places = [unit.place if isinstance(unit, MigPart) else str(unit.index) for unit in self.node.inventory.units]
        for place in () if self.away else places:
            asking = make.container(f"device={place};mode=exclusive", of="stranger")
            decision = decide(asking, self.node, self.ledger, self.state.policy)
            assert decide(asking, self.node, self.unwatched(), self.state.policy) == decision
            if isinstance(decision, Inject):
                self.check_new(decision.grant)

    def opened(self, made: Made) -> frozenset[GpuUuid]:
        """What a container can open beyond its grant, if the plugin knows of it."""
        if made.container.id not in self.ledger.live:
            return frozenset()
        numbers = {(each.major, each.minor) for each in made.container.devices}
        signed = self.signed(made.container)
        opened = opened_uuids(numbers, self.node.inventory) - frozenset(signed.uuids if signed else ())
        return opened & self.allocated.get(made.container.pod.id, frozenset()) if self.monitors_it(made) else opened

    def monitors_it(self, made: Made) -> bool:
        return self.monitors.match(f"{made.container.pod.namespace}/{made.container.pod.name}")

    def unwatched(self) -> Ledger:
        """The ledger without what monitors only open."""
        kept = {name: replace(other, uuids=other.held) for name, other in self.ledger.external.items() if other.held}
        return self.ledger.with_all_external(
            {name: replace(other, watched=frozenset()) for name, other in kept.items()}
        )

    @rule(pod=pods, index=st.integers(0, 2), caps=st.booleans())
    def create_with_another_injectors_node(self, pod: str, index: int, caps: bool) -> None:
        self.number += 1
        of = make.pod(pod, id=self.sandbox(pod))
        minors = [GPUS[2].mig[0].compute_instance_minor or 0] if index == 2 and caps else []
        nodes = (make.held_node(self.gpus[index]), *(DeviceRef(f"/dev/cap{minor}", 510, minor) for minor in minors))
        container = make.container(of=of, name="dp", id=ContainerId(f"{pod}.dp.{self.number}"), devices=nodes)
        self.made[container.id] = Made(container, self.number)
        if self.away:
            return
        self.plugin.lapse()
        opened, usage = opened_uuids(numbers_of(container), self.node.inventory), self.ledger.usage()
        alone = [grant for uuid in opened & usage.keys() for grant in exclusive(usage[uuid]) if grant.pod_uid != of.uid]
        foreign = self.state.policy.foreign
        kept_out = alone and foreign.conflict is OnConflict.REFUSE and not self.monitors_it(self.made[container.id])
        reply = self.plugin.create_container(make.create_payload(container))
        assert isinstance(reply, Status) is bool(kept_out)
        assert container.id not in self.ledger.entries
        if kept_out:
            assert container.id not in self.ledger.external
            del self.made[container.id]

    @rule(pick=picks)
    def start(self, pick: int) -> None:
        made = self.some(pick, "created")
        if made is None:
            return
        container_id = made.container.id
        made.listed |= self.holds(made)  # of one that holds nothing, and that no list had, nobody takes note
        if self.away and container_id in self.journal.known:  # the guard reads it
            made.state = "exited"
        elif self.tell(pb.START_CONTAINER, made.container):
            made.state = "running"
        else:
            self.ends(made)

    def ends(self, made: Made) -> None:
        made.state = "exited"
        self.tell(pb.STOP_CONTAINER, made.container)

    @precondition(lambda self: not self.away)
    @rule(pick=picks)
    def ends_unheard(self, pick: int) -> None:
        """And its process is watched."""
        if made := self.some(pick, "running"):
            made.state = "exited"
            self.plugin.processes.saw(Began(made.container.id, PID))
            self.plugin.processes.saw(Exited(made.container.id, PID))
            self.now += TOLD_WITHIN_S
            self.plugin.processes.look()

    @precondition(lambda self: not self.away)
    @rule(pick=picks)
    def ends_with_a_process_left(self, pick: int) -> None:
        made = self.some(pick, "running")
        if made and self.holds(made):
            self.left.add(made.container.id)
            self.ends(made)

    @precondition(lambda self: not self.away)
    @rule(pick=picks)
    def is_listed_no_more(self, pick: int) -> None:
        """It runs, and the runtime cannot classify it."""
        if made := self.some(pick, "running"):
            made.listed = False

    @precondition(lambda self: self.left)
    @rule(pick=picks)
    def the_last_process_ends(self, pick: int) -> None:
        self.left.remove(sorted(self.left)[pick % len(self.left)])
        if not self.away:
            self.plugin.processes.look()

    def holds(self, made: Made) -> bool:
        """Whether it has a GPU, granted or by another component."""
        signed = self.signed(made.container)
        return bool(signed and signed.mode) or made.container.id in self.ledger.live

    @rule(pick=picks)
    def is_listed_by_now(self, pick: int) -> None:
        if made := self.some(pick, "created"):
            made.listed = True

    @rule(pick=picks)
    def fail_to_start_without_any_event(self, pick: int) -> None:
        if made := self.some(pick, "created"):
            made.state = "exited"

    @rule(pick=picks)
    def stop_what_never_started(self, pick: int) -> None:
        if made := self.some(pick, "created"):
            self.tell(pb.STOP_CONTAINER, made.container)

    @rule(pick=picks)
    def end(self, pick: int) -> None:
        if made := self.some(pick, "running"):
            self.ends(made)

    @rule(pick=picks)
    def remove(self, pick: int) -> None:
        if made := self.some(pick, "created", "running", "exited"):
            if made.state != "exited":
                self.ends(made)
            self.tell(pb.REMOVE_CONTAINER, made.container)
            del self.made[made.container.id]

    @rule(pod=pods)
    def remove_pod(self, pod: str) -> None:
        of = make.container(of=make.pod(pod, id=self.sandbox(pod)))
        self.made = {name: made for name, made in self.made.items() if made.container.pod.id != of.pod.id}
        self.tell(pb.STOP_POD_SANDBOX, of)

    @rule(lost=st.sets(st.integers(0, 2), max_size=1))
    def a_gpu_is_lost_or_back(self, lost: set[int]) -> None:
        self.on(gpu for gpu in self.gpus if gpu.index not in lost)

    @rule(minors=st.permutations(MINORS), cut=cuts)
    def the_driver_is_loaded_again(self, minors: list[int], cut: Cut) -> None:
        """Under containers that do not notice: their numbers may be other GPUs' from here on, and other instances'."""
        *whole, last = self.gpus
        parts = list(last.mig or GPUS[2].mig)
        if cut == "made again":
            parts = [replace(part, uuid=GpuUuid(f"{part.uuid[:-1]}{self.number % 10}")) for part in parts]
        if cut == "made the other way round":
            one, two = parts
            parts = [
                replace(one, compute_instance_minor=two.compute_instance_minor),
                replace(two, compute_instance_minor=one.compute_instance_minor),
            ]
        last = replace(last, mig_enabled=cut != "not at all", mig=() if cut == "not at all" else tuple(parts))
        self.gpus = tuple(replace(gpu, minor_number=minor) for gpu, minor in zip((*whole, last), minors, strict=True))
        self.on(self.gpus)
        self.check_stranger()

    @rule(mode=strategies.modes)
    def the_policys_default_changes(self, mode: Mode) -> None:
        self.state.use(replace(self.state.policy, defaults=ClaimDefaults(mode=mode)))

    @rule(conflict=st.sampled_from(OnConflict))
    def the_policy_keeps_conflicts_out_or_not(self, conflict: OnConflict) -> None:
        self.state.use(replace(self.state.policy, foreign=replace(self.state.policy.foreign, conflict=conflict)))

    @rule(listed=st.sets(pods, max_size=2))
    def the_policy_lists_monitors(self, listed: set[str]) -> None:
        before, opened = self.ledger, {name: self.opened(made) for name, made in self.made.items()}
        self.monitors = Globs(tuple(f"ml/{pod}" for pod in sorted(listed)))
        self.state.use(replace(self.state.policy, foreign=replace(self.state.policy.foreign, monitors=self.monitors)))
        if self.away:
            return
        self.plugin.observe()
        after = replace(before.with_all_external(self.ledger.external), stuck=self.ledger.stuck)
        assert self.ledger == after  # whoever has a GPU goes on
        for name, other in self.ledger.external.items():
            if name in self.made:
                assert other.regained >= other.uuids & self.opened(self.made[name]) - opened[name]
        self.check_stranger()

    @precondition(lambda self: not self.away and self.ledger.external)
    @rule(pick=picks, index=st.integers(0, 2))
    def the_kubelet_tells_what_it_allocated(self, pick: int, index: int) -> None:
        opening = sorted(self.ledger.external.values(), key=lambda other: other.container_id)
        pod_id = opening[pick % len(opening)].pod_id
        self.allocated[pod_id] = frozenset({self.gpus[index].uuid})
        self.plugin.monitors.told({pod_id: self.allocated[pod_id]})
        self.plugin.observe()
        self.check_stranger()

    @precondition(lambda self: not self.away and self.ledger.external)
    @rule(pick=picks)
    def the_kubelet_would_list_what_an_earlier_plugin_gave(self, pick: int) -> None:
        """Its word about a pod that has a GPU is in nobody's way who was let in, and lets in nobody else."""
        opening = sorted(self.ledger.external.values(), key=lambda other: other.container_id)
        other = opening[pick % len(opening)]
        usage = self.ledger.usage()
        namespace, _, name = other.pod.partition("/")
        pod = make.pod(name, id=other.pod_id)
        for uuid in sorted(each for each in other.held if usage[each].mode is None and not usage[each].releasing):
            device = AllocatedDevice("nvidia.com/gpu", uuid)
            listed = ListedDevice(device, namespace, name, "dp", shared=False, pod=pod)
            told = apply(self.ledger, Reconciled(self.now, (listed,), frozenset()), self.plugin.rules)
            assert {each: use.load for each, use in told.usage().items()} == {
                each: use.load for each, use in usage.items()
            }
            strangers = [each for each in usage[uuid].external.values() if each.pod_id != pod.id]
            settings = self.state.settings.kubelet
            taken, still = (held_by_others(each, settings, {device}, shared=False) for each in (self.ledger, told))
            assert taken - still == (set() if strangers else {uuid})
            assert told.usage()[uuid].blocks(Mode.EXCLUSIVE, PodUid("stranger"))
            assert told.usage()[uuid].blocks(Mode.SHARED, PodUid("stranger"))
            assert told.usage()[uuid].blocks(Mode.EXCLUSIVE, pod.uid) == bool(strangers)

    @precondition(lambda self: not self.away)
    @rule()
    def the_plugin_goes(self) -> None:
        self.away = True

    @precondition(lambda self: not self.boots and len(self.given) > 1)  # it ends all that came before
    @rule()
    def the_machine_boots_again(self) -> None:
        self.away, self.boots = True, self.boots + 1
        self.left, self.state.ledger = set(), Ledger()
        self.journal, self.key = Journal(), self.boots.to_bytes(len(KEY))
        self.start_daemon()
        for made in self.made.values():
            made.state, made.listed = "created" if made.state == "created" else "exited", True

    @precondition(lambda self: self.away)
    @rule(order=st.permutations(range(7)))
    def the_plugin_comes_back(self, order: list[int]) -> None:
        self.away = False
        self.relist(order)
        self.check_stranger()

    @precondition(lambda self: not self.away)
    @rule(order=st.permutations(range(7)))
    def the_connection_is_made_anew(self, order: list[int]) -> None:
        lived = self.ledger
        self.relist(order)
        self.check_rebuilt(lived, self.ledger)

    def check_rebuilt(self, lived: Ledger, anew: Ledger) -> None:
        listed = {name for name, made in self.made.items() if made.state != "exited" and made.listed}
        signed_ids = {name for name, made in self.made.items() if self.signed(made.container)}
        lost = {name for name, entry in lived.entries.items() if entry.ran and entry.grant.held and self.lives(name)}
        assert set(anew.entries) == (listed & signed_ids) | self.unseen | lost
        for name, entry in lived.entries.items():
            after = anew.entries.get(name)
            if name in lost - listed:
                assert after is not None
                assert after.lost
            elif name not in listed & signed_ids and name not in self.unseen:  # ended, or made without our answer
                assert after is None
            elif entry.phase is GrantPhase.RUNNING:
                assert after is not None
                assert after.phase is GrantPhase.RUNNING
            elif entry.phase is GrantPhase.CREATED and (after is None or after.phase is not GrantPhase.CREATED):
                assert after is not None
                assert after.phase is GrantPhase.LAPSED
                self.check_revenant(lived, anew, after)
            assert after is None or after.grant == entry.grant
        assert {
            name: other for name, other in lived.external.items() if self.there(name) and name in anew.external
        } == {name: other for name, other in anew.external.items() if name in lived.external}

    def check_revenant(self, lived: Ledger, anew: Ledger, lapsed: Entry) -> None:
        """It gave way to one that held nothing before."""
        one = anew.with_entry(replace(lapsed, phase=GrantPhase.CREATED))
        faults = [fault.split(" and ") for fault in strategies.capacity_faults(one)]
        met = {name for pair in faults if lapsed.grant.container_id in pair for name in pair}
        met -= {lapsed.grant.container_id}
        before = {name: lived.entries.get(ContainerId(name)) for name in met}
        assert [name for name, entry in before.items() if entry is None or not entry.holds]

    def there(self, name: ContainerId) -> bool:
        return self.alive(name) or name in self.left

    def alive(self, name: ContainerId) -> bool:
        return name in self.made and self.made[name].state != "exited"

    @invariant()
    def nobody_is_over_capacity(self) -> None:
        assert not strategies.capacity_faults(self.ledger)

    @invariant()
    def what_runs_on_gpus_is_known_to_run_and_nothing_else(self) -> None:
        if self.away:
            return
        running = {name for name, made in self.made.items() if made.state == "running" and self.signed(made.container)}
        ran = {name: entry for name, entry in self.ledger.entries.items() if entry.ran}
        assert ran.keys() - self.left <= running
        assert {name for name in running - ran.keys() if self.made[name].listed or self.holds(self.made[name])} == set()
        with_devices = {name for name in running if self.made[name].container.devices and name in ran}
        assert with_devices <= set(self.ledger.live)
        assert self.left == {name for name in self.ledger.lost if not self.alive(name)}
        assert self.ledger == seen(self.ledger, self.node.inventory, self.plugin.monitors.now)

    @invariant()
    def a_monitor_keeps_nobody_from_a_gpu_and_one_that_was_is_reported(self) -> None:
        if self.away:
            return
        usage = self.ledger.usage()
        without = self.unwatched().usage()
        assert {uuid: (use.load, use.external.keys()) for uuid, use in usage.items()} == {
            uuid: (use.load, use.external.keys()) for uuid, use in without.items()
        }
        for name, other in self.ledger.external.items():
            if name in self.made:
                assert not other.watched or self.monitors_it(self.made[name])
                assert other.held <= self.allocated.get(other.pod_id, other.uuids) or not other.watched

    @invariant()
    def who_opens_what_another_pod_has_alone_is_told_and_every_holder_named(self) -> None:
        assert not self.told_twice
        if self.away:
            return
        usage, found, reported = self.ledger.usage(), conflicts(self.ledger), overlaps(self.ledger)
        for name, other in self.ledger.external.items():
            alone = {uuid: exclusive(usage[uuid]) for uuid in other.held if not other.container}
            beside = {uuid: grants for uuid, grants in alone.items() if {grant.pod for grant in grants} - {other.pod}}
            assert frozenset(found[name].uuids if name in found else ()) == beside.keys()
            assert beside.keys() <= reported.keys()
            for grants in beside.values():
                assert {grant.pod for grant in grants} - {other.pod} <= {*found[name].holders}
        assert found.keys() <= self.ledger.external.keys()
        for each in found.values():
            assert self.told[each.other.pod, each.other.name].issuperset(each.uuids)
        there = {(each.pod, each.container) for each in self.ledger.live.values()}
        self.told = {of: uuids for of, uuids in self.told.items() if of in there}
        for other in self.ledger.external.values():
            self.told.get((other.pod, other.name), set()).difference_update(other.watched)

    @invariant()
    def what_is_no_more_holds_for_the_grace_at_most(self) -> None:
        if self.away:
            return
        for name, entry in after(self.ledger, Ticked(self.now)).entries.items():
            if name not in self.made and name not in self.left:
                assert not entry.holds or self.now - self.given[name] <= GRACE_S


TestRuntime = Runtime.TestCase
TestRuntime.settings = settings(max_examples=80, stateful_step_count=50)


@given(strategies.ledgers, strategies.entries())
def test_release_undoes_a_grant(ledger: Ledger, entry: Entry) -> None:
    grant = entry.grant
    ledger = ledger.without_containers({grant.container_id})
    granted = decided(ledger, Inject(NO_EDITS, grant), 1.0)
    assert granted.without_containers({grant.container_id}) == ledger
    ended = after(granted, Started(2.0, grant.container_id), Stopped(3.0, grant.container_id))
    assert ended.with_releasing(ledger.releasing) == ledger
