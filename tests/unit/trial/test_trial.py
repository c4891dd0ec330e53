"""A test against an API server: what it asks there, what it deletes, and what it says to whom it may not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from nri_gpu.decision.offered import Way
from nri_gpu.dra.api_server import ApiServer, ApiTimes, RefusedError
from nri_gpu.trial.trial import Trial, lacking
from nri_gpu.trial.trial_pod import Attempt, OwnContainer, OwnMetadata, OwnPod, OwnSpec
from tests.support.api_server import Canned, StandInApiServer
from tests.support.waiting import aside, wait_for

KUBELET, CLAIM = Attempt(Way.KUBELET, "nvidia.com/gpu"), Attempt(Way.DRA, "gpu.nri.io")
OWN = OwnPod(OwnMetadata(), OwnSpec((OwnContainer("nri-gpu"),)))
PODS, CLAIMS = "/api/v1/namespaces/ns/pods", "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims"
DELETED = [("DELETE", f"{PODS}/test-1")]
WAITS: dict[str, Any] = {"status": {"phase": "Pending"}}
ENDED = {"exitCode": 0, "message": "GPU-1\n"}
DONE = {"spec": {"nodeName": "node1"}, "status": {"containerStatuses": [{"state": {"terminated": ENDED}}]}}


@pytest.fixture
def server() -> Iterator[StandInApiServer]:
    with StandInApiServer() as running:
        yield running


@pytest.fixture
def trial(server: StandInApiServer) -> Iterator[Trial]:
    api = ApiServer(server.access(), times=ApiTimes(connect=3, read=2, answer=4))
    yield Trial(api, "ns", wait_s=0.2, poll_s=0.05)
    api.close()


def answers(server: StandInApiServer, pod: dict[str, Any], *instead: Canned) -> None:
    """It takes what is made and deleted, and has this pod. instead: of one of these answers."""

    def canned(verb: str, path: str, found: dict[str, Any]) -> Canned:
        return Canned(200, json.dumps(found).encode(), verb=verb, path=path, times=-1)

    server.canned = [
        *instead,
        canned("GET", "/events", {"items": []}),
        canned("GET", PODS, pod),
        *(canned(verb, path, {}) for verb in ("POST", "DELETE") for path in (PODS, CLAIMS)),
    ]


def forbidden(verb: str, path: str, message: str) -> Canned:
    return Canned(403, json.dumps({"kind": "Status", "message": message}).encode(), verb=verb, path=path, times=-1)


def deletions(server: StandInApiServer) -> list[tuple[str, str]]:
    return [each for each in server.requests if each[0] == "DELETE"]


async def test_a_pod_that_is_done_is_deleted(trial: Trial, server: StandInApiServer) -> None:
    answers(server, DONE)
    assert (await trial.ask(KUBELET, OWN, "test-1", {})).sentence == "has GPU-1 on node node1"
    assert server.count("POST") == 1
    assert deletions(server) == DELETED


async def test_a_pod_with_a_claim_is_deleted_before_that(trial: Trial, server: StandInApiServer) -> None:
    answers(server, DONE)
    assert (await trial.ask(CLAIM, OWN, "test-1", {})).good
    assert [path for verb, path in server.requests if verb == "POST"] == [CLAIMS, PODS]
    assert deletions(server) == [*DELETED, ("DELETE", f"{CLAIMS}/test-1")]


async def test_a_pod_that_waits_too_long_is_deleted(trial: Trial, server: StandInApiServer) -> None:
    answers(server, WAITS)
    assert not (await trial.ask(KUBELET, OWN, "test-1", {})).good
    assert server.count("GET", f"{PODS}/test-1") > 1
    assert deletions(server) == DELETED


async def test_a_test_that_is_cancelled_deletes_its_pod(trial: Trial, server: StandInApiServer) -> None:
    answers(server, WAITS)
    task = asyncio.create_task(trial.ask(KUBELET, OWN, "test-1", {}))
    await aside(wait_for, "a look at it", lambda: bool(server.count("GET", PODS)), 10.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert deletions(server) == DELETED


async def test_a_claim_goes_where_its_pod_is_refused(trial: Trial, server: StandInApiServer) -> None:
    answers(server, WAITS, forbidden("POST", PODS, 'pods "test-1" is forbidden: images of it cannot be used here'))
    with pytest.raises(RefusedError) as refused:
        await trial.ask(CLAIM, OWN, "test-1", {})
    assert lacking(refused.value, "all") == str(refused.value)
    assert "cannot be used here" in str(refused.value)
    assert deletions(server)[-1] == ("DELETE", f"{CLAIMS}/test-1")


async def test_a_deletion_that_fails_is_tried_again(trial: Trial, server: StandInApiServer) -> None:
    answers(server, DONE, Canned(503, verb="DELETE", times=1))
    assert (await trial.ask(KUBELET, OWN, "test-1", {})).good
    assert deletions(server) == DELETED * 2


async def test_without_a_role_it_says_which_one_is_missing(trial: Trial, server: StandInApiServer) -> None:
    answers(server, WAITS, forbidden("GET", PODS, 'pods is forbidden: User "u" cannot get resource "pods"'))
    with pytest.raises(RefusedError) as refused:
        await trial.own_pod("test-0")
    said = lacking(refused.value, "create, get and delete on pods")
    assert said.startswith("the Role of this test is missing, as with rbac.create=false: ")
    assert "a Role in this namespace that allows create, get and delete on pods" in said


async def test_observers_are_asked_for_by_their_labels_alone(trial: Trial, server: StandInApiServer) -> None:
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}, "spec": {"nodeName": "node1"}}
    answers(server, {"items": [ready]})
    assert (await trial.observers("a=b,c=d")).good
    assert server.requests == [("GET", f"{PODS}?labelSelector=a%3Db%2Cc%3Dd")]
    answers(server, {"items": []})
    assert not (await trial.observers("a=b")).good
