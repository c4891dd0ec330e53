"""`nri-gpu try` as a command: what it needs, and what it says where that is missing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from threading import Thread

import pytest

from nri_gpu.cli.main import main
from nri_gpu.cli.try_command import ASKING, CLAIMING
from nri_gpu.domain.errors import Exit
from nri_gpu.dra import api_access
from tests.support.api_server import Canned, StandInApiServer
from tests.support.helm import CHART
from tests.support.waiting import wait_for

POLICY = CHART.parents[2] / "config" / "policy.toml"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), Exit.USAGE, "--pod"),
        (("--pod", "a", "--observers", "b=c"), Exit.USAGE, "--observers"),
        (("--pod", "a", "--place", "[]"), Exit.USAGE, "--place is no part of a pod's spec"),
        (("--pod", "a"), Exit.CONFIGURATION, "this is no pod with a service account"),
    ],
)
def test_it_says_what_it_lacks(
    options: tuple[str, ...],
    code: Exit,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["try", "--namespace", "ns", *options]) == code
    assert said in capsys.readouterr().err


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInApiServer]:
    """An API server in place of the cluster's, where a pod waits for ever."""
    waits = json.dumps({"metadata": {}, "spec": {"containers": [{"image": "nri-gpu"}]}, "status": {}}).encode()
    with StandInApiServer() as running:
        monkeypatch.setattr(api_access, "in_cluster", running.access)
        running.canned = [
            Canned(200, b'{"items": []}', path="/events", times=-1),
            Canned(200, waits, path="/pods", times=-1),
        ]
        yield running


def test_told_to_stop_it_deletes_its_pod_and_fails(
    server: StandInApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        wait_for("a look at the pod", lambda: server.count("GET", "/events") > 0, 10.0)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        stopping = Thread(target=stop)
        stopping.start()
        assert main(["try", "--namespace", "ns", "--pod", "test-0", "--policy", str(POLICY)]) == Exit.FINDING
        stopping.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server.requests[-1] == ("DELETE", "/api/v1/namespaces/ns/pods/test-0-annotation")
    assert capsys.readouterr().out == "failed: it was told to stop; what it made is deleted\n"


def test_without_a_role_it_fails_with_what_a_role_must_allow(
    server: StandInApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = json.dumps({"message": 'pods "test-0" is forbidden: User "u" cannot get resource "pods"'}).encode()
    server.canned.insert(0, Canned(403, refused, path="/pods", times=-1))
    asked = ("try", "--namespace", "ns", "--pod", "test-0", "--policy", str(POLICY), "--dra")
    assert main(asked) == Exit.FINDING
    said = capsys.readouterr().out
    assert said.startswith("failed: the Role of this test is missing")
    assert f"{ASKING}, {CLAIMING}" in said
    assert server.count("POST") == 0
