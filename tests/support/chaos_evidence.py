"""What came of containers: what runtime, kernel, ledger and the programs themselves say of who had which GPU.

A program writes down the GPUs that it found, which is its trace. From when it did so to when the runtime saw it end, it
had them: that nobody else had one of them meanwhile is checked over a whole run.
"""

import time
from collections import Counter
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId as GrantedId
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.ledger.grant_text import SignedGrant, verify_grant
from tests.support._pb import cri_tests_pb2 as pb
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod, PodId
from tests.support.daemon import NriGpu
from tests.support.device_filter import open_minors
from tests.support.errors import HarnessError
from tests.support.waiting import wait_for

NVIDIA: Final = 195
NONE_FOUND: Final = "/dev/nvidia[0-9]*"  # a shell's pattern that fits nothing stays as it is
SETTLED_S: Final = 30.0
UNTOLD_S: Final = 5.0  # until an event that has not come will not come


class Tally(Struct):
    """What came of it all. away: seconds (wall) in which containerd had gone and the guard was not back."""

    happened: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    away: list[tuple[float, float]] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{what}: {often}" for what, often in sorted((self.happened + self.checked).items()))


class Asked(Struct, frozen=True):
    """What a trace's container asked for. gpus: how many, None where no container may come of it."""

    pod: PodId
    gpus: int | None
    shared: bool


class Had(Struct, frozen=True):
    """A program had a GPU. begun, ended: seconds since the epoch."""

    trace: str
    asked: Asked
    begun: float
    ended: float

    def excludes(self, other: "Had") -> bool:
        """Whether they must not have it at once and did."""
        apart = self.ended <= other.begun or other.ended <= self.begun
        return not apart and self.asked.pod != other.asked.pod and not (self.asked.shared and other.asked.shared)


class Evidence:
    """Of one containerd and one daemon. pods: those that are there. traces: the folder that programs write to."""

    def __init__(self, node: Containerd, daemon: NriGpu, traces: Path) -> None:
        self.node, self.daemon, self.traces = node, daemon, traces
        self.tally = Tally()
        self.uuids = {gpu["minor_number"]: gpu["uuid"] for gpu in daemon.gpus()["gpus"]}
        self.pods: dict[PodId, Pod] = {}
        self.asked: dict[str, Asked] = {}  # by trace
        self._ended: dict[str, float] = {}  # by trace: seconds since the epoch
        self._had: dict[int, list[Had]] = {}  # by minor number
        self._untold: set[str] = set()  # containers whose end no event told
        self.window: set[str] = set()  # traces of those created without a grant by a daemon that died meanwhile

    # While it goes on.

    def asks(self, pod: Pod, name: str, attempt: int, request: str, gpus: int | None) -> str:
        """A container is about to be created; the name of its trace."""
        trace = trace_of(pod, name, attempt)
        self.asked[trace] = Asked(pod.id, gpus, "mode=shared" in request)
        return trace

    def ended(self, container: ContainerId, trace: str) -> None:
        """A container has been stopped, and is about to be removed."""
        with suppress(CriError):  # the runtime lost it, so it ended before now
            self._ended[trace] = self.node.cri.status(container).finished_at or time.time()

    def removed(self, pod: Pod) -> None:
        """A pod is gone, with all its containers."""
        del self.pods[pod.id]
        for trace, asked in self.asked.items():
            if asked.pod == pod.id:
                self._ended.setdefault(trace, time.time())

    # When nobody acts any more.

    def settle(self) -> None:
        """Raises: HarnessError, AssertionError: the ledger is not what the kernel allows, or somebody has too much."""
        if self.node.runtime.number < (2, 0):
            with suppress(HarnessError):
                wait_for("ledger and kernel to agree", self._agree, UNTOLD_S)
            self._pass_over_untold_ends()
        wait_for("ledger and kernel to agree", self._agree, SETTLED_S, self._explain)
        self._check_grants()
        self.tally.checked["times that ledger and kernel agreed"] += 1
        self.check_traces()

    def verify(self) -> None:
        """Raises: AssertionError: `nri-gpu verify` finds a container that can open what it was not granted, or less."""
        said = self.daemon.verb("verify", "--containerd-state", str(self.node.base / "state"))
        assert said.returncode == 0, f"nri-gpu verify: {said.returncode}: {said.stdout}{said.stderr}"
        self.tally.checked["times that nri-gpu verify found nothing"] += 1

    def signed(self, container: ContainerId) -> bool:
        """Whether a container was created with a grant of ours."""
        return GRANT_KEY in self.node.cri.status(container).oci.get("annotations", {})

    def kernel(self) -> dict[str, frozenset[str]]:
        """Container -> GPUs that its processes may open, of all that have processes, whoever knows of them."""
        found: dict[str, frozenset[str]] = {}
        for cgroup in self.node.container_cgroup(ContainerId("any")).parent.iterdir():
            try:
                if cgroup.name in self.pods or not cgroup.is_dir() or not (cgroup / "cgroup.procs").read_text():
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
        listed = {each.id: each for each in self.node.cri.containers()}
        traces = {
            name: trace_of(self.pods[PodId(one.pod_sandbox_id)], one.metadata.name, one.metadata.attempt)
            for name, one in listed.items()
        }
        asking = {name for name, trace in traces.items() if self.asked[trace].gpus != 0}
        alive = self.kernel()
        return {name for name in asking if name in alive and not alive[name]}, {
            name for name in asking if listed[name].state == pb.CONTAINER_CREATED
        }

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
            pod = self.pods[PodId(annotations["io.kubernetes.cri.sandbox-id"])]
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
        """What ran found what its request means, the guard being there; and nobody else had it meanwhile."""
        for trace in self.traces.iterdir():
            if not (text := trace.read_text()):  # its program has opened it, and not written yet
                continue
            nodes = [node for node in text.split() if node != NONE_FOUND]
            wanted, when = self.asked[trace.name], trace.stat().st_mtime
            self.tally.checked["programs that ran"] += 1
            self.tally.checked["programs that ran with a GPU"] += bool(nodes)
            if len(nodes) != wanted.gpus and any(begun <= when <= end for begun, end in self.tally.away):
                self.tally.checked["programs that ran without while the guard was away"] += 1
            elif not nodes and trace.name in self.window:
                self.tally.checked["programs that ran without, created while the daemon died"] += 1
            elif len(nodes) != wanted.gpus:
                raise AssertionError(f"{trace.name} asked for {wanted.gpus} GPUs and found {text!r}")
            for node in nodes:
                had = Had(trace.name, wanted, when, float("inf"))
                self._had.setdefault(int(node.removeprefix("/dev/nvidia")), []).append(had)
            trace.unlink()
        self._check_times()

    def _check_times(self) -> None:
        """Nobody had a GPU while another held it exclusively. Raises: AssertionError."""
        for each in self.node.cri.containers():
            if each.state == pb.CONTAINER_EXITED:
                pod = self.pods[PodId(each.pod_sandbox_id)]
                self.ended(ContainerId(each.id), trace_of(pod, each.metadata.name, each.metadata.attempt))
        for minor, had in self._had.items():
            known = [replace(each, ended=self._ended.get(each.trace, each.ended)) for each in had]
            known.sort(key=lambda each: each.begun)
            for number, one in enumerate(known):
                for other in takewhile(lambda each: each.begun < one.ended, known[number + 1 :]):  # noqa: B023 - at once
                    assert not one.excludes(other), f"GPU {minor} was given twice: {one} and {other}"


def trace_of(pod: Pod, name: str, attempt: int) -> str:
    """The name of a container's trace."""
    return f"{pod.config.metadata.name}.{name}.{attempt}"
