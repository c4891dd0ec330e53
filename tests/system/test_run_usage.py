"""What GPUs do, on the running daemon: while somebody asks, by a process of its own, which delays nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import ask
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.system.proc import has_hosts_pids
from tests.support import nri_messages as nri
from tests.support.holding import cgroup_of, holding, into
from tests.support.nvml import Act, FakeProcess, FakeUse, use
from tests.support.schemas import conforming
from tests.system.chain import PATIENCE_S, PROMPT_S, TWO, Chain

SAMPLER = "nri_gpu.usage.nvml_samples"
SAMPLED = "nvmlDeviceGetUtilizationRates"
ID = "ab" * 32
AGE_S = 5.0
needs_hosts_pids = pytest.mark.skipif(not has_hosts_pids(), reason="needs the host's PIDs")


@pytest.fixture
def chain(folder: Path) -> Chain:
    return Chain(folder, TWO, refresh_s=3600)


async def ask_for(chain: Chain, question: str) -> Mapping[str, Any]:
    return await asyncio.to_thread(ask, chain.launch.state / CONTROL_SOCKET, question, dict)


async def hold(chain: Chain, index: int = 0) -> None:
    """A container has that GPU from now on."""
    await chain.until("the first grant", f"device={index}")
    of = nri.asking(f"device={index}", "train")
    made = nri.container(of)
    made.id = ID
    await chain.create(of, made)


def _utilization(said: Mapping[str, Any]) -> object:
    """That of the first GPU's holder, which the first sample does not have."""
    usage = said["gpus"][0]["holders"][0]["usage"]
    return usage and usage["utilization_percent"]


@needs_hosts_pids
async def test_what_a_holder_does_while_somebody_asks(chain: Chain, tmp_path: Path) -> None:
    with cgroup_of(f"kubepods/{ID}") as cgroup, holding(tmp_path, before=into(cgroup)) as process:
        gpu = FakeUse(used_bytes=3, total_bytes=9, utilization=50, processes=(FakeProcess(process.pid, 2, 50),))
        use(chain.root, gpu)
        async with chain.connected():
            await hold(chain)
            began = time.monotonic()
            await ask_for(chain, "usage")
            assert time.monotonic() - began < PROMPT_S
            said = await chain.shown("a sample", _utilization)
            assert said["sampling"] == {"enabled": True, "each_second": True, "fault": ""}
            assert said["gpus"][0]["usage"]["memory_used_bytes"] == 3
            [holder] = said["gpus"][0]["holders"]
            assert holder["usage"] == {
                "memory_bytes": 2,
                "utilization_percent": 50,
                "processes": 1,
                "idle": None,
            }
            [found] = (await ask_for(chain, "processes"))["processes"]
            assert (found["pid"], found["pod"], found["container"]) == (process.pid, "train", "main")
            assert found["comm"].startswith("python")
            printed = await asyncio.to_thread(chain.daemon.verb, "status", "--processes", "-o", "json")
            assert conforming(json.loads(printed.stdout))["processes"] == [found]
            page = await asyncio.to_thread(chain.daemon.verb, "status", "--processes")
            assert page.stdout.splitlines()[-1].split()[:2] == ["0", str(process.pid)]
            assert "comm" not in json.dumps(said), "the bundle of `doctor` has the status"
            use(chain.root, replace(gpu, utilization=0, processes=(FakeProcess(process.pid, 2, 0),)))
            await chain.shown("its end", lambda said: not said["sampling"]["each_second"])
            assert chain.children(SAMPLER) == []


@needs_hosts_pids
async def test_a_holder_that_does_nothing_is_idle(chain: Chain) -> None:
    use(chain.root, FakeUse())
    async with chain.connected():
        await hold(chain)
        for _ in range(3):
            await ask_for(chain, "usage")
            await asyncio.sleep(1)
        said = await chain.shown("it", lambda said: said["gpus"][0]["holders"][0]["usage"]["idle"])
        idle = said["gpus"][0]["holders"][0]["usage"]["idle"]
        assert idle["no_process"]
        assert idle["samples"] >= 2
        assert time.time() - idle["since_s"] < PATIENCE_S


@pytest.mark.parametrize("function", [SAMPLED, "nvmlDeviceGetTemperature", "nvmlDeviceGetHandleByPciBusId_v2"])
async def test_a_call_that_hangs_delays_nobody(folder: Path, function: str) -> None:
    """A refresh that samples too is answered before its sample; who asks waits for a moment only."""
    chain = Chain(folder, TWO, Act(function, "hang"), refresh_s=1)
    async with chain.running():
        await hold(chain, 1)
        until_s, slowest_s = time.monotonic() + 8, 0.0
        while time.monotonic() < until_s:
            began = time.monotonic()
            await ask_for(chain, "usage")
            said = await chain.status()
            slowest_s = max(slowest_s, time.monotonic() - began)
            assert said["node"]["inventory_fault"] == ""
            assert said["node"]["inventory_age_s"] < AGE_S
        assert slowest_s < PROMPT_S
        assert "did not return within" in said["sampling"]["fault"]
        assert said["gpus"][1]["unavailable"].startswith("held"), "nothing acts on a sample"
    assert chain.refused == []


@pytest.mark.parametrize("words", [["status", "--probe"], ["status", "--alive"], ["doctor"], ["gpus"]])
async def test_probes_and_other_verbs_start_no_samples(chain: Chain, words: list[str]) -> None:
    async with chain.connected():
        await hold(chain)
        await asyncio.to_thread(chain.daemon.verb, *words)
        assert not (await chain.status())["sampling"]["each_second"]
        assert chain.children(SAMPLER) == []
        done = await asyncio.to_thread(chain.daemon.verb, "status")
        assert done.returncode == 0, done.stdout
        await chain.shown("samples", lambda said: said["sampling"]["each_second"])


async def test_without_samples_there_is_no_process_and_no_call(chain: Chain) -> None:
    policy = chain.launch.policy
    assert policy
    policy.write_text(policy.read_text() + "[usage]\nsamples = false\n")
    async with chain.connected():
        await hold(chain)
        await ask_for(chain, "usage")
        said = await chain.status()
        assert said["sampling"] == {"enabled": False, "each_second": False, "fault": ""}
        assert said["gpus"][0]["usage"] is None
        assert SAMPLED not in chain.calls()


def scrape(path: Path) -> str:
    """All that the metrics' socket answers."""
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(path))
        one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        return b"".join(iter(lambda: one.recv(1 << 16), b"")).decode()


@pytest.mark.parametrize("usage", [True, False])
async def test_a_scrape_asks_where_the_policy_says_so(chain: Chain, folder: Path, usage: bool) -> None:
    policy, path = chain.launch.policy, folder / "metrics.sock"
    assert policy
    words = f'[metrics]\nlisten = "{path}"\nusage = {str(usage).lower()}\n'
    policy.write_text(policy.read_text() + words)
    use(chain.root, FakeUse())
    async with chain.connected():
        await hold(chain)
        text = await asyncio.to_thread(scrape, path)
        assert ("nri_gpu_gpu_memory_used_bytes{" in text) == usage
        assert (await chain.status())["sampling"]["each_second"] == usage
