"""A real Kubernetes of one node or several, driven through `cluster.sh`, a script from outside this repository.

Its folder is named by NRI_GPU_CLUSTER; KUBE_BIN, CONTAINERD_BIN and ETCD_BIN are the script's own, and name what `make
ground` built unless they are set. Everything lies on private paths in a mount namespace of each node's, where nri-gpu
runs as plain processes or by the chart's manifests. Of several nodes, `Cluster.on` has the one that all else is about.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import yaml

from deploy import image
from nri_gpu.policy.model import Policy
from tests import ground
from tests.support import packages, waiting
from tests.support.cgroup import Cgroup, host_cgroup
from tests.support.cri import Cri, CriError
from tests.support.daemon import FOUR_GPUS
from tests.support.device_filter import open_minors
from tests.support.errors import HarnessError
from tests.support.helm import documents
from tests.support.own_image import earlier_image, own_image

FOLDER: Final = "NRI_GPU_CLUSTER"
PROGRAMS: Final = {"KUBE_BIN": "kubernetes", "CONTAINERD_BIN": "containerd", "ETCD_BIN": "etcd"}  # sets of tests/ground
ROOT: Final = FOUR_GPUS.parents[2]
BUSYBOX: Final = "localhost/busybox:1"
IMAGE, TAG = "localhost/nri-gpu", "test"
NAMESPACE: Final = "nri-gpu"  # of the chart
STATE: Final = "/run/nri-gpu"  # where the default settings have it, in the cluster's mount namespace
GPU: Final = "nvidia.com/gpu"
NVIDIA: Final = 195  # the major of /dev/nvidia0 and its like
GPU_MINORS: Final = range(248)  # those above are the driver's own
DAEMON, GUARD, NEXT, DRA = "nri-gpu", "nri-gpu-guard", "nri-gpu-next", "nri-gpu-dra"
CONTROL_PLANE: Final = ("apiserver", "controller-manager", "scheduler")
READY_S: Final = 60.0
ONE_NODE: Final = os.environ.get("NODE") or "node1"  # what cluster.sh calls a single one
PORT: Final = "16443"  # of the API server; the others follow
# Fails until the kubelet answers; of several nodes, each has its own at this address.
KUBELET_ANSWERS: Final = "from urllib.request import urlopen; urlopen('http://127.0.0.1:16447/healthz', timeout=1)"
# A process that ends the cluster, also where a test was killed: `read` returns when nobody holds its input's other end.
TEARDOWN: Final = 'read -r _; "$0" teardown >/dev/null 2>&1; rm -rf "$CLUSTER_ROOT"'
MIG_NODES: Final = (1511, range(1024))  # in config/topologies/mig-a100.toml: their major, and minors
# Of the chart.
CLUSTER_WIDE: Final = (
    "deviceclasses,clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings,"
    "mutatingadmissionpolicies,mutatingadmissionpolicybindings"
)
Object = dict[str, Any]


def wait_for(
    what: str, ready: Callable[[], bool], timeout_s: float = READY_S, explain: Callable[[], str] = str
) -> None:
    """Asks seldom, for each question is a program that is started. Raises: HarnessError."""
    waiting.wait_for(what, ready, timeout_s, explain, poll_s=0.3)


def programs() -> dict[str, str]:
    """The script's variables. Raises: NotBuiltError, where a set of tests/ground is to serve and is not built."""
    return {name: os.environ.get(name) or str(ground.need(of)) for name, of in PROGRAMS.items()}


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def pod(name: str, gpus: int = 0, resource: str = GPU, annotations: Mapping[str, str] | None = None) -> Object:
    """A pod's manifest: one container of a shell that sleeps. gpus: in its limits."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(annotations or {})},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "main",
                    "image": BUSYBOX,
                    "command": ["sh", "-c", "sleep 3600 & wait"],
                    "resources": {"limits": {resource: gpus}} if gpus else {},
                }
            ],
        },
    }


class Cluster:
    """A running cluster, to use in `with`. nodes: how many; several are called node1, node2 and so on.

    Methods that concern a node are about the first, or the one that `on` names.
    """

    def __init__(self, nodes: int = 1) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="nk-"))  # short: sockets are made below it
        self.nodes = tuple(f"node{number + 1}" for number in range(nodes)) if nodes > 1 else (ONE_NODE,)
        self._script = str(Path(os.environ[FOLDER]) / "cluster.sh")
        self.environment = {**os.environ, **programs(), "CLUSTER_ROOT": str(self.root), "PORT": PORT}
        self._settle(self.nodes[0])
        found = (str(each.parent) for each in (packages.runc(), packages.busybox()))
        self.environment["PATH"] = os.pathsep.join((*found, os.environ["PATH"]))
        self.environment["PYTHONPATH"] = str(ROOT)

    def _settle(self, node: str) -> None:
        """Be about this node."""
        self.node = node
        self.environment = {**self.environment, "NODE": node}
        several = len(self.nodes) > 1
        self._at = f"@{node}" if several else ""  # ends the names of its daemons' files
        self.place = self.root / node if several else self.root  # the node's folder
        self.folder = self.root / f"given{self._at}"  # for files of tests; outlives a teardown no more than the rest
        self._cgroup = f"nri-kube-{self.root.name}/{node}" if several else "nrikube"

    def on(self, node: str) -> Self:
        """The same cluster, about this node of it."""
        there = copy.copy(self)
        there._settle(node)
        return there

    def each(self) -> Iterator[Self]:
        """The cluster about each of its nodes."""
        return map(self.on, self.nodes)

    def __enter__(self) -> Self:
        self._end = subprocess.Popen(
            ["sh", "-c", TEARDOWN, self._script], stdin=subprocess.PIPE, env=self.environment, start_new_session=True
        )
        try:
            self.verb("boot", environment={"NODES": str(len(self.nodes))})
        except HarnessError:
            self.__exit__()
            raise
        for node in self.each():
            node.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.communicate()

    @contextmanager
    def gated(self, gates: str, of_api_server: str = "") -> Iterator[None]:
        """Kubernetes with these feature gates, and afterwards as it was. of_api_server: another option."""
        folder = self.folder / "gated"
        folder.mkdir(exist_ok=True)
        plain = self.environment["KUBE_BIN"]
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"):
            more = "" if name == "kubectl" else f"--feature-gates={gates}"
            (folder / name).write_text(
                f'#!/bin/sh\nexec {plain}/{name} "$@" {more} {of_api_server if name == "kube-apiserver" else ""}\n'
            )
            (folder / name).chmod(0o755)
        try:
            self._restart_by(str(folder))
            yield
        finally:
            self._restart_by(plain)

    def _restart_by(self, programs: str) -> None:
        self.stop("kubelet", *reversed(CONTROL_PLANE))
        self.environment["KUBE_BIN"] = programs
        for name in CONTROL_PLANE:
            self.start(name)
        wait_for("the API server", lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok")
        self.start("kubelet")
        wait_for("the node", lambda: '"Ready"' in self.kubectl("get", "nodes", "-o", "json"))

    # -- the script ---------------------------------------------------------------------------------------------------

    def verb(
        self, *words: str, given: str = "", check: bool = True, environment: Mapping[str, str] | None = None
    ) -> str:
        """One verb of cluster.sh. Returns its standard output. Raises: HarnessError."""
        # Not by pipes: a daemon that was started keeps the ends of them.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(
                [self._script, *words], input=given.encode(), stdout=out, stderr=err,
                env=self.environment | dict(environment or {}), check=False,
            )  # fmt: skip
            out.seek(0), err.seek(0)
            if check and done.returncode:
                raise HarnessError(f"cluster.sh {' '.join(words)[:200]}: {err.read()[-2000:]}")
            return out.read()

    def kubectl(self, *words: str, given: str = "", check: bool = True) -> str:
        """Standard output of kubectl, as admin. Raises: HarnessError."""
        return self.verb("kubectl", *words, given=given, check=check)

    def start(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        """A daemon that was stopped or killed. environment: for cluster.sh."""

        def up() -> bool:
            self.verb("start", name, environment=environment)  # as systemd does where it ended: a kubelet may, at first
            return name != "kubelet" or self.enter(sys.executable, "-c", KUBELET_ANSWERS).returncode == 0

        wait_for(name, up)

    def kill(self, *names: str) -> None:
        """SIGKILL."""
        for name in names:
            self.verb("kill", name)

    def stop(self, *names: str) -> None:
        """SIGTERM, and wait for the end."""
        for name in names:
            self.verb("stop", name)

    def known(self, name: str) -> bool:
        """Whether it can be started: one of ours was run before."""
        return not name.startswith("nri-gpu") or (self.root / "pid" / f"{name}{self._at}.cmd").exists()

    def forget(self, name: str) -> None:
        """A daemon that was spawned is one no more."""
        (self.root / "pid" / f"{name}{self._at}.cmd").unlink(missing_ok=True)

    def pid(self, name: str) -> int:
        """Of a daemon that runs."""
        return int((self.root / "pid" / f"{name}{self._at}").read_text())

    def log(self, name: str) -> str:
        """Of a daemon."""
        path = self.root / "log" / f"{name}{self._at}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- nri-gpu as processes -----------------------------------------------------------------------------------------

    def nri_gpu(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One verb of nri-gpu in the node's mount namespace."""
        return self.enter(sys.executable, "-m", "nri_gpu", *words)

    def enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in the node's namespaces."""
        return subprocess.run(
            [self._script, "enter", *command], capture_output=True, text=True, env=self.environment, check=False
        )

    def run_daemon(self, topology: Path | str = FOUR_GPUS, policy: str = "", *options: str) -> None:
        """`nri-gpu run --kubelet`, registered with both sides. topology: a file, or the text of one."""
        gpus = topology if isinstance(topology, Path) else self.file("topology.toml", topology)
        words = ["--gpus", str(gpus), "--socket", Policy.default().plugin.socket, "--kubelet", "--log-level", "DEBUG"]
        words += ["--policy", str(self.policy(policy))]
        self.spawn(DAEMON, "run", *words, *options)
        self.wait_ready()

    def run_successor(self, name: str) -> None:
        """The daemon that was run last, once more and under another name: it stands by."""
        words = (self.root / "pid" / f"{DAEMON}{self._at}.cmd").read_text().rstrip("\0").split("\0")
        self.verb("spawn", name, *words, *([] if "--stand-by" in words else ["--stand-by"]))
        wait_for("a successor", lambda: "standing by" in self.log(name).rpartition("stopped")[2])

    def run_guard(self) -> None:
        """`nri-gpu guard`, connected."""
        own = str(self.folder / "guard")
        self.spawn(GUARD, "guard", "--run-dir", own, "--policy", str(self.policy("")))
        wait_for("the guard", lambda: self.nri_gpu("status", "--guard", own).returncode == 0)

    def wait_ready(self) -> None:
        """Until the daemon can grant."""
        ready = lambda: self.nri_gpu("status").returncode == 0  # noqa: E731
        wait_for("nri-gpu", ready, explain=lambda: self.log(DAEMON)[-3000:])

    def file(self, name: str, text: str) -> Path:
        """One for a daemon to read."""
        path = self.folder / name
        path.write_text(text)
        return path

    @property
    def cdi(self) -> Path:
        """Where this containerd looks for CDI specifications."""
        return self.place / "ctrd" / "cdi"

    def policy(self, text: str) -> Path:
        """A policy file of that text, whose CDI specifications this containerd reads."""
        table, line = "[kubelet]\n", f'cdi_dir = "{self.cdi}"\n'
        whole = text.replace(table, table + line) if table in text else f"{text}\n{table}{line}"
        return self.file("policy.toml", whole)

    def spawn(self, name: str, *words: str) -> None:
        """A verb of nri-gpu as a daemon of the cluster's."""
        (self.root / "log" / f"{name}{self._at}.log").unlink(missing_ok=True)
        self.verb("spawn", name, sys.executable, "-m", "nri_gpu", *words)

    # -- nri-gpu by the chart -----------------------------------------------------------------------------------------

    def chart_values(self) -> Object:
        """What the chart needs here, and four simulated GPUs."""
        return {
            "image": {"repository": IMAGE, "tag": TAG},
            "simulation": FOUR_GPUS.read_text(),
            "affinity": {"nodeAffinity": None},
            "paths": {"cdi": "/run/cdi"},  # each node's own
            "metrics": {"enabled": True},
        }

    @property
    def admin(self) -> Path:
        """The administrator's kubeconfig."""
        return self.root / "pki" / "admin.conf"

    @property
    def kubelet_credentials(self) -> Path:
        """The kubeconfig of the node's kubelet."""
        return self.root / "pki" / f"kubelet{self._at}.conf"

    @property
    def reach(self) -> Object:
        """A patch of the DRA driver's DaemonSet, so that its pods find the API server: no proxy leads to it here."""
        server = self.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}")
        parts = urlsplit(server)
        address = {"KUBERNETES_SERVICE_HOST": parts.hostname, "KUBERNETES_SERVICE_PORT": str(parts.port)}
        environment = [{"name": name, "value": value} for name, value in address.items()]
        spec = {"hostNetwork": True, "containers": [{"name": "dra", "env": environment}]}
        return {"spec": {"template": {"spec": spec}}}

    def import_image(self, earlier: str = "") -> None:
        """The checkout's own, on every node. earlier: a commit whose program is there, too, by the tag of that name."""
        for node in self.each():
            node.verb("ctr", "images", "import", str(own_image()))
            node.verb("ctr", "images", "tag", "--force", image.NAME, f"{IMAGE}:{TAG}")
            if earlier:
                node.verb("ctr", "images", "import", str(earlier_image(earlier, f"{IMAGE}:{earlier}")))

    def install(self, patch: Object | None = None, **changed: Any) -> None:  # noqa: ANN401 - the chart's values
        """The chart's manifests, as `kubectl apply` puts them there, until its pods are ready.

        patch: of the DRA driver's DaemonSet.
        """
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self.apply(namespace, *documents(**self.chart_values(), **changed))
        if patch:
            self.kubectl("patch", "daemonset", DRA, "-n", NAMESPACE, "-p", json.dumps(patch))

        def ready() -> bool:
            found = self.get("daemonsets", "", "-n", NAMESPACE)
            return all(each["status"].get("numberReady") == len(self.nodes) for each in found)

        wait_for("the chart's pods", ready, 90, lambda: self.kubectl("describe", "pods", "-n", NAMESPACE))

    # -- objects ------------------------------------------------------------------------------------------------------

    def apply(self, *objects: Mapping[str, Any], options: Sequence[str] = ()) -> str:
        """What kubectl says, warnings too. Raises: HarnessError: it was refused."""
        command = [self._script, "kubectl", "apply", "-f", "-", *options]
        text = yaml.safe_dump_all(objects)
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=self.environment, check=False)
        if done.returncode:
            raise HarnessError(f"kubectl apply: {done.stderr[-2000:]}")
        return done.stdout + done.stderr

    def get(self, kind: str, name: str = "", *options: str) -> Any:  # noqa: ANN401 - parsed JSON
        """One object, or a list's items; None where there is none of that name."""
        text = self.kubectl("get", kind, *([name] if name else []), *options, "-o", "json", "--ignore-not-found")
        found = json.loads(text) if text.strip() else None
        if name:
            return found
        return found["items"] if found else []

    def allocatable(self, resource: str = GPU) -> int:
        """What the scheduler may hand out on the node."""
        return int(self.get("node", self.node)["status"]["allocatable"].get(resource, 0))

    def wait_allocatable(self, count: int, resource: str = GPU) -> None:
        found = lambda: self.allocatable(resource) == count  # noqa: E731
        wait_for(f"{count} {resource}", found, explain=lambda: self.log(DAEMON)[-3000:])

    def wait_phase(self, name: str, phase: str = "Running", *, restarts: int = 0) -> Object:
        """Until a pod is in that phase, its containers started so often again."""

        def there() -> bool:
            found = self.get("pod", name)
            statuses = (found or {}).get("status", {}).get("containerStatuses", [{}])
            started = all(each.get("started") and each["restartCount"] >= restarts for each in statuses)
            return bool(found) and found["status"].get("phase") == phase and (phase != "Running" or started)

        wait_for(f"pod {name} to be {phase}", there, explain=lambda: self.said_of(name))
        found: Object = self.get("pod", name)
        return found

    def wait_running(self, *names: str) -> None:
        """Until these pods run."""
        for name in names:
            self.wait_phase(name)

    def jobs_done(self) -> int:
        return sum(bool(job["status"].get("succeeded")) for job in self.get("jobs"))

    def said_of(self, name: str) -> str:
        """Status and events of a pod, as people read them."""
        return self.kubectl("describe", "pod", name, check=False)

    def wait_said(self, name: str, text: str) -> None:
        """Until a pod's status or an event of it has that text."""
        wait_for(f"{text!r} of pod {name}", lambda: text in self.said_of(name), explain=lambda: self.said_of(name))

    def said_of_node(self) -> str:
        """Status and events of the node, as people read them."""
        return self.kubectl("describe", "node", "node1", check=False)

    def wait_node_said(self, pattern: str) -> None:
        """Until the node's description has that, by a regular expression."""
        wait_for(
            f"{pattern!r} of the node", lambda: bool(re.search(pattern, self.said_of_node())), explain=self.said_of_node
        )

    # -- what containers really may -----------------------------------------------------------------------------------

    def container_id(self, name: str, container: str = "main") -> str:
        """Of the attempt at a pod's container that the kubelet made last."""
        found = self.get("pod", name)["status"]
        lists = (found["containerStatuses"], found.get("ephemeralContainerStatuses", ()))
        statuses = {each["name"]: each for each in chain.from_iterable(lists)}
        return str(statuses[container]["containerID"]).removeprefix("containerd://")

    def pids(self, name: str, container: str = "main") -> list[int]:
        """Of the processes of a pod's container, the first first."""
        wanted = self.container_id(name, container)
        rows = [line.split() for line in self.verb("ctr", "task", "ls").splitlines()]
        return [int(pid) for found, pid, *_ in rows if found == wanted]

    def minors(
        self, name: str, major: int = NVIDIA, among: range = GPU_MINORS, container: str = "main"
    ) -> frozenset[int]:
        """Which of a major's nodes the kernel lets a pod's container open."""
        (pid,) = self.pids(name, container)
        return open_minors(host_cgroup(), self.cgroup(pid), major, among)

    def check_mig(self) -> None:
        """Pods `slice` and `other` have a MIG device of GPU 0 each, and `whole` has GPU 1, of the MIG topology."""
        self.wait_running("slice", "other", "whole")
        slices = [self.minors(name, *MIG_NODES) for name in ("slice", "other")]
        assert [len(minors) for minors in slices] == [2, 2]  # a GPU instance's and a compute instance's
        assert slices[0].isdisjoint(slices[1])
        assert self.minors("whole", *MIG_NODES) == frozenset()
        assert self.minors("whole") == {1}

    @staticmethod
    def cgroup(pid: int, controller: str = "devices") -> Path:
        """The folder of a process's cgroup; on v2 there is one, whatever the controller."""
        hierarchy = controller if host_cgroup() is Cgroup.V1 else ""
        rows = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        (inside,) = (path for _, names, path in rows if hierarchy in names.split(","))
        return Path("/sys/fs/cgroup", hierarchy, inside.lstrip("/"))

    # -- order --------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """No pod, and nothing of nri-gpu."""
        for node in self.each():
            for name in ("containerd", "kubelet"):
                node.start(name)
        # Not by force: the kubelet says when a pod is gone, and counts its GPUs until then.
        self.kubectl(
            "delete", "jobs,daemonsets,pods", "--all", "--all-namespaces", f"--timeout={READY_S}s", check=False
        )
        wait_for("no pod", lambda: not self.get("pods", "", "-A"))
        for node in self.each():
            wait_for("no container", node._idle)
        # A container that containerd's end left created stays listed until the kubelet collects its pod. With the state
        # folder goes the key of its signed grant, so that the next daemon would take it for another component's.
        for node in self.each():
            wait_for("no pod in containerd", node._removed)
        # Of the chart, what lies in no namespace, or in `default`, and its own: Helm takes over nothing that it has not
        # made.
        self.kubectl("delete", "namespace", DAEMON, "--ignore-not-found", f"--timeout={READY_S}s")
        self.kubectl("delete", f"{CLUSTER_WIDE},roles,rolebindings", "-l", "app.kubernetes.io/name=nri-gpu")
        self.kubectl("delete", "events", "--field-selector=reportingComponent=nri-gpu")
        self.kubectl("delete", "resourceslices", "--all")
        for node in self.each():
            node.stop(GUARD, DAEMON, NEXT, DRA)
            for folder in ("run-nri-gpu", "lib-nri-gpu"):
                _empty(node.place / folder)
        for path in (self.root / "pid").glob("nri-gpu*.cmd"):
            path.unlink()

    def _removed(self) -> bool:
        """Whether no pod is left; False where the kubelet removes the same one at this moment."""
        with suppress(CriError), Cri(self.place / "ctrd.sock") as runtime:
            runtime.remove_all()
            return True
        return False

    def kill_all(self) -> None:
        """A node that loses its power: every daemon and container of it dies at once, and /run is empty after it."""
        self.kill("kubelet", "containerd", DAEMON, GUARD, DRA)
        for pid in self._below_the_cgroup():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        wait_for("their end", lambda: not list(self._below_the_cgroup()))
        _empty(self.place / "run-nri-gpu")

    def boot_again(self) -> None:
        """After `kill_all`, in the order of the units: the kubelet comes last."""
        for name in ("containerd", DAEMON):
            self.start(name)
        self.wait_ready()
        for name in (DRA, "kubelet"):
            if self.known(name):
                self.start(name)

    def _below_the_cgroup(self) -> Iterator[int]:
        """Processes of pods."""
        for procs in Path("/sys/fs/cgroup").glob(f"**/{self._cgroup}/**/cgroup.procs"):
            with suppress(OSError):
                yield from {int(each) for each in procs.read_text().split()}

    def _idle(self) -> bool:
        """Whether no container runs on the node."""
        return not self.verb("ctr", "task", "ls", "-q").split()


class Uses:
    """Which GPU each pod had and from when to when, on one clock for all: written by a shell with no other program."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder

    def written_by(self, spec: Object, lasts_s: float) -> None:
        """Let the container of a pod's spec use its GPUs for so long, write it down and end."""
        spec["volumes"] = [{"name": "record", "hostPath": {"path": str(self._folder)}}]
        spec["containers"][0]["volumeMounts"] = [{"name": "record", "mountPath": "/record"}]
        use = f"sleep {lasts_s}; read ended rest </proc/uptime; echo $node $began $ended >>/record/uses"
        script = f"read began rest </proc/uptime; for node in /dev/nvidia[0-9]*; do {use}; done"
        spec["containers"][0]["command"] = ["sh", "-c", script]

    def nodes(self) -> list[str]:
        """The device node of each use. Raises: AssertionError: two had one at once."""
        uses = [line.split() for line in (self._folder / "uses").read_text().splitlines()]
        for node in {node for node, *_ in uses}:
            times = sorted((float(began), float(ended)) for each, began, ended in uses if each == node)
            assert all(ended <= began for (_, ended), (began, _) in pairwise(times)), (node, times)
        return [node for node, *_ in uses]


def jobs(names: Sequence[str], command: str) -> list[Object]:
    """A Job each of one pod with one GPU, tried again for ever. command: a shell's."""
    made: list[Object] = []
    for name in names:
        spec = pod(name, 1)["spec"] | {"restartPolicy": "Never"}
        spec["containers"][0]["command"] = ["sh", "-c", command]
        metadata = {"name": name}
        body = {"backoffLimit": 1000, "template": {"spec": spec}}
        made.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body})
    return made
