"""From another device plugin to ours and back, beneath queued Jobs: no GPU is counted twice, and no Job is lost.

The other plugin answers the kubelet as NVIDIA's was recorded to.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nri_gpu._pb import deviceplugin_pb2 as pb
from tests.support._pb import deviceplugin_tests_pb2 as whole
from tests.support.cluster import DAEMON, GPU, GUARD, NVIDIA, Cluster, jobs, pod, wait_for
from tests.support.daemon import UUIDS
from tests.support.former_plugin import ANSWERS
from tests.support.kubelet import Rival

pytestmark = pytest.mark.cluster

GPUS = len(UUIDS)
QUEUED = 12
REQUIRED = "nri-gpu-is-not-running-on-this-node"
STRATEGIES = ("envvar by uuid", "envvar with PASS_DEVICE_SPECS")


class Theirs(Rival):
    """NVIDIA's device plugin, whose nodes lie below a folder of the test's. strategy: by the name of its recording."""

    def __init__(self, cluster: Cluster, strategy: str) -> None:
        super().__init__(cluster.root / "lib-kubelet" / "device-plugins", GPU, UUIDS)
        self._recorded = ANSWERS[strategy].answer
        self._nodes = cluster.folder / "dev"
        self._nodes.mkdir(exist_ok=True)
        for name, minor in {"nvidiactl": 255, **{f"nvidia{minor}": minor for minor in range(GPUS)}}.items():
            if not (path := self._nodes / name).exists():
                os.mknod(path, 0o020666, os.makedev(NVIDIA, minor))

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: ANN401 - grpc's
        del context
        answers = whole.AllocateResponse()
        for each in request.container_requests:
            answers.container_responses.append(self._answer(each.devices_ids))
        return pb.AllocateResponse.FromString(answers.SerializeToString())

    def _answer(self, ids: Sequence[str]) -> whole.ContainerAllocateResponse:
        """What was recorded for GPU 1, for one GPU."""
        (uuid,) = ids
        answer = whole.ContainerAllocateResponse(envs=dict.fromkeys(self._recorded.envs, uuid))
        for device in self._recorded.devices:
            name = Path(device.container_path).name.replace("nvidia1", f"nvidia{UUIDS.index(uuid)}")
            places = {"container_path": f"/dev/{name}", "host_path": str(self._nodes / name)}
            answer.devices.add(permissions=device.permissions, **places)
        return answer


def while_theirs(cluster: Cluster, strategy: str, scene: Callable[[], None]) -> None:
    async def run() -> None:
        async with Theirs(cluster, strategy) as plugin:
            await plugin.register()
            await asyncio.to_thread(scene)

    asyncio.run(run())


def assert_no_job_lost(cluster: Cluster) -> None:
    """Jobs end although plugins change: a pod that is admitted in the gap fails, and its Job makes another."""
    explain = lambda: f"{cluster.allocatable()} allocatable\n{cluster.kubectl('get', 'pods')}"  # noqa: E731
    wait_for("all Jobs", lambda: cluster.jobs_done() == QUEUED, 120, explain)
    failed = [each["metadata"]["name"] for each in cluster.get("pods") if each["status"]["phase"] == "Failed"]
    said = {name: cluster.said_of(name) for name in failed}
    assert all("UnexpectedAdmissionError" in each or REQUIRED in each for each in said.values()), said
    assert len(said) <= GPUS, said


def queue(cluster: Cluster) -> None:
    """A pod that stays, and Jobs for more GPUs than there are."""
    cluster.wait_allocatable(GPUS)
    cluster.apply(pod("stays", 1), *jobs([f"job-{number}" for number in range(QUEUED)], "sleep 4"))
    cluster.wait_running("stays")
    wait_for("the first Jobs", lambda: cluster.jobs_done() >= 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_from_another_plugin_to_ours(cluster: Cluster, strategy: str) -> None:
    while_theirs(cluster, strategy, lambda: queue(cluster))
    had = cluster.minors("stays")  # none by a variable, which nobody obeys here
    cluster.run_daemon()
    cluster.run_guard()
    cluster.wait_allocatable(GPUS)
    assert_no_job_lost(cluster)
    os.kill(cluster.pids("stays")[0], signal.SIGKILL)
    cluster.wait_phase("stays", restarts=1)
    has = cluster.minors("stays")
    assert len(has) == 1
    assert had <= has
    cluster.apply(pod("others", GPUS - 1))
    cluster.wait_running("others")
    assert cluster.minors("others").isdisjoint(has)


def test_from_ours_back_to_another_plugin(cluster: Cluster) -> None:
    cluster.run_daemon()
    cluster.run_guard()
    queue(cluster)
    cluster.stop(DAEMON, GUARD)

    def after() -> None:
        cluster.wait_allocatable(GPUS)
        assert_no_job_lost(cluster)
        os.kill(cluster.pids("stays")[0], signal.SIGKILL)
        cluster.wait_said("stays", REQUIRED)
        cluster.kubectl("delete", "pod", "stays")
        cluster.apply(pod("stays", 1))
        cluster.wait_running("stays")

    while_theirs(cluster, STRATEGIES[0], after)
