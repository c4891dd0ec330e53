"""The chart's two containers as a kubelet would make them: their folders, their rights, their arguments, their probes.

Python and this tree are mounted in place of the image, and a folder stands for the host's /dev. GPUs are simulated, and
so is the kubelet, but for its sockets.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.configmap import ConfigMapFolder
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, Pod
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.helm import CHART, documents
from tests.support.kubelet import AdmissionError, Kubelet
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import aside, in_a_loop, wait_for

pytestmark = on_newest

ROOT = FOUR_GPUS.parents[2]
ASKS = {"gpu.nri.io": "device=0"}
# What the image would bring: an interpreter with its packages, and this tree.
SYSTEM = ("/usr", "/lib", "/lib64")
PROGRAM = (sys.executable, "-m", "nri_gpu")
READY_S = 30.0
SLEEP = ("/bin/sleep", "600")
GPU = "nvidia.com/gpu"


@dataclass
class Cluster:
    """One node with the chart's pods on it."""

    node: Containerd
    rendered: list[dict[str, Any]]
    policy: ConfigMapFolder
    hosts_dev: Path
    kubelet: Path
    numbers: Iterator[int] = field(default_factory=count)
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # folder of the host -> the one that stands for it here

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
        capabilities, host_pid = rights.get("capabilities", {}), bool(spec.get("hostPID"))
        pod = self.node.cri.run_pod(
            PodSpec(name=component, privileged=bool(rights.get("privileged")), host_pid=host_pid)
        )
        number = next(self.numbers)
        volumes = {each["name"]: self._source(each, number) for each in spec["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        own = {path: path for path in (*SYSTEM, sys.base_prefix, sys.prefix, *_packages()) if Path(path).is_dir()}
        simulated = ("--gpus", str(FOUR_GPUS)) if component == "daemon" else ()
        return self.node.cri.run(
            pod,
            ContainerSpec(
                name=component,
                command=(*PROGRAM, *container["args"], *simulated),
                env={
                    "PYTHONPATH": str(ROOT),
                    **{each["name"]: each.get("value", "node1") for each in container["env"]},
                },
                mounts={**own, **mounts},
                read_only=frozenset(own | mounts) - written,
                privileged=bool(rights.get("privileged")),
                without_rights=capabilities.get("drop") == ["ALL"],
                rights=capabilities.get("add", ()),
                host_pid=host_pid,
                user=rights["runAsUser"],
                readonly_rootfs=rights["readOnlyRootFilesystem"],
            ),
        )

    def probe(self, component: str, container: ContainerId, kind: str) -> int:
        """A probe's exit code."""
        (spec,) = self.pod_spec(component)["containers"]
        return self.node.cri.execute(container, *spec[kind]["exec"]["command"]).code

    def wait_ready(self, component: str, container: ContainerId) -> None:
        wait_for(f"{component} to be ready", lambda: self.probe(component, container, "readinessProbe") == 0, READY_S)

    def ask(self, name: str, claim: Mapping[str, str] = ASKS) -> tuple[Pod, ContainerId]:
        """A pod's container by annotation."""
        pod = self.node.cri.run_pod(PodSpec(name=name, annotations=claim))
        return pod, self.node.cri.create(pod, ContainerSpec(command=SLEEP))

    def run(self, pod: Pod, given: Mapping[str, str], attempt: int = 0) -> ContainerId:
        """A pod's container with what the kubelet was answered for it."""
        return self.node.cri.run(pod, ContainerSpec(command=SLEEP, annotations=given, attempt=attempt))

    def gpus(self, container: ContainerId) -> set[str]:
        """Which ones it sees, by its environment."""
        return set(self.node.cri.status(container).env["NVIDIA_VISIBLE_DEVICES"].split(","))

    def _source(self, volume: dict[str, Any], number: int) -> str:
        if "configMap" in volume:
            return str(self.policy.folder)
        if "emptyDir" in volume:
            empty = self.hosts_dev.parent / f"empty-{volume['name']}-{number}"  # each pod's own
            empty.mkdir()
            return str(empty)
        path: str = volume["hostPath"]["path"]
        if path in self.elsewhere:
            return self.elsewhere[path]
        if path == "/var/lib/kubelet/device-plugins":  # wherever the kubelet's root is
            return str(self.kubelet / "device-plugins")
        Path(path).mkdir(parents=True, exist_ok=True)
        return str(self.hosts_dev) if path == "/dev" else path


def _packages() -> list[str]:
    """Folders that packages are imported from, this tree among them."""
    return list(dict.fromkeys(str(Path(path)) for path in (*sys.path, str(ROOT)) if path and Path(path).is_dir()))


def make_dev(folder: Path) -> Path:
    """A folder that stands for the host's /dev."""
    dev = folder / "dev"
    for name in ("pts", "shm", "mqueue"):
        (dev / name).mkdir(parents=True)
    os.mknod(dev / "null", 0o20666, os.makedev(1, 3))
    os.mknod(dev / "urandom", 0o20444, os.makedev(1, 9))
    return dev


def install(node: Containerd, folder: Path, kubelet: Mapping[str, Any], **more: object) -> Cluster:
    """The chart with its default values, but for the places, `kubelet`, and more."""
    dev = make_dev(folder)
    paths = {
        "nri": str(node.nri_socket.parent),
        "driverRoot": str(make_driver_root(folder / "driver")),
        "state": str(folder / "state"),
        "stage": str(folder / "stage"),
        "remembered": str(folder / "remembered"),
    }
    rendered = documents(None, CHART, paths=paths, kubelet=kubelet, **more)
    (config,) = (each for each in rendered if each["kind"] == "ConfigMap")
    return Cluster(
        node, rendered, ConfigMapFolder(folder / "policy", config["data"]), dev, Path(str(kubelet.get("root")))
    )


@pytest.fixture
def cluster(node: Containerd, tmp_path: Path) -> Cluster:
    """In annotation mode."""
    return install(node, tmp_path, {"enabled": False})


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
    pod = cri.run_pod(PodSpec(name="in-the-gap", annotations=ASKS))
    with pytest.raises(CriError, match="not-granted"):
        cri.run(pod)
    cri.remove_pod(pod.id)

    daemon = cluster.start("daemon")
    cluster.wait_ready("daemon", daemon)
    with pytest.raises(CriError, match="gpu-busy"):  # the first one's, still
        cluster.ask("second")
    assert sorted(path.name for path in cluster.hosts_dev.iterdir()) == before


@in_a_loop
async def test_the_kubelets_half_through_a_rolling_update(folder: Path, node: Containerd, tmp_path: Path) -> None:
    """As the DaemonSet's controller does it: the old daemon ends, then the new one starts; the guard stays."""
    cluster = install(node, tmp_path, {"root": str(folder)})
    cri = cluster.node.cri
    (folder / "pod-resources").mkdir()
    async with Kubelet(folder) as kubelet:
        daemon, guard = await aside(cluster.start, "daemon"), await aside(cluster.start, "guard")
        await aside(cluster.wait_ready, "daemon", daemon)
        await aside(cluster.wait_ready, "guard", guard)
        await kubelet.wait_healthy(GPU, 4)

        given = await kubelet.admit("train", "main", {GPU: 1})
        pod = await aside(cri.run_pod, PodSpec(name="train"))
        container = await aside(cluster.run, pod, given)
        assert cluster.gpus(container) == kubelet.in_use(GPU)
        with pytest.raises(CriError, match=r"write nvidia\.com/gpu into the container's resources\.limits"):
            await aside(cluster.ask, "past-the-scheduler")

        client = kubelet.clients[GPU]
        await aside(cri.stop, daemon, 10)
        await kubelet.wait("end of the stream", lambda: client.ended)
        assert kubelet.healthy(GPU) == []
        assert kubelet.capacity(GPU) == 4
        with pytest.raises(AdmissionError):
            await kubelet.admit("next", "main", {GPU: 1})
        with pytest.raises(AdmissionError):
            await kubelet.allocate(GPU, sorted(client.devices)[:1])
        # A container of a pod that was admitted is made anew in the gap: with the kubelet's word and nobody to read it
        await aside(cri.stop, container)
        with pytest.raises(CriError, match="not-granted"):
            await aside(cluster.run, pod, kubelet.replayed("train", "main"), 1)

        daemon = await aside(cluster.start, "daemon")
        await aside(cluster.wait_ready, "daemon", daemon)
        await kubelet.wait_healthy(GPU, 4)
        again = await aside(cluster.run, pod, kubelet.replayed("train", "main"), 2)
        assert cluster.gpus(again) == kubelet.in_use(GPU)
        other = await kubelet.admit("next", "main", {GPU: 3})
        await aside(cluster.run, await aside(cri.run_pod, PodSpec(name="next")), other)
        assert len(kubelet.in_use(GPU)) == 4


def test_an_update_of_the_guard_lets_nothing_through(cluster: Cluster) -> None:
    """The surge: two guards for a while, and containers that nobody granted anything all along, with no daemon."""
    cri = cluster.node.cri
    old = cluster.start("guard")
    cluster.wait_ready("guard", old)
    over, refused, started = threading.Event(), [0], []

    def create() -> None:
        for number in count():
            if over.is_set():
                return
            pod = cri.run_pod(PodSpec(name=f"ungranted-{number}", annotations=ASKS))
            container = None
            try:
                container = cri.create(pod, ContainerSpec(command=SLEEP))
                cri.start(container)
            except CriError as error:
                refused[0] += "not-granted" in error.details
            else:
                started.append(number)
            # As a kubelet does. A pod removed with its containers hangs containerd 2.1 if a plugin registers meanwhile:
            # each removal takes the lock that its pod's removal has, and a writer between the two waits for ever.
            if container:
                cri.remove(container)
            cri.remove_pod(pod.id)

    creating = threading.Thread(target=create)
    creating.start()
    try:
        new = cluster.start("guard")
        cluster.wait_ready("guard", new)
        during = refused[0]
        cri.stop(old, timeout_s=10)
        cri.remove(old)
        after = refused[0]
        wait_for("some more", lambda: bool(started) or refused[0] > after + 3, READY_S)
    finally:
        over.set()
        creating.join()
    assert during > 0
    assert started == []


def test_what_the_values_add_to_daemon_and_guard_is_in_their_containers(node: Containerd, tmp_path: Path) -> None:
    extras: dict[str, Any] = {
        "extraEnv": [{"name": "EXTRA", "value": "a b"}],
        "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    given = {**extras, "extraArgs": ["--index=05"], "guard": extras}
    cluster = install(node, tmp_path, {"enabled": False}, **given)
    for component, arguments in (("daemon", "--index=05"), ("guard", "guard")):
        container = cluster.start(component)
        cluster.wait_ready(component, container)  # so its program takes the argument
        write = "echo here >/scratch/file && read -r word </scratch/file"
        asked = f"{write} && tr '\\0' '\\n' </proc/1/cmdline && echo $EXTRA $word"
        told = node.cri.execute(container, "sh", "-c", asked).stdout
        assert arguments in told.splitlines()
        assert told.endswith("a b here\n")
