"""No interleaving of the kubelet, of annotations, of health and of restarts runs two pods on one exclusive GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.kubelet.books import AllocationError
from tests.support.builders import container, gpu, uuid
from tests.unit.kubelet.station import GPU, Halves, again, from_kubelet

GPUS = 3
INDEX = st.integers(0, GPUS - 1)


class OneLedger(RuleBasedStateMachine):
    """`alive`: what the runtime has, and whether it runs. `handed`: what the kubelet keeps for its pods."""

    pods = Bundle("pods")
    made = Bundle("made")

    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()
        self.halves.put_gpus([gpu(index) for index in range(GPUS)])
        self.alive: dict[ContainerId, tuple[Container, bool]] = {}
        self.grants: dict[ContainerId, tuple[GpuUuid, ...]] = {}
        self.handed: dict[str, tuple[frozenset[str], Mapping[str, str]]] = {}
        self.number = 0

    @rule(target=pods, number=st.integers(1, GPUS), data=st.data())
    def admit(self, number: int, data: Any) -> str:  # noqa: ANN401 - hypothesis'
        """The kubelet takes of what it thinks is free, which may be old news."""
        used = {id_ for ids, _ in self.handed.values() for id_ in ids}
        free = [uuid(index) for index in range(GPUS) if uuid(index) not in used]
        self.number += 1
        name = f"pod-{self.number}"
        if len(free) >= number:
            ids = data.draw(st.permutations(free))[:number]
            healthy = {device.id for device in self.halves.offers.devices(GPU) if not device.why}
            try:
                (annotations,) = self.halves.offers.allocate(GPU, [ids])
            except AllocationError:
                assert not set(ids) <= healthy
            else:
                assert set(ids) <= healthy
                self.handed[name] = (frozenset(ids), annotations)
        return name

    @rule(target=made, pod=pods, claim=st.sampled_from([None, "all", "1;capabilities=utility"]))
    def create_of_kubelet(self, pod: str, claim: str | None) -> Container:
        annotations = self.handed[pod][1] if pod in self.handed else {}
        return self._create(from_kubelet(annotations, pod=pod, claim=claim), self.handed.get(pod))

    @rule(target=made, index=INDEX, claim=st.sampled_from(["1", "2", "all", "device=0", "1;mode=shared"]))
    def create_by_annotation(self, index: int, claim: str) -> Container:
        return self._create(container(claim, of=f"local-{index}"), None)

    def _create(self, of: Container, handed: tuple[frozenset[str], Mapping[str, str]] | None) -> Container:
        self.number += 1
        of = again(of, self.number)
        got = self.halves.create(of)
        if isinstance(got, tuple):
            assert handed is None or set(got) == handed[0]  # what the kubelet gave, never another
            self.alive[of.id], self.grants[of.id] = (of, False), got
        return of

    @rule(of=made)
    def start(self, of: Container) -> None:
        if of.id in self.alive and not self.alive[of.id][1] and self.halves.start(of):
            self.alive[of.id] = (of, True)

    @rule(of=made)
    def stop(self, of: Container) -> None:
        if of.id in self.alive:
            self.halves.stop(of)
            del self.alive[of.id]

    @rule(pod=pods)
    def end_pod(self, pod: str) -> None:
        for of, _ in [each for each in self.alive.values() if each[0].pod.name == pod]:
            self.stop(of)
        self.halves.end_pod(container(of=pod))
        self.handed.pop(pod, None)

    @precondition(lambda self: self.handed)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:  # noqa: ANN401 - hypothesis'
        """A pod is given up before it had a container: the kubelet takes its GPUs back and tells nobody."""
        pod = data.draw(st.sampled_from(sorted(self.handed)))
        if not any(of.pod.name == pod for of, _ in self.alive.values()):
            del self.handed[pod]

    @rule(index=INDEX, ill=st.booleans())
    def health(self, index: int, ill: bool) -> None:
        gpus = [gpu(n, unavailable="lost" * (ill and n == index)) for n in range(GPUS)]
        self.halves.put_gpus(gpus)

    @rule()
    def restart(self) -> None:
        self.halves.restarted(self.alive)

    @rule(seconds=st.sampled_from([1, 61, 2000]))
    def wait(self, seconds: int) -> None:
        self.halves.clock.now += seconds

    @invariant()
    def nobody_shares_what_is_exclusive(self) -> None:
        on: dict[GpuUuid, set[tuple[str, bool]]] = {}
        for id_, (of, runs) in self.alive.items():
            if runs:
                shared = "shared" in of.pod.annotations.get("gpu.nri.io", "")
                for each in self.grants[id_]:
                    on.setdefault(each, set()).add((of.pod.uid, shared))
        for holders in on.values():
            assert len(holders) == 1 or all(shared for _, shared in holders), holders

    @invariant()
    def what_annotations_run_on_is_not_offered(self) -> None:
        healthy = {device.id for device in self.halves.offers.devices(GPU) if not device.why}
        for id_, (of, runs) in self.alive.items():
            if runs and of.pod.name.startswith("local"):
                assert healthy.isdisjoint(self.grants[id_])


TestOneLedger = OneLedger.TestCase
