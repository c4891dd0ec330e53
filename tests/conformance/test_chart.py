"""The chart's two containers as a kubelet would make them: their folders, their rights, their arguments, their probes.

Python and this tree are mounted in place of the image, and a folder stands for the host's /dev. GPUs are simulated.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.configmap import ConfigMapFolder
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.helm import documents, values
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

ROOT = FOUR_GPUS.parents[2]
ASKS = {"gpu.nri.io": "device=0"}
# What the image would bring: an interpreter with its packages, and this tree.
SYSTEM = ("/usr", "/lib", "/lib64")
PROGRAM = (sys.executable, "-m", "nri_gpu")
READY_S = 30.0


@dataclass
class Cluster:
    """One node with the chart's pods on it."""

    node: Containerd
    rendered: list[dict[str, Any]]
    policy: ConfigMapFolder
    hosts_dev: Path

    def pod_spec(self, component: str) -> dict[str, Any]:
        (found,) = (
            each["spec"]["template"]["spec"]
            for each in self.rendered
            if each["metadata"]["labels"].get("app.kubernetes.io/component") == component
        )
        spec: dict[str, Any] = found
        return spec

    def start(self, component: str) -> ContainerId:
        """As the kubelet does for the DaemonSet's pod."""
        spec = self.pod_spec(component)
        (container,) = spec["containers"]
        rights = container["securityContext"]
        pod = self.node.cri.run_pod(PodSpec(name=component, privileged=bool(rights.get("privileged"))))
        volumes = {each["name"]: self._source(each) for each in spec["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        own = {path: path for path in (*SYSTEM, sys.base_prefix, sys.prefix, *_packages()) if Path(path).is_dir()}
        simulated = ("--gpus", str(FOUR_GPUS)) if component == "daemon" else ()
        return self.node.cri.run(
            pod,
            ContainerSpec(
                name=component,
                command=(*PROGRAM, *container["args"], *simulated),
                env={"PYTHONPATH": str(ROOT), **{each["name"]: each["value"] for each in container["env"]}},
                mounts={**own, **mounts},
                read_only=frozenset(own | mounts) - written,
                privileged=bool(rights.get("privileged")),
                without_rights=rights.get("capabilities") == {"drop": ["ALL"]},
                user=rights["runAsUser"],
                readonly_rootfs=rights["readOnlyRootFilesystem"],
            ),
        )

    def probe(self, component: str, container: ContainerId, kind: str) -> int:
        """A probe's exit code."""
        (spec,) = self.pod_spec(component)["containers"]
        _, *arguments = spec[kind]["exec"]["command"]
        return self.node.cri.execute(container, *PROGRAM, *arguments).code

    def wait_ready(self, component: str, container: ContainerId) -> None:
        wait_for(f"{component} to be ready", lambda: self.probe(component, container, "readinessProbe") == 0, READY_S)

    def ask(self, name: str) -> tuple[Pod, ContainerId]:
        pod = self.node.cri.run_pod(PodSpec(name=name, annotations=ASKS))
        return pod, self.node.cri.create(pod, ContainerSpec(command=("/bin/sleep", "600")))

    def _source(self, volume: dict[str, Any]) -> str:
        if "configMap" in volume:
            return str(self.policy.folder)
        if "emptyDir" in volume:
            empty = self.hosts_dev.parent / f"empty-{volume['name']}"
            empty.mkdir(exist_ok=True)
            return str(empty)
        path: str = volume["hostPath"]["path"]
        Path(path).mkdir(parents=True, exist_ok=True)
        return str(self.hosts_dev) if path == "/dev" else path


def _packages() -> list[str]:
    """Folders that packages are imported from, this tree among them."""
    return list(dict.fromkeys(str(Path(path)) for path in (*sys.path, str(ROOT)) if path and Path(path).is_dir()))


@pytest.fixture
def cluster(node: Containerd, tmp_path: Path) -> Iterator[Cluster]:
    dev = tmp_path / "dev"
    for name in ("pts", "shm", "mqueue"):
        (dev / name).mkdir(parents=True)
    os.mknod(dev / "null", 0o20666, os.makedev(1, 3))
    os.mknod(dev / "urandom", 0o20444, os.makedev(1, 9))
    paths = {
        "nri": str(node.nri_socket.parent),
        "driverRoot": str(make_driver_root(tmp_path / "driver")),
        "state": str(tmp_path / "state"),
        "stage": str(tmp_path / "stage"),
    }
    rendered = documents(values(paths=paths))
    (config,) = (each for each in rendered if each["kind"] == "ConfigMap")
    yield Cluster(node, rendered, ConfigMapFolder(tmp_path / "policy", config["data"]), dev)


def test_they_run_and_an_upgrade_of_the_daemon_leaves_no_gap(cluster: Cluster) -> None:
    cri = cluster.node.cri
    before = sorted(path.name for path in cluster.hosts_dev.iterdir())
    daemon, guard = cluster.start("daemon"), cluster.start("guard")
    cluster.wait_ready("daemon", daemon)
    cluster.wait_ready("guard", guard)
    assert cluster.probe("daemon", daemon, "livenessProbe") == 0
    assert cluster.probe("guard", guard, "livenessProbe") == 0
    _, granted = cluster.ask("first")
    cri.start(granted)
    assert "/dev/nvidia0" in cri.status(granted).device_paths
    assert "NVIDIA_VISIBLE_DEVICES" in cri.status(granted).env

    cri.stop(daemon, timeout_s=10)
    pod, gone = cluster.ask("in-the-gap")
    with pytest.raises(CriError, match="not-granted"):
        cri.start(gone)
    cri.remove_pod(pod.id)

    daemon = cluster.start("daemon")
    cluster.wait_ready("daemon", daemon)
    with pytest.raises(CriError, match="gpu-busy"):  # the first one's, still
        cluster.ask("second")
    assert sorted(path.name for path in cluster.hosts_dev.iterdir()) == before


def test_a_policy_that_is_swapped_holds_for_the_next_pod(cluster: Cluster) -> None:
    daemon = cluster.start("daemon")
    cluster.wait_ready("daemon", daemon)
    cluster.policy.swap({"policy.toml": '[namespaces]\nallow = ["research"]\n'})

    def refused() -> bool:
        try:
            pod, _ = cluster.ask("another")
        except CriError as error:
            return "may not ask" in error.details or "namespace" in error.details
        cluster.node.cri.remove_pod(pod.id)
        return False

    wait_for("the new policy", refused, READY_S)
