"""Containers by the hundred, eight at a time, while those who serve them are killed: what comes of it is counted.

A slot is a container's name in a pod, with the request that the pod's annotation makes for it; as with a kubelet, it
holds one container at a time, and each next one is another attempt. Every program writes down which GPUs it found, so
what ran is known from itself (`tests/support/chaos_evidence.py`).
"""

import os
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from msgspec import Struct

from tests.support import packages
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.chaos_evidence import SETTLED_S, Evidence, trace_of
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod, PodId
from tests.support.daemon import TOPOLOGIES, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.unread import unread_bytes
from tests.support.waiting import wait_for

AT_ONCE: Final = 8
PODS, NAMES_OF_EACH = 8, 3
KILL_EVERY_S, AWAY_S = (0.5, 2.0), (0.0, 0.5)
LATE_AT_MOST_S: Final = 40.0  # a start within the ledger's grace
OUR_CODE: Final = re.compile(r"nri-gpu \[([a-z-]+)\]")
# From NRI 0.10 a creation fails with the plugin that dies while it is asked to validate: nobody starts ungranted.
VALIDATOR_DIED: Final = re.compile(r"validator plugin \S+ failed: ttrpc: closed")
# The runtime's own validator, and the pods that require nri-gpu by it.
VALIDATOR: Final = '[plugins."io.containerd.nri.v1.nri".default_validator]\n  enable = true\n'
REQUIRES: Final = {"required-plugins.noderesource.dev/pod": '["nri-gpu"]'}
NOT_CONNECTED: Final = 'required plugin "nri-gpu" not present'
PLAIN_PODS: Final = 2  # of eight, where the others require nri-gpu
# Of containers that asked and were created without a grant: whether a daemon was connected when the creation began.
UNSERVED: Final = "created without a grant, no daemon connected"
WINDOW: Final = "created without a grant, the daemon died meanwhile"
AIMED: Final = "killed in the middle of a creation"
# Requests on a node of eight GPUs -> how many GPUs they are; None: no container may ever come of it.
REQUESTS: Final[Mapping[str, int | None]] = {
    "1": 1,
    "device=0": 1,
    "count=2": 2,
    "device=1,2": 2,
    "count=1; mode=shared": 1,
    "device=3; mode=shared": 1,
    "device=2,3; mode=shared": 2,
    "device=4,5,6,7; mode=shared": 4,
    "none": 0,
    "": 0,
    "frobnicate": None,
    "device=99": None,
    "count=99": None,
}


class Fate(StrEnum):
    """What becomes of a container that was created."""

    SHORT = "ends by itself"
    LONG = "runs until somebody removes it"
    NEVER = "is never started"
    LATE = "is started when its slot comes up again"
    BROKEN = "names a program that is not there"


class Slot(Struct):
    """A name in a pod. container: its present one, with what is to become of it. trace: its name."""

    pod: Pod
    name: str
    request: str
    attempt: int = 0
    container: ContainerId | None = None
    fate: Fate = Fate.NEVER
    created: float = 0.0
    trace: str = ""
    required: bool = False  # its pod requires nri-gpu


@contextmanager
def chaos_run(
    runtime: packages.Runtime,
    folder: Path,
    seed: int,
    mount: Callable[[Path], None] = lambda base: None,
    *,
    required: bool = False,
) -> Iterator["ChaosRun"]:
    """A containerd with a daemon and a guard that serve it.

    mount: called with the daemon's base before there is a containerd, which sees no mounts that are made later.
    required: the runtime's own validator is on, and pods that ask require nri-gpu.

    The older containerd is on cgroup v1 where the machine has it, the newer on v2.
    """
    traces, policy = folder / "traces", folder / "policy.toml"
    traces.mkdir(parents=True)
    policy.write_text("")
    mount(folder / "d")
    with ExitStack() as stack:
        node = Containerd(runtime, cgroup=host_cgroup() if runtime.number < (2, 0) else Cgroup.V2)
        # Not `with`: a containerd that was killed in the middle of a start leaves that container's cgroups behind.
        stack.callback(node.abandon)
        if required:
            node.layout.config.write_text(f"{node.layout.config.read_text()}{VALIDATOR}")
        root = make_driver_root(folder / "driver")
        topology = TOPOLOGIES / "pcie-8.toml"
        launch = Launch(folder / "d", node.nri_socket, topology=topology, driver_root=root, policy=policy)
        node.boot()
        daemon, guard = stack.enter_context(NriGpu(launch)), stack.enter_context(NriGuard(launch))
        daemon.wait_ready()
        guard.wait_ready()
        daemon.wait_logged("driver files staged")
        yield ChaosRun(node, daemon, guard, traces, seed, required=required)


class ChaosRun:
    """One containerd, one daemon, one guard. seed: of what is asked and of when who is killed."""

    def __init__(
        self, node: Containerd, daemon: NriGpu, guard: NriGuard, traces: Path, seed: int, *, required: bool = False
    ) -> None:
        self.node, self.daemon, self.guard, self.required = node, daemon, guard, required
        self.served_since, self.dead_s, self.served_s = time.monotonic(), 0.0, 0.0
        self.evidence = Evidence(node, daemon, traces)
        self.tally = self.evidence.tally
        self.dice = random.Random(seed)
        self.took_s: list[float] = []  # of each creation, refused ones too
        self._slots: SimpleQueue[Slot] = SimpleQueue()
        self._served = threading.Event()
        self._served.set()

    def create_while_killing(self, creates: int, *, restart: bool | None = None) -> None:
        """Create so many containers, killing the daemon all the while. restart: containerd too; True: by SIGKILL."""

        def disturb(done: float) -> None:
            nonlocal restart
            self.kill_daemon()
            if restart is not None and done > 1 / 3:
                self.restart_runtime(kill=restart)
                restart = None

        self.create_while(creates, disturb)

    def create_while(
        self, creates: int, disturb: Callable[[float], None], mend: Callable[[], None] = lambda: None
    ) -> None:
        """Create so many containers, and a few more when all is mended.

        disturb: called with the share of them that is done, again and again until all are.
        """
        self._fill()
        fates = self.dice.choices([*Fate], (5, 6, 1, 2, 1), k=creates)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            working = [pool.submit(self._one, fate) for fate in fates]
            # Here, because what a thread starts ends with that thread (PR_SET_PDEATHSIG).
            try:
                while not all(each.done() for each in working):
                    disturb(sum(each.done() for each in working) / creates)
            finally:  # after a fault of its own, what is not begun yet would wait for what never comes
                pool.shutdown(wait=False, cancel_futures=True)
        for each in working:
            each.result()
        mend()
        self.daemon.wait_staged()
        self._create([Fate.LONG] * AT_ONCE)  # so that there is always something to compare

    def create_unserved(self, creates: int) -> None:
        """Create so many that do not end by themselves, with whoever is there or not."""
        self._fill()
        fates = self.dice.choices([Fate.LONG, Fate.NEVER, Fate.BROKEN], (6, 2, 1), k=creates)
        self._create(fates)

    def _create(self, fates: Sequence[Fate]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._one, fates))

    def settle(self) -> None:
        """Nobody acts any more. Raises: HarnessError, AssertionError: see `Evidence.settle`."""
        self.daemon.wait_ready()
        self._remove_lost()
        self.evidence.settle()

    def end_pods(self) -> None:
        """Half of the pods go with all they have, the others' containers one by one."""
        for slot in self._all_slots():
            if slot.container and self.dice.random() < 0.5:
                self._remove(slot.container, slot.trace)
        for pod in [*self.evidence.pods.values()]:
            self.node.cri.remove_pod(pod.id)
            self.evidence.removed(pod)

    # One container.

    def _one(self, fate: Fate) -> None:
        self._served.wait()
        slot = self._slots.get(timeout=SETTLED_S)  # unless all are lost
        try:
            self._end_last(slot)
            self._begin(slot, fate)
        except CriError as error:
            # Nobody knows what came of it: its slot waits until it is looked for.
            self._unexpected(slot, error)
            return
        self._slots.put(slot)

    def _end_last(self, slot: Slot) -> None:
        if slot.container is None:
            return
        if slot.fate is Fate.LATE and time.monotonic() - slot.created < LATE_AT_MOST_S:
            self._start(slot, slot.container)
        self._remove(slot.container, slot.trace)
        slot.container = None

    def _remove(self, container: ContainerId, trace: str) -> None:
        wait_for("an end", lambda: self._stopped(container), SETTLED_S)
        self.evidence.ended(container, trace)
        wait_for("a removal", lambda: self._removed(container), SETTLED_S)
        self.tally.happened["removed"] += 1

    def _stopped(self, container: ContainerId) -> bool:
        try:
            self.node.cri.stop(container)
        except CriError as error:
            # It ended by itself at that moment, and its shim with it: a kubelet tries again.
            if "ttrpc: closed" not in error.details:
                raise
            return False
        return True

    def _removed(self, container: ContainerId) -> bool:
        try:
            self.node.cri.remove(container)
        except CriError as error:
            # Its end is known to the shim and not yet to the runtime: a kubelet tries again as well.
            if "container is still running" not in error.details:
                raise
            return False
        return True

    def _begin(self, slot: Slot, fate: Fate) -> None:
        slot.attempt += 1
        slot.fate, slot.created = fate, time.monotonic()
        spec, connected, began = self._spec(slot), self._connected(), time.perf_counter()
        try:
            slot.container = self.node.cri.create(slot.pod, spec)
        except CriError as error:
            if slot.required and NOT_CONNECTED in error.details:
                self.tally.happened["create refused, required and not connected"] += 1
                return
            self._refused("create", error)
            return
        finally:
            self.took_s.append(time.perf_counter() - began)
        self.tally.happened["created"] += 1
        if REQUESTS[slot.request] != 0 and not self.evidence.signed(slot.container):
            self.tally.happened[WINDOW if connected else UNSERVED] += 1
            if connected:
                self.evidence.window.add(slot.trace)
        if fate not in (Fate.NEVER, Fate.LATE):
            self._start(slot, slot.container)

    def _connected(self) -> bool:
        """Whether the daemon lives and has registered."""
        return self.daemon.ended() is None and bool(self.daemon.logged("registered"))

    def _start(self, slot: Slot, container: ContainerId) -> None:
        try:
            self.node.cri.start(container)
        except CriError as error:
            if slot.fate is Fate.BROKEN and not OUR_CODE.search(error.details) and "no such file" in error.details:
                self.tally.happened["start failed"] += 1
                return
            self._refused("start", error)
            return
        self.tally.happened["started"] += 1

    def _refused(self, what: str, error: CriError) -> None:
        if code := OUR_CODE.search(error.details):
            self.tally.happened[f"{what} refused [{code[1]}]"] += 1
        elif VALIDATOR_DIED.search(error.details):
            self.tally.happened[f"{what} failed, its validator was killed"] += 1
        else:
            raise error

    def _unexpected(self, slot: Slot, error: CriError) -> None:
        if self._served.is_set() and not self._just_away():
            self.tally.unexpected.append(f"{slot.name} {slot.fate}: {error}")
        self.tally.happened["lost with the runtime"] += 1

    def _just_away(self) -> bool:
        return bool(self.tally.away) and time.time() - self.tally.away[-1][1] < 5

    def _spec(self, slot: Slot) -> ContainerSpec:
        slot.trace = trace = self.evidence.asks(slot.pod, slot.name, slot.attempt, slot.request, REQUESTS[slot.request])
        lasts = {Fate.SHORT: self.dice.uniform(0, 0.5)}.get(slot.fate, 3600)
        script = f"echo /dev/nvidia[0-9]* > /traces/{trace}; exec sleep {lasts:.2f}"
        command = ("/no/such/program",) if slot.fate is Fate.BROKEN else ("/bin/sh", "-c", script)
        return ContainerSpec(
            slot.name, attempt=slot.attempt, command=command, mounts={"/traces": str(self.evidence.traces)}
        )

    def _fill(self) -> None:
        """New pods, and a slot for each name in them."""
        self._slots = SimpleQueue()
        for number in range(PODS):
            requests = self.dice.choices([*REQUESTS], (4, 1, 2, 1, 6, 3, 3, 3, 2, 3, 1, 1, 1), k=NAMES_OF_EACH)
            if self.required and number < PLAIN_PODS:
                requests = [""] * NAMES_OF_EACH
            for slot in self._pod(number, requests):
                self._slots.put(slot)

    def _pod(self, number: int, requests: Sequence[str]) -> list[Slot]:
        """A new pod, and a slot for each request."""
        names = {f"c{n}": request for n, request in enumerate(requests)}
        asked = {f"gpu.nri.io/container.{name}": request for name, request in names.items() if request}
        required = self.required and any(request not in ("", "none") for request in requests)
        annotations = asked | (REQUIRES if required else {})
        pod = self.node.cri.run_pod(PodSpec(f"p{self.dice.getrandbits(40):x}-{number}", annotations=annotations))
        self.evidence.pods[pod.id] = pod
        return [Slot(pod, name, request, required=required) for name, request in names.items()]

    def _all_slots(self) -> Sequence[Slot]:
        slots = []
        while not self._slots.empty():
            slots.append(self._slots.get())
        return slots

    # Those who serve them.

    def kill_daemon(self) -> None:
        time.sleep(self.dice.uniform(*KILL_EVERY_S))
        self.daemon.kill()
        self.tally.happened["daemon killed"] += 1
        time.sleep(self.dice.uniform(*AWAY_S))
        self.daemon.start()

    def starve(self) -> None:
        """Let both serve for a while, kill them, and leave them dead for as long as they served."""
        time.sleep(self.dice.uniform(*KILL_EVERY_S))
        served_s, dead_since = time.monotonic() - self.served_since, time.monotonic()
        for each in self.dice.sample((self.daemon, self.guard), 2):
            each.kill()
        time.sleep(served_s)
        for each in self.dice.sample((self.daemon, self.guard), 2):
            each.start()
        self._wait_served()
        self.tally.happened["daemon and guard dead for half of the time"] += 1
        self.served_s += served_s
        self.dead_s += self.served_since - dead_since

    def _wait_served(self) -> None:
        self.daemon.wait_ready()
        self.guard.wait_ready()
        self.served_since = time.monotonic()

    def aim(self, times: int) -> None:
        """Kill the daemon so often in the middle of a marked creation while nobody else acts.

        In half of them before it has read that request, else at any moment of the creation. In half of either the guard
        is dead, so that nobody looks at the start.
        """
        for number in range(times):
            self._kill_within(alone=number % 2 == 0, unread=number % 4 < 2)

    def _kill_within(self, *, alone: bool, unread: bool) -> None:
        [slot] = self._pod(PODS, ["count=1; mode=shared"])
        if alone:
            self.guard.kill()
        with ThreadPoolExecutor(1) as aside:
            if unread:
                os.kill(self.daemon.pid, signal.SIGSTOP)
            creating = aside.submit(self._begin, slot, Fate.LONG)
            if unread:
                wait_for("the marked request", lambda: unread_bytes(self.daemon.pid) > 0, SETTLED_S)
            else:
                time.sleep(self.dice.uniform(0, statistics.median(self.took_s)))
            self.daemon.kill()
            creating.result()
        self.tally.happened[f"{AIMED}, {self._became(slot)}"] += 1
        for each in (self.guard, self.daemon) if alone else (self.daemon,):
            each.start()
        self._wait_served()
        self._slots.put(slot)

    def _became(self, slot: Slot) -> str:
        if slot.container is None:
            return "refused"
        return "granted" if self.evidence.signed(slot.container) else "without a grant"

    def restart_runtime(self, *, kill: bool) -> None:
        with self.guard_away():
            self._served.clear()
            try:
                self.node.restart(kill=kill)
            finally:
                self._served.set()
        self.tally.happened["containerd killed" if kill else "containerd restarted"] += 1

    @contextmanager
    def guard_away(self) -> Iterator[None]:
        """Until the guard guards again, which what is done here ends."""
        begun, sessions = time.time(), self.guard.log().count("guarding")
        yield
        wait_for("the guard", lambda: self.guard.log().count("guarding") > sessions, SETTLED_S, self.guard.log)
        self.tally.away.append((begun, time.time()))

    # What came of it.

    def _remove_lost(self) -> None:
        slots = self._all_slots()
        kept = {slot.container for slot in slots}
        for each in self.node.cri.containers():
            if each.id not in kept:
                pod = self.evidence.pods[PodId(each.pod_sandbox_id)]
                self._remove(ContainerId(each.id), trace_of(pod, each.metadata.name, each.metadata.attempt))
        for slot in slots:
            self._slots.put(slot)

    def check_nothing_is_left(self) -> None:
        """No container is there any more, so no grant is, once the grace of those never created is over."""
        policy = self.daemon.launch.policy
        assert policy
        policy.write_text("[ledger]\ncreated_grace_s = 5\n")
        self.daemon.hang_up()
        self.daemon.wait_logged("policy reloaded")
        pod = self.node.cri.run_pod(PodSpec("last", annotations={"gpu.nri.io": "all"}))

        def had() -> bool:
            try:
                self.node.cri.create(pod)
            except CriError as error:
                assert "[gpu-busy]" in error.details
                return False
            return True

        wait_for("all GPUs to be free", had, SETTLED_S, lambda: str(self.daemon.ledger()))
        self.node.cri.remove_pod(pod.id)
