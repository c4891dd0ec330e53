"""ResourceClaims on a real Kubernetes: `nri-gpu dra` beside the daemon, and pods that ask for GPUs by claims."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.cluster import DAEMON, DRA, NAMESPACE, ROOT, Cluster, Object, pod, wait_for
from tests.support.daemon import FOUR_GPUS
from tests.support.errors import HarnessError
from tests.support.helm import documents

CLASS: Final = "gpu.nri.io"
ACCOUNT: Final = DRA  # of the chart
# As docs/dra.md shows them: name in the first line -> the template's spec of a claim.
_SHOWN: Final = re.compile(r"```yaml\n# (.*?)\n(.*?)```", re.DOTALL)
# GPUs 0 and 1 are the device plugin's, 2 and 3 the DRA driver's, where a node has four.
POOLS: Final = """
[kubelet]
pool = "counted"

[dra]
pool = "claims"

[[pool]]
name = "counted"
device = ["0", "1"]

[[pool]]
name = "claims"
model = ["*"]
namespaces = ["default"]
"""


def shown(name: str) -> Object:
    """What a claim of docs/dra.md asks for: the `devices` of its spec."""
    texts = dict(_SHOWN.findall((ROOT / "docs" / "dra.md").read_text()))
    template = next(each for each in yaml.safe_load_all(texts[name]) if each["kind"] == "ResourceClaimTemplate")
    devices: Object = template["spec"]["spec"]["devices"]
    return devices


def devices(cel: str = "", config: Mapping[str, Any] | None = None, **exactly: object) -> Object:
    """The `devices` of a claim's spec: one request of that class. config: opaque parameters of ours."""
    selectors = [{"cel": {"expression": cel}}] if cel else []
    asked = {"deviceClassName": CLASS, "selectors": selectors, **exactly}
    opaque = {"driver": CLASS, "parameters": {"apiVersion": "gpu.nri.io/v1", "kind": "GpuConfig", **(config or {})}}
    return {
        "requests": [{"name": "gpu", "exactly": asked}],
        "config": [] if config is None else [{"requests": ["gpu"], "opaque": opaque}],
    }


def claim(name: str, asked: Mapping[str, Any]) -> Object:
    """A claim by itself, which several pods can name."""
    return _resource("ResourceClaim", name, {"devices": asked})


def template(name: str, asked: Mapping[str, Any]) -> Object:
    return _resource("ResourceClaimTemplate", name, {"spec": {"devices": asked}})


def _resource(kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": deepcopy(spec)}


def on_claim(name: str, of: str, *, containers: Sequence[str] = ("main",), by_template: bool = False) -> Object:
    """A pod whose containers all use one claim. of: the claim's name, or its template's."""
    made = pod(name)
    (container,) = made["spec"]["containers"]
    made["spec"]["containers"] = [
        {**container, "name": each, "resources": {"claims": [{"name": "gpus"}]}} for each in containers
    ]
    key = "resourceClaimTemplateName" if by_template else "resourceClaimName"
    made["spec"]["resourceClaims"] = [{"name": "gpus", key: of}]
    return made


def claiming(name: str, asked: Mapping[str, Any] | None = None) -> tuple[Object, Object]:
    """A pod with a claim of its own, and the template that it is made by: for any one GPU."""
    return template(name, asked or devices()), on_claim(name, name, by_template=True)


def driver_kubeconfig(cluster: Cluster, account: str = ACCOUNT, namespace: str = NAMESPACE) -> Path:
    """Return that of the driver's account, with a token that belongs to the node."""
    bound = ("--bound-object-kind", "Node", "--bound-object-name", cluster.node)
    token = cluster.kubectl("create", "token", account, "-n", namespace, *bound).strip()
    known = yaml.safe_load(cluster.admin.read_text())
    for user in known["users"]:
        user["user"] = {"token": token}
    return cluster.file("dra.kubeconfig", json.dumps(known))


def check_slices(cluster: Cluster, kubeconfig: Path, other: str) -> None:
    """Let the driver's token create a slice of the node that the cluster is about, and none of another one."""
    made = cluster.get("resourceslices")[0]
    made["metadata"] = {"name": "another"}
    create = ("--kubeconfig", str(kubeconfig), "create", "-f", "-")
    made["spec"]["nodeName"] = other
    with pytest.raises(HarnessError, match="may write ResourceSlices of that node only"):
        cluster.kubectl(*create, given=json.dumps(made))
    made["spec"]["nodeName"] = cluster.node
    made["spec"]["pool"]["name"] = "another"
    cluster.kubectl(*create, given=json.dumps(made))


def of_node(resource_slice: Object) -> tuple[str, str]:
    """Return driver and node of a slice."""
    return resource_slice["spec"]["driver"], resource_slice["spec"].get("nodeName", "")


class DraCluster:
    """A cluster whose GPUs are offered by `nri-gpu dra`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        objects = documents(kubelet={"enabled": False}, dra={"enabled": True, "extendedResource": "nvidia.com/gpu"})
        cluster.apply(*(each for each in objects if each["kind"] == "DeviceClass"))

    def run(self, topology: Path | str = FOUR_GPUS, policy: str = "", *options: str) -> None:
        """Daemon and driver process, as systemd's units run them: the driver with the kubelet's own credentials."""
        self.run_daemon(topology, policy, *options)
        self.run_driver()
        self.wait_devices("offered", lambda found: bool(found) and not any(each.get("taints") for each in found))

    def run_driver(self) -> None:
        words = ("--node-name", self.cluster.node, "--kubeconfig", str(self.cluster.kubelet_credentials))
        self.cluster.spawn(DRA, "dra", *words, "--log-level", "DEBUG")

    def run_daemon(self, topology: Path | str = FOUR_GPUS, policy: str = "", *options: str) -> None:
        self.cluster.run_daemon(topology, policy, "--no-kubelet", "--dra", *options)

    def kubeconfig(self) -> Path:
        return driver_kubeconfig(self.cluster)

    def offered(self) -> list[Object]:
        """The devices of all our slices of the node, in the scheduler's order."""
        ours = (CLASS, self.cluster.node)
        found = [each for each in self.cluster.get("resourceslices") if of_node(each) == ours]
        slices = sorted(found, key=lambda each: str(each["metadata"]["name"]))
        return [device for each in slices for device in each["spec"].get("devices", [])]

    def wait_devices(self, what: str, ready: Callable[[list[Object]], bool]) -> None:
        def explain() -> str:
            return f"{json.dumps(self.offered())[:3000]}\n{self.cluster.log(DRA)[-3000:]}"

        wait_for(f"devices to be {what}", lambda: ready(self.offered()), explain=explain)

    def taints(self, name: str) -> dict[str, str]:
        """Of a device that is offered: key -> effect."""
        found = {each["name"]: each.get("taints", []) for each in self.offered()}
        return {taint["key"]: taint["effect"] for taint in found.get(name, [])}

    def held(self) -> list[str]:
        """The claims that are prepared, by their names."""
        status = json.loads(self.cluster.nri_gpu("status", "-o", "json").stdout)
        return sorted(each["name"] for each in status["claims"])

    def wait_nothing_left(self) -> None:
        """No claim is prepared, and no specification of one is there."""

        def left() -> tuple[list[str], list[Path]]:
            return self.held(), list(self.cluster.cdi.glob("nri-gpu-claim-*"))

        explain = lambda: f"{left()}\n{self.cluster.log(DRA)[-2000:]}\n{self.cluster.log(DAEMON)[-2000:]}"  # noqa: E731
        wait_for("nothing to be left of claims", lambda: left() == ([], []), explain=explain)

    def delete(self, *words: str) -> None:
        self.cluster.kubectl("delete", *words)

    def end(self) -> None:
        """No pod, no claim, no driver. What prepared them must run until they are gone."""
        for node in self.cluster.each():
            for name in ("containerd", "kubelet", DAEMON, DRA):
                if node.known(name):
                    node.start(name)
        others = f"--field-selector=metadata.namespace!={NAMESPACE}"  # than the chart's pods
        self.delete("jobs,pods,resourceclaims,resourceclaimtemplates", "--all-namespaces", others, "--timeout=60s")
        for node in self.cluster.each():
            node.stop(DRA)
