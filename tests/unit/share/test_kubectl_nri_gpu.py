"""`kubectl nri-gpu` beside a kubectl that answers as one of a cluster would, hangs, refuses or lies."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from nri_gpu.daemon.view import status_of
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.gpu_request import Mode
from tests.support import builders as make
from tests.support.terminal import Screen, on_terminal
from tests.support.views import CLOCK, view
from tests.unit.cli.printed import CHECKED, REPORT, node_in_trouble, report

KUBECTL: Final = Path(__file__).parents[3] / "share" / "kubectl"
PLUGIN: Final = KUBECTL / "kubectl-nri_gpu"
# kubectl's own words.
FORBIDDEN: Final = (
    'Error from server (Forbidden): pods "p2" is forbidden: User "eve" cannot create resource "pods/exec"'
)
REFUSED: Final = "Error from server: error dialing backend: dial tcp 10.0.0.2:10250: connect: connection refused"
UNLISTED: Final = 'Error from server (Forbidden): pods is forbidden: User "eve" cannot list resource "pods"'
# A kubectl. The file `told` beside it has what it prints: of a pod for `exec`, of a kind for `get`.
FAKE: Final = f"""#!{Path(sys.executable).resolve()}
import json, pathlib, sys, time
here, words = pathlib.Path(__file__).parent, sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
verb = next(word for word in words if not word.startswith("-"))
name = words[words.index("--") - 1] if verb == "exec" else words[words.index(verb) + 1]
told = json.loads((here / "told").read_text())[name]
time.sleep(told.get("hangs_s", 0))
sys.stderr.write(told.get("err", ""))
while "endless" in told:
    sys.stdout.write(told["endless"] * 4096)
sys.stdout.write(told.get("out", ""))
sys.exit(told.get("code", 0))
"""
LONG: Final = "ip-10-0-132-211.eu-central-1.compute.internal"  # a node's name
Told = Mapping[str, Any]  # what kubectl prints, and its exit code
RUNNING: Final = {"name": "nri-gpu", "state": {"running": {}}}


def pod(name: str, node: str | None = None, container: Mapping[str, Any] = RUNNING, *, ready: bool = True) -> Any:  # noqa: ANN401 - JSON
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [container]}
    return {"metadata": {"name": name}, "spec": {"nodeName": node} if node else {}, "status": status}


def status() -> dict[str, Any]:
    """A node of four GPUs: one held, one shared by two, one that fell off the bus, one free. Its runtime is away."""
    found: dict[str, Any] = _held_for(7500, to_builtins(node_in_trouble()))
    return found


def _held_for(seconds: float, document: Any) -> Any:  # noqa: ANN401 - JSON
    for gpu in document["gpus"]:
        for holder in gpu["holders"]:
            holder["since_s"] = time.time() - seconds
    return document


def quiet() -> dict[str, Any]:
    """A node that grants. A pod with the longest name there is has a GPU of it."""
    entry = make.entry(0, to=make.container(of="a" * 99), mode=Mode.EXCLUSIVE, since=CLOCK)
    found: dict[str, Any] = _held_for(7500, to_builtins(status_of(view(make.ledger(entry), make.node()))))
    return found


def answer(document: object, code: int = 0) -> Told:
    ended = f"command terminated with exit code {code}\n" if code else ""
    return {"out": json.dumps(document), "err": f'Defaulted container "nri-gpu" out of: nri-gpu\n{ended}', "code": code}


class Cluster:
    """A kubectl of two pods, p1 on node1 and p2 on node2, and what it says of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kubectl").write_text(FAKE)
        (folder / "kubectl").chmod(0o755)
        self.environment = {"PATH": f"{folder}:{KUBECTL}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}

    def tell(self, p1: Told, p2: Told, pods: Sequence[Any] | Told | None = None) -> None:
        listed = [pod("p1", "node1"), pod("p2", "node2")] if pods is None else pods
        told = listed if isinstance(listed, Mapping) else {"out": json.dumps({"items": listed})}
        (self.folder / "told").write_text(json.dumps({"pods": told, "p1": p1, "p2": p2}))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PLUGIN), *words]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)

    def on_terminal(self, *words: str, columns: int) -> Screen:
        return on_terminal(*words, columns=columns, environment=self.environment, program=(sys.executable, PLUGIN))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_one_table_of_all_nodes(cluster: Cluster) -> None:
    cluster.tell(answer(status(), 1), answer(quiet()))
    done = cluster.run("status")
    assert (done.returncode, done.stderr) == (Exit.FINDING, "")
    long = "a" * 99
    assert squeezed(done.stdout) == [
        "NODE GPU MODEL MODE HELD BY FOR",
        "node1 not connected to the runtime: gone",
        "node1 0 A100-SXM4-40GB exclusive ml/alone 2h5m",
        "node1 1 A100-SXM4-40GB shared ml/train 2h5m",
        "node1 1 A100-SXM4-40GB shared ml/other 2h5m",
        "node1 2 A100-SXM4-40GB withheld - -",
        "node1 GPU 2: bad since then because of XID 79: the GPU has fallen off the bus",
        "node1 3 A100-SXM4-40GB - - -",
        f"node2 0 A100-SXM4-40GB exclusive ml/{long} 2h5m",
        *(f"node2 {index} A100-SXM4-40GB - - -" for index in range(1, make.GPUS)),
    ]


def test_it_asks_by_the_charts_labels_with_the_callers_own_rights(cluster: Cluster) -> None:
    cluster.tell(answer(quiet()), answer(quiet()))
    cluster.run("status", "--daemon-namespace", "gpus", "--context", "prod", "--kubeconfig", "k", "--node", "node2")
    listed, asked = cluster.calls()
    access = ["--context=prod", "--kubeconfig=k"]
    selector = "--selector=app.kubernetes.io/name=nri-gpu,app.kubernetes.io/component in (daemon,observe)"
    assert listed[:6] == [*access, "get", "pods", "--namespace=gpus", selector]
    assert asked == [
        *(*access, "exec", "--namespace=gpus", "--container=nri-gpu", "p2"),
        *("--", "nri-gpu", "status", "--output", "json"),
    ]


def test_a_namespace_filters_what_is_shown(cluster: Cluster) -> None:
    mine = status()
    mine["gpus"][0]["holders"][0]["namespace"] = "research"
    cluster.tell(answer(mine, 1), {"code": 1, "err": REFUSED})
    done = cluster.run("status", "-n", "research")
    assert done.returncode == Exit.UNAVAILABLE
    assert squeezed(done.stdout) == [
        "NODE GPU MODEL MODE HELD BY FOR",
        "node1 not connected to the runtime: gone",
        "node1 0 A100-SXM4-40GB exclusive research/alone 2h5m",
        f"node2 {REFUSED}",
    ]
    seen = replace(CHECKED, unseen=())
    cluster.tell(answer(to_builtins(seen), 1), answer(to_builtins(report())))
    rows = squeezed(cluster.run("verify", "--namespace", "kube-system").stdout)
    assert rows == [
        "NODE POD CONTAINER GPUS MODE VERDICT",
        "node1 exits 1: `kubectl -n nri-gpu exec p1 -c nri-gpu -- nri-gpu verify` says why",  # another namespace's pod
        "node1 kube-system/agent node-exporter - - privileged",
    ]


def test_verify(cluster: Cluster) -> None:
    cluster.tell(answer(to_builtins(CHECKED), 1), answer(to_builtins(report())))
    done = cluster.run("verify")
    assert done.returncode == Exit.FINDING
    rows = squeezed(done.stdout)
    assert rows[:3] == [
        "NODE POD CONTAINER GPUS MODE VERDICT",
        "node1 ml/train main 1 exclusive ok",
        "node1 ml/web main - - differs",
    ]
    assert rows[3].startswith("node1 ml/web main: can open /dev/nvidia5")
    assert rows[4:6] == ["node1 ml/vm main - - not seen", "node1 ml/vm main not seen: it is a VM"]
    assert rows[-1] == "node1 not seen: container 0a1b of ml/lost, which has GPUs"


def test_doctor(cluster: Cluster) -> None:
    healthy = replace(REPORT, counts={"ok": 9, "unseen": 2}, sections=())
    cluster.tell(answer(to_builtins(REPORT), 1), answer(to_builtins(healthy)))
    done = cluster.run("doctor")
    assert done.returncode == Exit.FINDING
    command = "kubectl -n nri-gpu exec p1 -c nri-gpu -- nri-gpu doctor"
    assert squeezed(done.stdout) == [
        "NODE FINDING",
        f"node1 1 ok, 1 warning, 1 error, 1 unseen; for the fixes run: {command}",
        f"node1 ERROR nodes: {' '.join(['are missing'] * 12)}",
        "node1 WARNING guard: is away",
        "node2 9 ok, 2 unseen",
    ]


# --- a node that gives no answer, or none that can be used ------------------------------------------------------------

NOT_OURS: Final = "use the kubectl-nri_gpu of the daemon's version"


@pytest.mark.parametrize(
    ("told", "sentence"),
    {
        "refuses": (
            {"code": 1, "err": f"{FORBIDDEN}\n"},
            f"{FORBIDDEN}; to run commands in the daemons' pods you need `create pods/exec` there, which is root on "
            "each node",
        ),
        "does not reach the node": ({"code": 1, "err": f"{REFUSED}\n"}, REFUSED),
        "has no daemon": (
            {"code": 69, "err": "no answer from the daemon: is it running?\ncommand terminated with exit code 69\n"},
            "no answer from the daemon: is it running?",
        ),
        "says nothing": ({"code": 137}, "the answer of pod p2 is no JSON"),
        "ends early": ({"out": '{"schema": "nri-gpu/status/v1", '}, "the answer of pod p2 is no JSON"),
        "nests": ({"out": "[" * 100_000}, "the answer of pod p2 is no JSON"),
        "is another version": (
            answer({"schema": "nri-gpu/status/v2"}),
            f"the answer of pod p2 is nri-gpu/status/v2, not nri-gpu/status/v1: {NOT_OURS}",
        ),
        "is a list": (answer([1]), f"the answer of pod p2 is list, not nri-gpu/status/v1: {NOT_OURS}"),
        "lacks all": (
            answer({"schema": "nri-gpu/status/v1"}),
            f"the answer of pod p2 is not as expected (KeyError: 'node'): {NOT_OURS}",
        ),
        "began before time": (
            answer(_held_for(math.inf, quiet())),
            "the answer of pod p2 is not as expected (OverflowError: cannot convert float infinity to integer): "
            f"{NOT_OURS}",
        ),
        "never ends": ({"endless": "x"}, "an answer of more than 16 MiB"),
    }.values(),
)
def test_a_node_without_a_usable_answer_is_a_row(cluster: Cluster, told: Told, sentence: str) -> None:
    cluster.tell(answer(quiet()), told)
    done = cluster.run("status")
    assert (done.returncode, done.stderr) == (Exit.UNAVAILABLE, "")
    _, *rows, last = squeezed(done.stdout)
    assert len(rows) == make.GPUS
    assert last == f"node2 {sentence}"


def test_nodes_that_hang_do_not_add_up(cluster: Cluster) -> None:
    """Sixteen hang at once, and are ended after ten seconds."""
    pods = [pod("p2", f"node{number:02}") for number in range(16)]
    cluster.tell(answer(quiet()), {"hangs_s": 3600}, [*pods, pod("p1", "quick")])
    began = time.monotonic()
    done = cluster.run("status")
    assert time.monotonic() - began < 60  # one after the other: 160
    rows = squeezed(done.stdout)
    assert (done.returncode, rows[1], rows[16]) == (
        Exit.UNAVAILABLE,
        "node00 no answer within 10 s",
        "node15 no answer within 10 s",
    )
    assert rows[17].startswith("quick 0 ")


def test_what_a_node_says_is_no_command_to_the_terminal(cluster: Cluster) -> None:
    lying = quiet()
    lying["gpus"][0]["holders"][0]["pod"] = "a\x1b]0;b\x07\u202ec"
    lying["policy"]["rejected"] = "line 3\n\x1b[2Jnode1  0"
    cluster.tell(answer(lying), {"code": 1, "err": "\x1b[31mred\n"}, [pod("p1", "node1"), pod("p2", "n\x1bode")])
    done = cluster.run("status")
    assert all(letter.isprintable() for letter in done.stdout.replace("\n", ""))
    assert "ml/a?]0;b??c" in done.stdout
    assert "n?ode" in done.stdout


def test_a_finding_that_this_version_does_not_know(cluster: Cluster) -> None:
    cluster.tell(answer(quiet(), 1), answer(quiet()))
    done = cluster.run("status")
    assert done.returncode == Exit.FINDING
    command = "kubectl -n nri-gpu exec p1 -c nri-gpu -- nri-gpu status"
    assert f"node1 exits 1: `{command}` says why" in squeezed(done.stdout)


def test_a_simulated_node_says_so(cluster: Cluster) -> None:
    simulated = quiet()
    simulated["node"]["simulated"] = True
    cluster.tell(answer(simulated), answer(quiet()))
    heads, first, *_ = squeezed(cluster.run("status").stdout)
    assert (heads.split()[0], first) == ("NODE", "node1 SIMULATED: its GPUs are those of a topology file")


def crashing(reason: str) -> dict[str, Any]:
    return {"name": "nri-gpu", "state": {"waiting": {"reason": reason, "message": "back-off 10s"}}}


def test_the_pod_of_a_node_that_can_answer_is_asked(cluster: Cluster) -> None:
    """A daemon that does not run is not asked; during an upgrade a node has two pods."""
    old, new = pod("p1", "node1", ready=False), pod("p2", "node2", crashing("CrashLoopBackOff"), ready=False)
    cluster.tell(answer(quiet()), answer(quiet()), [old, new, pod("next", "node1", crashing("Pulling")), pod("lost")])
    done = cluster.run("status")
    assert {call[-6] for call in cluster.calls()[1:]} == {"p1", "lost"}
    assert done.returncode == Exit.UNAVAILABLE
    fix = "see `kubectl -n nri-gpu describe pod p2`"
    assert f"node2 the daemon does not run: CrashLoopBackOff: back-off 10s; {fix}" in squeezed(done.stdout)


@pytest.mark.parametrize(
    ("pods", "options", "sentence"),
    [
        ({"code": 1, "err": UNLISTED}, (), f"cannot be listed: {UNLISTED}; you need `list pods`"),
        ({"out": "[]"}, (), "kubectl printed no list of the pods of namespace nri-gpu"),
        ([], (), "no daemon of nri-gpu in namespace nri-gpu: --daemon-namespace names the one"),
        (None, ("--node", "node7"), "no daemon of nri-gpu on node node7: "),
    ],
)
def test_without_a_list_of_pods_it_says_why(
    cluster: Cluster,
    pods: Any,  # noqa: ANN401 - JSON
    options: tuple[str, ...],
    sentence: str,
) -> None:
    cluster.tell(answer(quiet()), answer(quiet()), pods)
    done = cluster.run("status", *options)
    assert (done.returncode, done.stdout) == (Exit.UNAVAILABLE, "")
    assert done.stderr.startswith("kubectl nri-gpu: ")
    assert sentence in done.stderr


def test_without_kubectl_it_says_so(cluster: Cluster) -> None:
    cluster.environment["PATH"] = "/nonexistent"
    done = cluster.run("status")
    assert (done.returncode, done.stderr) == (
        Exit.UNAVAILABLE,
        "kubectl nri-gpu: the pods of namespace nri-gpu cannot be listed: there is no kubectl in PATH\n",
    )


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["status", "verify", "doctor"])
@pytest.mark.parametrize("columns", [20, 60, 80, 120])
def test_it_fits_the_terminal(cluster: Cluster, verb: str, columns: int) -> None:
    documents = {"status": status(), "verify": to_builtins(CHECKED), "doctor": to_builtins(REPORT)}
    document = quiet() if verb == "status" else documents[verb]
    cluster.tell(answer(documents[verb], 1), answer(document), [pod("p1", "node1"), pod("p2", LONG)])
    lines = cluster.on_terminal(verb, columns=columns).lines
    assert max(map(len, lines)) <= max(columns, 60)
    assert any(line.startswith("ip") and "~" in line for line in lines)


@pytest.mark.parametrize(
    ("nodes", "shown"),
    [
        ((LONG, LONG.replace("211", "212")), ("ip-10-0-132-211", "ip-10-0-132-212")),
        ((LONG, "node1"), ("ip-10-0-132-~pute.internal", "node1")),
        ((f"{'a' * 30}1{'b' * 30}", f"{'a' * 30}2{'b' * 30}"), (f"{'a' * 30}1{'b' * 30}", f"{'a' * 30}2{'b' * 30}")),
    ],
)
def test_short_names_of_nodes_differ(cluster: Cluster, nodes: tuple[str, str], shown: tuple[str, str]) -> None:
    cluster.tell(answer(quiet()), answer(quiet()), [pod("p1", nodes[0]), pod("p2", nodes[1])])
    lines = cluster.on_terminal("status", columns=80).lines
    assert tuple(dict.fromkeys(line.partition(" ")[0] for line in lines[1:])) == shown


def test_a_locale_without_utf_8(cluster: Cluster) -> None:
    odd = quiet()
    odd["policy"]["rejected"] = "key größe"
    cluster.tell(answer(odd, 1), answer(quiet()))
    cluster.environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = cluster.run("status")
    assert (done.returncode, "key gr" in done.stdout) == (Exit.FINDING, True)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("",), ["status", "verify", "doctor"]),
        (("ve",), ["verify"]),
        (("status", "--n"), ["--node", "--namespace"]),
        (("doctor", "--na"), []),
        (("status", "--node", ""), ["worker-1", "worker-2"]),
        (("status", "-n", "m"), ["ml"]),
    ],
)
def test_completion(cluster: Cluster, words: tuple[str, ...], found: list[str]) -> None:
    told = {"nodes": {"out": "node/worker-1\nnode/worker-2\n"}, "namespaces": {"out": "namespace/ml\nnamespace/x\n"}}
    (cluster.folder / "told").write_text(json.dumps(told))
    command = [str(KUBECTL / "kubectl_complete-nri_gpu"), *words]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout.splitlines(), done.stderr) == ([*found, ":4"], "")


def test_python_3_9_can_read_it() -> None:
    ast.parse(PLUGIN.read_text(), feature_version=(3, 9))
    assert all(path.stat().st_mode & 0o111 for path in KUBECTL.iterdir())
