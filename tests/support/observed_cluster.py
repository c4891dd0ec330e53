"""`nri-gpu observe` on a node of a real Kubernetes, where NVIDIA's DRA driver and our device plugin allocate GPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nri_gpu.policy.model import Policy
from nri_gpu.verify.oci_bundles import TASKS
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.cluster import DAEMON, NAMESPACE, Cluster, Object, wait_for
from tests.support.daemon import FOUR_GPUS
from tests.support.errors import HarnessError

OBSERVER: Final = "nri-gpu-observe"
RESOURCE: Final = "example.com/gpu"
_CRI: Final = "io.kubernetes.cri."
_OPERATIONS: Final = "kubelet_runtime_operations_duration_seconds"
REPLICAS: Final = 32
PLUGGED: Final = 3  # the minor of the one GPU that our plugin offers; the scheduler takes NVIDIA's first ones first
_POLICY: Final = f"""
[kubelet]
enabled = true
resource = "{RESOURCE}"
replicas = {REPLICAS}
pool = "plugged"

[[pool]]
name = "plugged"
device = ["{PLUGGED}"]
"""
_PODRESOURCES: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"
_TASKS: Final = f"/run/containerd/{TASKS}"  # where a containerd of the defaults has its bundles
# What differs from one life of a pod to the next: ids, UIDs of objects, times, versions, addresses, pids.
_CHANCE: Final = (
    (re.compile(r"\b[0-9a-f]{64}\b"), "ID"),
    (re.compile(r"(?<!GPU-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "UID"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z"), "TIME"),
    (re.compile(r'"resourceVersion": "\d+"'), '"resourceVersion": "N"'),
    (re.compile(r"\b10\.244\.\d+\.\d+\b"), "ADDRESS"),
    (re.compile(r"\bkube-api-access-[a-z0-9]{5}\b"), "kube-api-access-N"),
    (re.compile(r"(?<=/containers/main/)[0-9a-f]{8}\b"), "N"),  # the file of its termination message
    (re.compile(r"/proc/\d+/"), "/proc/PID/"),
    (re.compile(r'"gpu\.nri\.io/grant": ".*?(?<!\\)"'), '"gpu.nri.io/grant": "SIGNED"'),  # by a key of each start
)


@contextmanager
def usual_bundles(cluster: Cluster) -> Iterator[None]:
    """The node's containers have their bundles where a containerd of the defaults keeps them, too."""
    cluster.enter("mkdir", "-p", _TASKS)
    done = cluster.enter("mount", "--bind", str(cluster.place / "ctrd" / "state" / TASKS), _TASKS)
    if done.returncode:
        raise HarnessError(f"mount: {done.stderr}")
    try:
        yield
    finally:
        cluster.enter("umount", _TASKS)


class ObservedCluster:
    """A cluster whose GPUs a device plugin allocates: ours, of another resource's name and state folder."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.run_dir = Path(tempfile.mkdtemp(prefix="observe-", dir=cluster.folder))
        self._daemon_dir = Path(tempfile.mkdtemp(prefix="apart-", dir=cluster.folder))

    def end(self) -> None:
        """No observer and no plugin, and the node shows none."""
        self.stop()
        self.cluster.stop(DAEMON)
        self.cluster.wait_allocatable(0, RESOURCE)

    def run_plugin(self) -> None:
        """Our device plugin, until the kubelet can allocate its GPUs."""
        file = self.cluster.policy(_POLICY)
        socket = Policy.default().plugin.socket
        words = ("--gpus", str(FOUR_GPUS), "--socket", socket, "--policy", str(file), "--state-dir")
        self.cluster.spawn(DAEMON, "run", *words, str(self._daemon_dir))
        # The node may show what an earlier plugin had.
        wait_for("our device plugin", self._registered, explain=lambda: self.cluster.log(DAEMON)[-3000:])
        self.cluster.wait_allocatable(REPLICAS, RESOURCE)

    def _registered(self) -> bool:
        done = self.cluster.nri_gpu("status", "-o", "json", "--state-dir", str(self._daemon_dir))
        status = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        return any(each["registered"] for each in status.get("kubelet", {}).get("resources", ()))

    # -- the observer -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it has looked at the node."""
        words = ("--gpus", str(FOUR_GPUS), "--pod-resources", _PODRESOURCES, "--run-dir", str(self.run_dir))
        self.cluster.spawn(OBSERVER, "observe", *words, "--log-level", "DEBUG")
        wait_for("the observer", lambda: self._asked() is not None, explain=lambda: self.cluster.log(OBSERVER)[-3000:])

    def stop(self) -> None:
        self.cluster.stop(OBSERVER)

    @property
    def pid(self) -> int:
        """Of its process."""
        return int((self.cluster.root / "pid" / OBSERVER).read_text())

    def status(self) -> Object:
        """What it answers now. Raises: HarnessError: nothing."""
        found = self._asked()
        if found is None:
            raise HarnessError(f"the observer does not answer: {self.cluster.log(OBSERVER)[-3000:]}")
        return found

    def _asked(self) -> Object | None:
        """What it answers once it has looked at the node, or None."""
        done = self.cluster.nri_gpu("status", "-o", "json", "--state-dir", str(self.run_dir))
        found: Object | None = json.loads(done.stdout) if done.stdout.startswith("{") else None
        return found if found and found["observer"] and found["observer"]["looked_s"] else None

    def in_pod(self, *command: str) -> str:
        """Standard output of a command in the pod of the chart's observer."""
        return self.cluster.kubectl("exec", "-n", NAMESPACE, f"daemonset/{OBSERVER}", "--", *command)

    def chart_status(self) -> Object:
        """What the chart's observer answers."""
        found: Object = json.loads(self.in_pod("nri-gpu", "status", "-o", "json"))
        return found

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """With a process that gets no CPU at all."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def starved(self) -> Iterator[None]:
        """With a thousandth of a CPU."""
        first = host_cgroup() is Cgroup.V1
        above = Path("/sys/fs/cgroup/cpu" if first else "/sys/fs/cgroup")
        folder = Path(tempfile.mkdtemp(prefix="nri-gpu-test-", dir=above))
        before = above / "cgroup.procs"
        try:
            if first:
                (folder / "cpu.cfs_period_us").write_text("1000000")
                (folder / "cpu.cfs_quota_us").write_text("1000")
            else:
                (folder / "cpu.max").write_text("1000 1000000")
            (folder / "cgroup.procs").write_text(str(self.pid))
            yield
        finally:
            for pid in (folder / "cgroup.procs").read_text().split():
                before.write_text(pid)
            folder.rmdir()

    # -- what must not differ -----------------------------------------------------------------------------------------

    def evidence(self, *names: str) -> dict[str, str]:
        """All that Kubernetes and the runtime know of these pods, and what the kernel lets them open."""
        pods = json.loads(self.cluster.kubectl("get", "pods", *names, "-o", "json"))
        found = {"pods": json.dumps(pods, indent=1)}
        for files, spec in self.bundles():
            spec["process"]["env"].sort()  # the kubelet has its services' in the order of a Go map
            title = "/".join(spec["annotations"].get(f"{_CRI}{key}", "") for key in ("sandbox-name", "container-name"))
            found[f"bundle of {title}"] = json.dumps([files, spec], indent=1)
        found |= {f"rules of {name}": str(sorted(self.cluster.minors(name))) for name in names}
        return {name: without_chance(text) for name, text in found.items()}

    def bundles(self) -> Iterator[tuple[list[str], Object]]:
        """The names of each bundle's files, and its specification; not those of the observer's own pod."""
        for folder in sorted((self.cluster.place / "ctrd" / "state" / TASKS / "k8s.io").iterdir()):
            with suppress(FileNotFoundError):  # it went just now
                spec = json.loads((folder / "config.json").read_text())
                if spec["annotations"][f"{_CRI}sandbox-namespace"] != NAMESPACE:
                    yield sorted(each.name for each in folder.iterdir()), spec

    def operations(self) -> tuple[float, int]:
        """How long the kubelet has waited for containers to be created and started, in seconds, and for how many."""
        text = self.cluster.kubectl("get", "--raw", f"/api/v1/nodes/{self.cluster.node}/proxy/metrics")
        rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(_OPERATIONS)]
        found = {name.removeprefix(_OPERATIONS): float(value) for name, _, value in rows}
        seconds = sum(found.get(f'_sum{{operation_type="{each}_container"}}', 0.0) for each in ("create", "start"))
        return seconds, round(found.get('_count{operation_type="start_container"}', 0.0))


def allocations(status: Object) -> Mapping[tuple[str, str], tuple[str, str]]:
    """Of an observer's answer: by pod and GPU, who gave it to a container there, and its claim."""
    found = status["observer"]["allocations"]
    return {(each["pod"], each["gpu_uuid"]): (each["by"], each["claim"]) for each in found}


def without_chance(text: str) -> str:
    """A text without ids, times and the like."""
    for pattern, word in _CHANCE:
        text = pattern.sub(word, text)
    return text
