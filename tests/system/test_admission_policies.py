"""The chart's admission policies on a real API server: a pod made to be slow, and a webhook that changes pods."""

from __future__ import annotations

import base64
import json
import ssl
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final

import pytest

from tests.support.api_server import certificates
from tests.support.errors import HarnessError
from tests.support.helm import documents
from tests.support.lone_api_server import LoneApiServer
from tests.support.waiting import wait_for

KEY: Final = "required-plugins.noderesource.dev/pod"
PODS: Final = "/api/v1/namespaces/default/pods?dryRun=All"
MANY: Final = {f"k{number}": "" for number in range(40_000)}  # most of the 256 KiB that a pod may have
ADDED: Final = [{"op": "add", "path": "/metadata/annotations/gpu.nri.io", "value": "1"}]


def created(server: LoneApiServer, annotations: dict[str, str]) -> dict[str, str]:
    """Return the annotations of a pod that would be created with these."""
    spec = {"automountServiceAccountToken": False, "containers": [{"name": "main", "image": "a"}]}
    pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
    pod["metadata"]["annotations"] = annotations
    made = json.loads(server.kubectl("create", "--raw", PODS, "-f", "-", given=json.dumps(pod)))
    found: dict[str, str] = made["metadata"]["annotations"]
    return found


def put_in_force(server: LoneApiServer) -> None:
    """Make the chart's policies, and wait until they hold."""
    for each in documents(requirePlugin={"enabled": True}):
        if "AdmissionPolicy" in each["kind"]:
            server.kubectl("create", "-f", "-", given=json.dumps(each))
    wait_for("the policies", lambda: KEY in created(server, {"gpu.nri.io": "1"}), 30)


def test_many_annotations_cost_the_api_server_little() -> None:
    """The time to go through them would grow with the square of their number: to several times the server's own."""

    def took(server: LoneApiServer) -> float:
        began = time.monotonic()
        assert created(server, MANY) == MANY
        return time.monotonic() - began

    with LoneApiServer() as server:
        wait_for("the account", lambda: has_account(server), 30)
        alone = min(took(server) for _ in range(3))
        put_in_force(server)
        assert min(took(server) for _ in range(3)) < 7 * alone
        assert set(created(server, MANY | {"gpu.nri.io": "1"})) == {*MANY, "gpu.nri.io", KEY}


def has_account(server: LoneApiServer) -> bool:
    """Return whether pods can have the namespace's account, which no controller makes here."""
    try:
        server.kubectl("create", "serviceaccount", "default")
    except HarnessError:
        return False
    return True


class AddingRequests(BaseHTTPRequestHandler):
    """A webhook that adds a request to each pod."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        patch = base64.b64encode(json.dumps(ADDED).encode()).decode()
        answer = {"uid": asked["request"]["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
        body = json.dumps({"apiVersion": asked["apiVersion"], "kind": asked["kind"], "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def webhook() -> Iterator[dict[str, Any]]:
    """The configuration of one that answers."""
    made = certificates()
    with ThreadingHTTPServer(("127.0.0.1", 0), AddingRequests) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.certificate, made.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        client = {"url": f"https://127.0.0.1:{server.server_port}/"}
        client["caBundle"] = base64.b64encode(made.authority.read_bytes()).decode()
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        hook = {"name": "later.example.com", "clientConfig": client, "rules": [rule], "sideEffects": "None"}
        hook |= {"admissionReviewVersions": ["v1"]}
        yield {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "later"},
            "webhooks": [hook],
        }
        server.shutdown()
        thread.join()


def test_a_request_that_a_webhook_adds_requires_us(webhook: dict[str, Any]) -> None:
    with LoneApiServer() as server:
        wait_for("the account", lambda: has_account(server), 30)
        put_in_force(server)
        server.kubectl("create", "-f", "-", given=json.dumps(webhook))
        wait_for("the webhook", lambda: "gpu.nri.io" in created(server, {"a": "b"}), 30)
        assert created(server, {"a": "b"}) == {"a": "b", "gpu.nri.io": "1", KEY: '["nri-gpu"]'}
