"""Containers by the hundred, eight at a time, while those who serve them are killed: what comes of it is counted.

A slot is a container's name in a pod, with the request that the pod's annotation makes for it; as with a kubelet, it
holds one container at a time, and each next one is another attempt. Every program writes down which GPUs it found, so
what ran is known from itself, and what may be opened is asked of the kernel (`tests/support/device_filter.py`).
"""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from msgspec import Struct, field

from nri_gpu.allocation.grant import SignedGrant, verify_grant
from nri_gpu.domain.container import ContainerId as GrantedId
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.names import GRANT_KEY
from tests.support._pb import cri_tests_pb2 as pb
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod, PodId
from tests.support.daemon import NriGpu
from tests.support.device_filter import open_minors
from tests.support.errors import HarnessError
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

AT_ONCE: Final = 8
PODS, NAMES_OF_EACH = 8, 3
NVIDIA: Final = 195
KILL_EVERY_S, AWAY_S = (0.5, 2.0), (0.0, 0.5)
LATE_AT_MOST_S: Final = 40.0  # a start within the ledger's grace
SETTLED_S: Final = 30.0
UNTOLD_S: Final = 5.0  # until an event that has not come will not come
OUR_CODE: Final = re.compile(r"nri-gpu \[([a-z-]+)\]")
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
    """A name in a pod. container: its present one, with what is to become of it."""

    pod: Pod
    name: str
    request: str
    attempt: int = 0
    container: ContainerId | None = None
    fate: Fate = Fate.NEVER
    created: float = 0.0


class Tally(Struct):
    """What came of it all. away: seconds (wall) in which containerd had gone and the guard was not back."""

    happened: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    away: list[tuple[float, float]] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{what}: {often}" for what, often in sorted((self.happened + self.checked).items()))


class ChaosRun:
    """One containerd, one daemon, one guard. seed: of what is asked and of when who is killed."""

    def __init__(self, node: Containerd, daemon: NriGpu, guard: NriGuard, traces: Path, seed: int) -> None:
        self.node, self.daemon, self.guard = node, daemon, guard
        self.tally = Tally()
        self.uuids = {gpu["minor_number"]: gpu["uuid"] for gpu in daemon.gpus()["gpus"]}
        self._traces = traces
        self._random = random.Random(seed)
        self._pods: dict[PodId, Pod] = {}
        self._slots: SimpleQueue[Slot] = SimpleQueue()
        self._wanted: dict[str, int | None] = {}  # trace -> GPUs that its request means
        self._untold: set[str] = set()  # containers whose end no event told
        self._served = threading.Event()
        self._served.set()

    def create_while_killing(self, creates: int, *, restart: bool | None = None) -> None:
        """Create so many containers, killing the daemon all the while. restart: containerd too; True: by SIGKILL."""
        self._fill()
        fates = self._random.choices([*Fate], (5, 6, 1, 2, 1), k=creates)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            working = [pool.submit(self._one, fate) for fate in fates]
            while not all(each.done() for each in working):
                # Here, because what a thread starts ends with that thread (PR_SET_PDEATHSIG).
                self._kill_daemon()
                if restart is not None and sum(each.done() for each in working) > creates // 3:
                    self._restart_runtime(kill=restart)
                    restart = None
        for each in working:
            each.result()
        self.daemon.wait_staged()
        self._create([Fate.LONG] * AT_ONCE)  # so that there is always something to compare

    def create_unserved(self, creates: int) -> None:
        """Create so many that do not end by themselves, with whoever is there or not."""
        self._fill()
        fates = self._random.choices([Fate.LONG, Fate.NEVER, Fate.BROKEN], (6, 2, 1), k=creates)
        self._create(fates)

    def _create(self, fates: Sequence[Fate]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._one, fates))

    def settle(self) -> None:
        """Nobody acts any more. Raises: HarnessError, AssertionError: the ledger is not what the kernel allows."""
        self.daemon.wait_ready()
        self._remove_lost()
        if self.node.runtime.number < (2, 0):
            with suppress(HarnessError):
                wait_for("ledger and kernel to agree", self._agree, UNTOLD_S)
            self._pass_over_untold_ends()
        wait_for("ledger and kernel to agree", self._agree, SETTLED_S, self._explain)
        self._check_grants()
        self.tally.checked["times that ledger and kernel agreed"] += 1
        self.check_traces()

    def end_pods(self) -> None:
        """Half of the pods go with all they have, the others' containers one by one."""
        for slot in self._all_slots():
            if slot.container and self._random.random() < 0.5:
                self._remove(slot.container)
        for pod in self._pods:
            self.node.cri.remove_pod(pod)
        self._pods.clear()

    # One container.

    def _one(self, fate: Fate) -> None:
        self._served.wait()
        slot = self._slots.get()
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
        self._remove(slot.container)
        slot.container = None

    def _remove(self, container: ContainerId) -> None:
        wait_for("an end", lambda: self._stopped(container), SETTLED_S)
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
        try:
            slot.container = self.node.cri.create(slot.pod, self._spec(slot))
        except CriError as error:
            self._refused("create", error)
            return
        self.tally.happened["created"] += 1
        if fate not in (Fate.NEVER, Fate.LATE):
            self._start(slot, slot.container)

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
        code = OUR_CODE.search(error.details)
        if code is None:
            raise error
        self.tally.happened[f"{what} refused [{code[1]}]"] += 1

    def _unexpected(self, slot: Slot, error: CriError) -> None:
        if self._served.is_set() and not self._just_away():
            self.tally.unexpected.append(f"{slot.name} {slot.fate}: {error}")
        self.tally.happened["lost with the runtime"] += 1

    def _just_away(self) -> bool:
        return bool(self.tally.away) and time.time() - self.tally.away[-1][1] < 5

    def _spec(self, slot: Slot) -> ContainerSpec:
        trace = f"{slot.pod.config.metadata.name}.{slot.name}.{slot.attempt}"
        self._wanted[trace] = REQUESTS[slot.request]
        lasts = {Fate.SHORT: self._random.uniform(0, 0.5)}.get(slot.fate, 3600)
        script = f"echo /dev/nvidia[0-9]* > /traces/{trace}; exec sleep {lasts:.2f}"
        command = ("/no/such/program",) if slot.fate is Fate.BROKEN else ("/bin/sh", "-c", script)
        return ContainerSpec(slot.name, attempt=slot.attempt, command=command, mounts={"/traces": str(self._traces)})

    def _fill(self) -> None:
        """New pods, and a slot for each name in them."""
        self._slots = SimpleQueue()
        for number in range(PODS):
            requests = self._random.choices([*REQUESTS], (4, 1, 2, 1, 6, 3, 3, 3, 2, 3, 1, 1, 1), k=NAMES_OF_EACH)
            names = {f"c{n}": request for n, request in enumerate(requests)}
            asked = {f"gpu.nri.io/container.{name}": request for name, request in names.items() if request}
            pod = self.node.cri.run_pod(PodSpec(f"p{self._random.getrandbits(40):x}-{number}", annotations=asked))
            self._pods[pod.id] = pod
            for name, request in names.items():
                self._slots.put(Slot(pod, name, request))

    def _all_slots(self) -> Sequence[Slot]:
        slots = []
        while not self._slots.empty():
            slots.append(self._slots.get())
        return slots

    # Those who serve them.

    def _kill_daemon(self) -> None:
        time.sleep(self._random.uniform(*KILL_EVERY_S))
        self.daemon.kill()
        self.tally.happened["daemon killed"] += 1
        time.sleep(self._random.uniform(*AWAY_S))
        self.daemon.start()

    def _restart_runtime(self, *, kill: bool) -> None:
        with self.guard_away():
            self._served.clear()
            self.node.restart(kill=kill)
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
                self._remove(ContainerId(each.id))
        for slot in slots:
            self._slots.put(slot)

    def kernel(self) -> dict[str, frozenset[str]]:
        """Container -> GPUs that its processes may open, of all that have processes, whoever knows of them."""
        found: dict[str, frozenset[str]] = {}
        for cgroup in self.node.container_cgroup(ContainerId("any")).parent.iterdir():
            try:
                if cgroup.name in self._pods or not cgroup.is_dir() or not (cgroup / "cgroup.procs").read_text():
                    continue
                minors = open_minors(self.node.cgroup, cgroup, NVIDIA, self.uuids)
            except OSError:  # it ended just now
                continue
            found[cgroup.name] = frozenset(self.uuids[minor] for minor in minors)
        return found

    def ledger(self) -> dict[str, frozenset[str]]:
        """Container -> GPUs, of those that run and hold any."""
        grants = (grant for grant in self.daemon.ledger()["grants"] if grant["phase"] == "running")
        return {grant["container_id"]: frozenset(grant["gpu_uuids"]) for grant in grants if grant["gpu_uuids"]}

    def ungranted(self) -> tuple[set[str], set[str]]:
        """Containers that asked and hold no GPU: those that run, as their programs said, and those only created."""
        named = {each.id: each.metadata for each in self.node.cri.containers()}
        pods = {each.id: each.pod_sandbox_id for each in self.node.cri.containers()}
        traces = {
            name: f"{self._pods[PodId(pods[name])].config.metadata.name}.{one.name}.{one.attempt}"
            for name, one in named.items()
        }
        asking = {name for name, trace in traces.items() if self._wanted[trace] != 0}
        alive = self.kernel()
        return {name for name in asking if name in alive and not alive[name]}, {
            each.id for each in self.node.cri.containers() if each.id in asking and each.state == pb.CONTAINER_CREATED
        }

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

    def _agree(self) -> bool:
        ledger = {name: gpus for name, gpus in self.ledger().items() if name not in self._untold}
        return ledger == {name: gpus for name, gpus in self.kernel().items() if gpus}

    def _pass_over_untold_ends(self) -> None:
        """NRI 0.6 tells nobody of what ends between its list and the plugin's admission (docs/guard.md).

        Such a container keeps its GPUs until it is removed, or its pod is: too long, and never twice.
        """
        ended = {each.id for each in self.node.cri.containers() if each.state == pb.CONTAINER_EXITED}
        self._untold |= (self.ledger().keys() - self.kernel().keys()) & ended
        self.tally.checked["ends that the runtime told nobody"] = len(self._untold)

    def _explain(self) -> str:
        kernel, ledger = {name: gpus for name, gpus in self.kernel().items() if gpus}, self.ledger()
        odd = {name for name in {*kernel, *ledger} if kernel.get(name) != ledger.get(name)}
        states = {each.id: (each.metadata.name, each.state) for each in self.node.cri.containers()}
        rows = [f"{name} {states.get(name)}: kernel {kernel.get(name)}, ledger {ledger.get(name)}" for name in odd]
        lines = [line for line in self.daemon.log().splitlines() if any(name in line for name in odd)]
        return "\n".join([*rows, *lines])

    def _check_grants(self) -> None:
        """Whoever may open a GPU holds a grant signed with the key file, and no other grant excludes it."""
        key = (self.daemon.launch.state / "key").read_bytes()
        users: dict[str, list[tuple[str, str]]] = {}
        for name, gpus in self.kernel().items():
            if not gpus:
                continue
            annotations = self.node.cri.status(ContainerId(name)).oci["annotations"]
            pod = self._pods[PodId(annotations["io.kubernetes.cri.sandbox-id"])]
            signed = verify_grant(annotations[GRANT_KEY], PodUid(pod.config.metadata.uid), GrantedId(name), key)
            assert isinstance(signed, SignedGrant), f"{name} has {gpus} by nobody's grant"
            assert frozenset(signed.uuids) == gpus
            self.tally.checked["containers whose device cgroup is their grant"] += 1
            for gpu in gpus:
                users.setdefault(gpu, []).append((str(signed.mode), pod.id))
        for gpu, several in users.items():
            modes, pods = {mode for mode, _ in several}, {pod for _, pod in several}
            assert modes == {"shared"} or (modes == {"exclusive"} and len(pods) == 1), f"{gpu}: {several}"

    def check_traces(self) -> None:
        """What ran found what its request means, the guard being there."""
        for trace in self._traces.iterdir():
            wanted, nodes = self._wanted[trace.name], trace.read_text().split()
            found = 0 if nodes == ["/dev/nvidia[0-9]*"] else len(nodes)
            when = trace.stat().st_mtime
            self.tally.checked["programs that ran"] += 1
            self.tally.checked["programs that ran with a GPU"] += bool(found)
            if found != wanted and any(begun <= when <= end for begun, end in self.tally.away):
                self.tally.checked["programs that ran without while the guard was away"] += 1
            elif found != wanted:
                raise AssertionError(f"{trace.name} asked for {wanted} GPUs and ran with {found}")
            trace.unlink()
