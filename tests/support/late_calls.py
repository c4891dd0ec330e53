"""A node on which stops are slow and calls are late while daemon and guard register: what comes of it is counted.

containerd synchronizes a plugin only between calls, so a registration waits for a StopContainer, and every later call
waits behind the registration (containerd#14083). A caller's deadline may be over by then: NRI takes it for the
plugin's, and closes daemon and guard. What else waited goes on unasked.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Final, TypeVar

from msgspec import Struct, field, structs

from tests.support.chaos import OUR_CODE, VALIDATOR_DIED
from tests.support.chaos_evidence import NONE_FOUND
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod, PodId
from tests.support.daemon import NriGpu
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

T = TypeVar("T")

GRACE_S: Final = 5  # of a slow pod
SLOW: Final = 3  # pods that are stopped in a round, one after the other
APART_S: Final = 3.0  # between two such stops
LATE_S: Final = 3.0  # the deadline of a late call: over before the stop is, and behind the start of its task
LATE: Final = 8
CLAIMS: Final = tuple(f"device={number}" for number in range(4))
TAKEN: Final = "device=7"
BACK_S: Final = 60.0
REPORTED: Final = "container runs without the GPUs it asked for"
BESIDE: Final = "container runs on GPUs that another pod holds"
ENDED: Final = "connection ended, reconnecting"
LEFT_TASK: Final = re.compile(r"cannot delete running task (\w+)")
PROBE_EVERY_S: Final = 0.1
IGNORES_TERM: Final = ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done")


class Allocated(Struct, frozen=True):
    """What the kubelet gives a container for a GPU that it allocated."""

    annotations: Mapping[str, str]
    cdi_devices: Sequence[str]


class LateTally(Struct):
    """What came of it. operations: CRI calls. blocked_s: of each round, the longest time to run a pod."""

    operations: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    blocked_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)  # for which each ran beside its GPU's holder
    without_s: list[float] = field(default_factory=list)  # for which each ran without the GPU that it asked for

    def __str__(self) -> str:
        rows = ", ".join(f"{what}: {often}" for what, often in sorted(self.happened.items()))
        longest = {
            "to run a pod": self.blocked_s,
            "beside a holder": self.beside_s,
            "without the GPU asked for": self.without_s,
        }
        times = ", ".join(f"{what} {max(each, default=0):.1f} s" for what, each in longest.items())
        return f"{self.operations} calls, {rows}; at most: {times}"


class LateCalls:
    """One containerd, daemon and guard.

    allocated: of a GPU that the kubelet allocated, or None. by_request: whether pods ask for GPUs, too.
    """

    def __init__(
        self,
        node: Containerd,
        daemon: NriGpu,
        guard: NriGuard,
        traces: Path,
        allocated: Allocated | None,
        *,
        by_request: bool = True,
    ) -> None:
        self.node, self.daemon, self.guard, self.traces = node, daemon, guard, traces
        self.tally = LateTally()
        self._allocated = [allocated] if allocated else []
        self._claims = CLAIMS if by_request else ()
        self._taken = [TAKEN] if by_request else []
        self._traces: dict[ContainerId, str] = {}
        self._required: set[ContainerId] = set()  # that the kubelet gave a GPU
        self._number = 0

    def round(self) -> None:
        """Let slow stops, a registration and late calls meet once. Raises: AssertionError: somebody has too much."""
        early = [self._create(claim) for claim in self._taken]
        slow = [self.node.cri.run(self._pod(""), ContainerSpec(command=IGNORES_TERM)) for _ in range(SLOW)]
        holders = [self._run_when_free(claim) for claim in self._taken]
        self.daemon.kill()
        self.guard.kill()
        stale = [self._create(claim) for claim in self._claims]
        stale += [self._create("", each) for each in self._allocated]
        pod = self._pod("")
        late = [self._create_in(pod, ContainerSpec(f"late{number}")) for number in range(LATE)]
        for process in (self.guard, self.daemon):
            process.start()
            process.wait_ready()
        before = self._thrown_out()
        with ThreadPoolExecutor(64) as pool, self._measured(pool):
            stops = [pool.submit(self._stop_slowly, each, number * APART_S) for number, each in enumerate(slow)]
            wait_for("a slow stop", lambda: f'Stop container \\"{slow[0]}' in self.node.log_path.read_text(), BACK_S)
            self.daemon.kill()
            self.daemon.start()
            self.daemon.wait_logged("registered")
            calls = [pool.submit(self._start, each, LATE_S) for each in late]
            calls += [pool.submit(self._start, each) for each in (*stale, *early)]
            calls += [pool.submit(self._run, claim) for claim in self._claims]
            calls += [pool.submit(self._run, "", each) for each in self._allocated]
            for call in (*stops, *calls):
                call.result()
            wait_for("daemon and guard", self._both_serve, BACK_S, lambda: self.daemon.log()[-3000:])
        for what, ended, earlier in zip(("daemon", "guard"), self._thrown_out(), before, strict=True):
            self.tally.happened[f"{what} thrown out"] += ended - earlier
        self._check(early, holders)
        for pod_id in [PodId(each.id) for each in self.node.cri.pods()]:
            wait_for("the pod's removal", lambda: self._removed(pod_id), BACK_S)  # noqa: B023 - at once

    # Calls.

    def _call(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        self.tally.operations += 1
        answer = call(*arguments)
        self.tally.happened[what] += 1
        return answer

    def _pod(self, claim: str) -> Pod:
        self._number += 1
        return self._call("pod run", self.node.cri.asking, claim, f"p{self._number}")

    def _spec(self, pod: Pod, allocated: Allocated | None = None) -> ContainerSpec:
        """A program that writes the GPUs that it found to a trace of its pod's name."""
        command = ("/bin/sh", "-c", f"echo {NONE_FOUND} > /traces/{pod.config.metadata.name}; exec sleep 3600")
        given = {} if allocated is None else structs.asdict(allocated)
        return ContainerSpec(command=command, mounts={"/traces": str(self.traces)}, **given)

    def _create_in(self, pod: Pod, spec: ContainerSpec) -> ContainerId:
        return self._call("created", self.node.cri.create, pod, spec)

    def _create(self, claim: str, allocated: Allocated | None = None) -> ContainerId:
        pod = self._pod(claim)
        container = self._traced(pod, self._create_in(pod, self._spec(pod, allocated)))
        if allocated:
            self._required.add(container)
        return container

    def _run_when_free(self, claim: str) -> ContainerId:
        pod = self._pod(claim)
        return self._traced(
            pod, self._call("started", self.node.cri.run_persistently, pod, self._spec(pod), "gpu-busy")
        )

    def _traced(self, pod: Pod, container: ContainerId) -> ContainerId:
        self._traces[container] = pod.config.metadata.name
        return container

    def _removed(self, pod_id: PodId) -> bool:
        try:
            self._call("pod removed", self.node.cri.remove_pod, pod_id)
        except CriError as error:
            # A late start leaves a task that was never started, which the runtime does not end by itself.
            if not (left := LEFT_TASK.search(error.details)):
                raise
            self.node.ctr("tasks", "delete", "--force", left[1])
            self.tally.happened["task left by a late start"] += 1
            return False
        return True

    def _start(self, container: ContainerId, deadline_s: float | None = None) -> None:
        try:
            self._call("started", self.node.cri.start, container, deadline_s)
        except CriError as error:
            self.tally.happened[_refusal("start", error)] += 1

    def _run(self, claim: str, allocated: Allocated | None = None) -> None:
        try:
            self._start(self._create(claim, allocated))
        except CriError as error:
            self.tally.happened[_refusal("create", error)] += 1

    def _stop_slowly(self, container: ContainerId, after_s: float) -> None:
        time.sleep(after_s)
        self._call("slow stop", self.node.cri.stop, container, GRACE_S)

    @contextmanager
    def _measured(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """Run pods that ask for nothing, one after the other; the longest time that one took is kept."""
        over, took_s = Event(), [0.0]

        def run() -> None:
            while not over.wait(PROBE_EVERY_S):
                began = time.monotonic()
                pod = self.node.cri.run_pod(PodSpec("probe"))
                self.node.cri.run_persistently(pod, ContainerSpec(), VALIDATOR_DIED.pattern)
                took_s.append(time.monotonic() - began)

        running = pool.submit(run)
        try:
            yield
        finally:
            over.set()
        running.result()
        self.tally.operations += 3 * len(took_s)
        self.tally.blocked_s.append(max(took_s))

    # What came of it.

    def _thrown_out(self) -> tuple[int, int]:
        return self.daemon.log().count(ENDED), self.guard.log().count(ENDED)

    def _both_serve(self) -> bool:
        return bool(self.daemon.status()["runtime"]["ready"] and self.guard.seen()["connected"])

    def _check(self, early: Sequence[ContainerId], holders: Sequence[ContainerId]) -> None:
        """All that ran have a GPU of their own, or are reported and ended. Raises: AssertionError, HarnessError."""
        nodes: Counter[str] = Counter()
        for container, trace in self._traces.items():
            if not (written := self.traces / trace).exists():
                continue
            node = written.read_text().strip()
            if node != NONE_FOUND and container not in early:
                nodes[node] += 1
                self.tally.happened["GPU of the kubelet's found"] += container in self._required
                continue
            assert container not in self._required, "it ran without our reply"
            self._wait_ended(container)
            said = REPORTED if node == NONE_FOUND else BESIDE
            assert any(said in line and container in line for line in self._lines()), f"{said}: {container}"
            self.tally.happened[said] += 1
            ran_s = self.node.cri.status(container).finished_at - written.stat().st_mtime
            (self.tally.without_s if node == NONE_FOUND else self.tally.beside_s).append(ran_s)
        assert max(nodes.values(), default=0) <= 1, f"a GPU was given twice: {nodes}"
        assert all(self.node.cri.status(each).state == "RUNNING" for each in holders)
        self._traces.clear()

    def _wait_ended(self, container: ContainerId) -> None:
        def ended() -> bool:
            return self.node.cri.status(container).state == "EXITED"

        wait_for(f"the end of {container}", ended, BACK_S, lambda: "\n".join(self._lines()))

    def _lines(self) -> list[str]:
        return [*self.daemon.log().splitlines(), *self.guard.log().splitlines()]


def _refusal(what: str, error: CriError) -> str:
    if code := OUR_CODE.search(error.details):
        return f"{what} refused [{code[1]}]"
    if "nri-gpu-is-not-running" in error.details:
        return f"{what} failed, required mount"
    return f"{what} failed: {error.code}"
