"""The driver process `nri-gpu dra`: the real one, beside a real daemon; kubelet and API server are stand-ins.

The API server is a process of its own, as the real one is, and is asked over TLS. What is compared takes turns.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from bench.effort import Effort
from bench.figures import Figure, percentile
from bench.process import Running, cpu_s, daemon, installed, memory_mib
from bench.wire import contest, when_ready
from nri_gpu._pb import dra_pb2 as pb
from nri_gpu.cli.ask_daemon import ask
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.api_access import by_kubeconfig
from nri_gpu.dra.api_server import ApiServer
from nri_gpu.dra.claim_object import parse_resource_claim
from nri_gpu.dra.daemon_client import DaemonClient
from nri_gpu.dra.questions import AskPrepare, AskUnprepare, PreparedName
from tests.support.api_server import StandInApiServer
from tests.support.dra_kubelet import DraKubelet
from tests.support.dra_process import kubeconfig_file, policy
from tests.support.resource_claims import DRIVER, NODE, document, resource_claim, result
from tests.support.waiting import aside, wait_for

TITLE: Final = "nri-gpu dra: the driver process, 8 GPUs (simulated); stand-ins for kubelet and API server"
GPUS: Final = 8
SOME: Final = 64  # claims that are prepared
MANY: Final = 100
TOKEN: Final = "x" * 1000  # as long as a service account's
ANSWER: Final = (1000.0, 50.0)  # ms; the aim is our own: little beside a container's start

# Each has one GPU, or looks at one for monitoring, which keeps nobody from having it.
_CLAIMS: Final = tuple(
    resource_claim(
        result(f"gpu-{at % GPUS}", adminAccess=at >= GPUS),
        uid=f"5a1c9b1e-0d5f-4a63-8f86-{at:012}",
        name=f"claim-{at}",
        owner="Pod",
    )
    for at in range(GPUS + MANY)
)
_NAMES: Final = tuple(("ml", each["metadata"]["name"], each["metadata"]["uid"]) for each in _CLAIMS)
Name = tuple[str, str, str]


def figures(effort: Effort) -> Iterator[Figure]:
    with (
        tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as folder,
        _api_server(Path(folder, "kubeconfig")) as drop,
    ):
        yield from asyncio.run(_figures(Path(folder), drop, effort))


async def _figures(folder: Path, drop: Callable[[], None], effort: Effort) -> list[Figure]:
    """drop: ends the API server's connections."""
    with_it, without = _daemon(folder, "with", dra=True), _daemon(folder, "without", dra=False)
    try:
        async with _Kubelet(folder) as kubelet:
            node = _Node(folder, kubelet)
            try:
                found = await _starts(node, effort)
                await node.start()
                found += await _standing(node, with_it, without, effort)
                found += _created(with_it, without, effort, "")
                found += await _latencies(node, drop, effort)
                return [*found, *_created(with_it, without, effort, f", {MANY} claims")]
            finally:
                node.stop()
    finally:
        with_it.stop()
        without.stop()


class _Kubelet(DraKubelet):
    """It unprepares once, and times an answer in which the claim must be well. Seconds."""

    async def prepare_s(self, claim: Name) -> float:
        return await _took_s(self.prepare(DRIVER, claim))

    async def unprepare_s(self, claim: Name) -> float:
        namespace, name, uid = claim
        request = pb.NodeUnprepareResourcesRequest(claims=[pb.Claim(namespace=namespace, name=name, uid=uid)])
        began = time.perf_counter()
        answer = await self._call(DRIVER, "NodeUnprepareResources", request, pb.NodeUnprepareResourcesResponse)
        took_s = time.perf_counter() - began
        assert not any(each.error for each in answer.claims.values()), answer
        return took_s


class _Node:
    """The driver process, as users have it, and what it talks to."""

    def __init__(self, folder: Path, kubelet: _Kubelet) -> None:
        self.kubelet = kubelet
        config, self._state = folder / "kubeconfig", folder / "state-with"
        self.daemon = DaemonClient(self._state)
        self.api_server = ApiServer(by_kubeconfig(config))
        self._log = folder / "dra.log"
        self._options = {"--state-dir": self._state, "--kubeconfig": config, "--node-name": NODE}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    async def start(self) -> float:
        """Seconds from exec until the kubelet has registered it."""
        times = self.kubelet.registered
        began = time.perf_counter()
        self._execute()
        await self.kubelet.wait("a driver", lambda: self.kubelet.registered > times)
        return time.perf_counter() - began

    def _execute(self) -> None:
        options = [str(word) for pair in self._options.items() for word in pair]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[1])}
        with self._log.open("ab") as log:
            command = installed("nri_gpu.cli.main", "dra", *options)
            self._process = subprocess.Popen(command, env=environment, stderr=log)

    async def published(self) -> None:
        """Until the daemon knows that all GPUs are on the API server."""
        control = self._state / CONTROL_SOCKET
        await aside(wait_for, "slices", lambda: ask(control, "status", DaemonStatus).dra.report.published, 30.0)

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()


async def _starts(node: _Node, effort: Effort) -> list[Figure]:
    wall_ms, used_ms = [], []
    for _ in range(effort.starts):
        wall_ms.append(await node.start() * 1e3)
        used_ms.append(cpu_s(node.pid) * 1e3)
        node.stop()
        await node.kubelet.wait("no driver", lambda: not node.kubelet.drivers)
    note = f"CPU {statistics.median(used_ms):.0f} ms; this kubelet looks each 20 ms"
    return [Figure("exec to registered with the kubelet", statistics.median(wall_ms), "ms", 400, 200, note)]


async def _standing(node: _Node, with_it: Running, without: Running, effort: Effort) -> list[Figure]:
    """Memory and CPU with nothing prepared, then memory with claims that are."""
    await node.published()
    found = [*_memory("resident (RSS), idle, 8 GPUs published", memory_mib(node.pid))]
    await asyncio.sleep(effort.settle_s)
    took_s = 2 * effort.idle_s  # as long as a question for the view is kept
    pids = (node.pid, with_it.pid, without.pid)
    before = [cpu_s(pid) for pid in pids]
    await asyncio.sleep(took_s)
    used = [(cpu_s(pid) - then) * 1e3 / took_s for pid, then in zip(pids, before, strict=True)]
    found.append(Figure(f"CPU when idle, over {took_s:.1f} s", used[0], "ms/s", 1.0, 0.2))
    found.append(Figure("  what it adds to the daemon's", used[1] - used[2], "ms/s"))
    added = with_it.memory_mib()[1] - without.memory_mib()[1]
    found.append(Figure("resident (PSS), what [dra] adds to the daemon", added, "MiB"))
    for each in _NAMES[GPUS : GPUS + SOME]:
        await node.kubelet.prepare_s(each)
    found += _memory(f"resident (RSS), {SOME} claims prepared", memory_mib(node.pid))
    for each in _NAMES[GPUS : GPUS + SOME]:
        await node.kubelet.unprepare_s(each)
    return found


def _memory(name: str, sizes: tuple[float, float]) -> Iterator[Figure]:
    yield Figure(name, sizes[0], "MiB", 50, 40)
    yield Figure("  the same as PSS", sizes[1], "MiB", note="the bench is a gRPC program, too, and shares its pages")


async def _latencies(node: _Node, drop: Callable[[], None], effort: Effort) -> list[Figure]:
    """Claims come and go, at last beside many that stay."""
    rounds = max(10, effort.requests // 8)
    found = await _one_by_one(node, rounds)
    found += await _at_once(node, rounds // 5)
    found += await _reconnecting(node, drop, rounds // 5)
    for each in _NAMES[GPUS:]:
        await node.kubelet.prepare_s(each)
    lives = [await _life(node, at) for at in range(rounds)]
    return [*found, *_lives(lives, f" beside {MANY} prepared claims")]


async def _one_by_one(node: _Node, rounds: int) -> list[Figure]:
    """Claims, and beside each the steps of which that is made, one at a time."""
    parts = ("an empty call", "the API server's GET", "the daemon prepares", "the daemon unprepares")
    whole, steps = [], []
    for at in range(rounds):
        whole.append(await _life(node, at))
        steps.append(await _steps(node, at))
    columns = zip(parts, zip(*steps, strict=True), strict=True)
    medians = (Figure(f"  of it: {name}", percentile(took_s, 50) * 1e3, "ms") for name, took_s in columns)
    return [*_lives(whole, ""), *medians]


def _lives(taken: Sequence[tuple[float, float]], beside: str) -> Iterator[Figure]:
    for what, took_s in zip(("prepare", "unprepare"), zip(*taken, strict=True), strict=True):
        yield from _percentiles(f"{what}{beside}", took_s)


async def _life(node: _Node, at: int) -> tuple[float, float]:
    """Prepared and unprepared."""
    name = _NAMES[at % GPUS]
    return await node.kubelet.prepare_s(name), await node.kubelet.unprepare_s(name)


async def _steps(node: _Node, at: int) -> tuple[float, float, float, float]:
    namespace, name, uid = _NAMES[at % GPUS]
    asked = PreparedName(ClaimUid(uid), namespace, name)
    claim = parse_resource_claim(document(_CLAIMS[at % GPUS]), asked, DRIVER, NODE)
    return (
        await _took_s(node.kubelet.prepare(DRIVER)),
        await _took_s(node.api_server.claim(namespace, name)),
        await _took_s(node.daemon.ask(AskPrepare(claim))),
        await _took_s(node.daemon.ask(AskUnprepare(claim.uid))),
    )


async def _at_once(node: _Node, rounds: int) -> list[Figure]:
    """Eight pods, each with its claim: until the last has its answer."""
    taken, names = [], _NAMES[:GPUS]
    for _ in range(rounds):
        taken.append(max(await asyncio.gather(*map(node.kubelet.prepare_s, names))))
        await asyncio.gather(*map(node.kubelet.unprepare_s, names))
    return list(_percentiles(f"prepare, {GPUS} at once, the last", taken))


async def _reconnecting(node: _Node, drop: Callable[[], None], rounds: int) -> list[Figure]:
    """As on a node where a pod comes now and then: an API server ends a connection that was idle for 90 s."""
    taken = []
    for at in range(rounds):
        drop()
        taken.append(await _life(node, at))
    return list(_lives(taken, ", on a new connection"))


def _percentiles(name: str, took_s: Sequence[float]) -> Iterator[Figure]:
    for percent in (50, 99):
        yield Figure(f"{name}, p{percent}", percentile(took_s, percent) * 1e3, "ms", *ANSWER)


def _created(with_it: Running, without: Running, effort: Effort, beside: str) -> Iterator[Figure]:
    """The daemon's own work for containers without claims, against a daemon without [dra]."""
    for name, claim in (("no annotation", ""), ("8-GPU grant", "all")):
        found = contest(with_it, without, claim, effort)
        ours, theirs = percentile(found.ours, 50), percentile(found.theirs, 50)
        note = f"{ours * 1e6:.0f} against {theirs * 1e6:.0f} us"
        yield Figure(f"request to reply, {name}{beside}, [dra] on to off", ours / theirs, "x", note=note)


def _daemon(folder: Path, name: str, *, dra: bool) -> Running:
    """Ready, on a state folder `state-NAME`."""
    text, file = policy(folder, folder / "cdi"), folder / f"{name}.toml"
    file.write_text(text if dra else text.replace("enabled = true", "enabled = false"))
    plugin = daemon(folder, name, policy=file, state=folder / f"state-{name}")
    when_ready(plugin)
    return plugin


@contextmanager
def _api_server(config: Path) -> Iterator[Callable[[], None]]:
    """What ends its connections. config: a kubeconfig that is written for it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config), daemon=True)
    process.start()
    theirs.close()
    ours.recv()

    def drop() -> None:
        ours.send(None)
        ours.recv()

    try:
        yield drop
    finally:
        ours.close()  # which it waits for
        process.join()


def _serve(bench: Connection, config: Path) -> None:
    """In the process of the API server."""
    with StandInApiServer() as server, suppress(EOFError):
        server.bookmark_s = 60.0  # as the real one's
        server.token = TOKEN
        server.add_node(NODE)
        server.claims = {(namespace, name): each for (namespace, name, _), each in zip(_NAMES, _CLAIMS, strict=True)}
        kubeconfig_file(server, config)
        while True:
            bench.send(None)
            bench.recv()
            server.drop_connections()


async def _took_s(what: Awaitable[object]) -> float:
    began = time.perf_counter()
    await what
    return time.perf_counter() - began
