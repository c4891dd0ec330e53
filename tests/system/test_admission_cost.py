"""What the chart's policies cost Kubernetes' API server for a pod that a tenant made to be slow."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from tests.support.errors import HarnessError
from tests.support.helm import documents
from tests.support.lone_api_server import LoneApiServer
from tests.support.waiting import wait_for

KEY: Final = "required-plugins.noderesource.dev/pod"
PODS: Final = "/api/v1/namespaces/default/pods?dryRun=All"
MANY: Final = {f"k{number}": "" for number in range(40_000)}  # most of the 256 KiB that a pod may have


def created(server: LoneApiServer, annotations: dict[str, str]) -> dict[str, str]:
    """Return the annotations of a pod that would be created with these."""
    spec = {"automountServiceAccountToken": False, "containers": [{"name": "main", "image": "a"}]}
    pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
    pod["metadata"]["annotations"] = annotations
    made = json.loads(server.kubectl("create", "--raw", PODS, "-f", "-", given=json.dumps(pod)))
    found: dict[str, str] = made["metadata"]["annotations"]
    return found


def test_many_annotations_cost_the_api_server_little() -> None:
    """The time to go through them would grow with the square of their number: to several times the server's own."""

    def took(server: LoneApiServer) -> float:
        began = time.monotonic()
        assert created(server, MANY) == MANY
        return time.monotonic() - began

    def in_force(server: LoneApiServer) -> bool:
        return KEY in created(server, {"gpu.nri.io": "1"})

    with LoneApiServer() as server:
        wait_for("the account", lambda: has_account(server), 30)
        alone = min(took(server) for _ in range(3))
        for each in documents(requirePlugin={"enabled": True}):
            if "AdmissionPolicy" in each["kind"]:
                server.kubectl("create", "-f", "-", given=json.dumps(each))
        wait_for("the policies", lambda: in_force(server), 30)
        assert min(took(server) for _ in range(3)) < 3 * alone
        assert set(created(server, MANY | {"gpu.nri.io": "1"})) == {*MANY, "gpu.nri.io", KEY}


def has_account(server: LoneApiServer) -> bool:
    """Return whether pods can have the namespace's account, which no controller makes here."""
    try:
        server.kubectl("create", "serviceaccount", "default")
    except HarnessError:
        return False
    return True
