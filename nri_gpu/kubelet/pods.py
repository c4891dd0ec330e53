"""The pod sandboxes of this node, and which devices the kubelet's PodResources lists for each of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from nri_gpu.domain.container import Pod, PodId
from nri_gpu.domain.kubelet import PodDevices

PODS_MAX: Final = 1024  # sandboxes; kubelets run at most some hundreds
QUESTIONS_MAX: Final = 256  # the next List answers those that fall out


class KubeletPods:
    """Sandboxes, what the kubelet listed for them, and the sandboxes it is still to be asked about.

    settled: the kubelet's first List is here, or failed. Before that, allocations from before our start are unknown.
    questions: sandboxes to ask about, oldest first. asked: set with each new question.
    """

    def __init__(self, *, settled: bool = True) -> None:
        self.settled = settled
        self.questions: deque[Pod] = deque(maxlen=QUESTIONS_MAX)
        self.asked = asyncio.Event()
        self._pods: dict[PodId, Pod] = {}
        self._by_name: dict[tuple[str, str], PodId] = {}
        self._devices: dict[PodId, PodDevices] = {}

    def add(self, pod: Pod) -> None:
        """A sandbox was created. It replaces an older one with the same name, and what was listed for that."""
        if pod.id in self._pods:
            return
        self.remove(self._by_name.get((pod.namespace, pod.name), pod.id))
        while len(self._pods) >= PODS_MAX:
            self.remove(next(iter(self._pods)))
        self._pods[pod.id] = pod
        self._by_name[pod.namespace, pod.name] = pod.id
        self._ask(pod)

    def remove(self, pod_id: PodId) -> None:
        """A sandbox is gone."""
        pod = self._pods.pop(pod_id, None)
        self._devices.pop(pod_id, None)
        if pod is not None and self._by_name.get((pod.namespace, pod.name)) == pod_id:
            del self._by_name[pod.namespace, pod.name]

    def devices_of(self, pod: Pod) -> PodDevices | None:
        """What the kubelet listed for exactly this pod. None, and a question to it, where it listed nothing yet."""
        known = self._pods.get(pod.id)
        if known is None or known.uid != pod.uid:
            self.remove(pod.id)
            self.add(pod)
            return None
        devices = self._devices.get(pod.id)
        if devices is None or not devices.containers:
            self._ask(pod)
        return devices

    def sandbox_of(self, devices: PodDevices) -> Pod | None:
        """The sandbox that runs under the name of a listed pod."""
        return self._pods.get(self._by_name.get((devices.namespace, devices.name), PodId("")))

    def all(self) -> tuple[Pod, ...]:
        """Every known sandbox."""
        return tuple(self._pods.values())

    def known(self) -> Iterator[tuple[Pod, PodDevices]]:
        """Sandboxes with what the kubelet listed for them."""
        return ((self._pods[id_], devices) for id_, devices in self._devices.items())

    def answered(self, pods: Iterable[Pod]) -> None:
        """The kubelet was asked about these and has answered: they need not be asked about again."""
        ids = {pod.id for pod in pods}
        self.questions = deque((each for each in self.questions if each.id not in ids), maxlen=QUESTIONS_MAX)

    def put(self, pod: Pod, devices: PodDevices) -> None:
        """Keep the kubelet's answer about one sandbox, if that is still the same pod's."""
        now = self._pods.get(pod.id)
        if now is not None and now.uid == pod.uid:
            self._devices[pod.id] = devices

    def put_list(self, pods: Iterable[Pod], listed: Iterable[PodDevices]) -> None:
        """Keep a List. pods: the sandboxes that were known when it was asked for."""
        found: dict[tuple[str, str], PodDevices | None] = {}
        for each in listed:  # two entries of one name are the old pod and the new, and nothing tells them apart
            found[each.namespace, each.name] = None if (each.namespace, each.name) in found else each
        for pod in pods:
            devices = found.get((pod.namespace, pod.name), PodDevices(pod.namespace, pod.name))
            if devices is not None:
                self.put(pod, devices)

    def _ask(self, pod: Pod) -> None:
        if all(each.id != pod.id for each in self.questions):
            self.questions.append(pod)
        self.asked.set()
