"""The fault table's rows of GPUs that are listened to: somebody listens again, and containers go on being created."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nri_gpu.domain.health import EventType
from tests.support.nvml import Act, happen
from tests.system.chain import CUT, DRIVER, INIT, LISTENER, PARTS, TWO, Chain, listens

WAIT = "nvmlEventSetWait_v2"


async def receives_events(chain: Chain) -> None:
    """GPU 1 turns bad by an event, and comes back when it was quiet for long enough."""
    happen(chain.root, 1, EventType.XID, 79)
    await chain.until("an event", "device=1", "XID 79")
    await chain.until("it to recover", "device=1")


def names(pid: int) -> tuple[str, list[str], list[str]]:
    """The kernel's name of a process, and those of its children and threads."""
    process = Path(f"/proc/{pid}")
    children = (process / f"task/{pid}/children").read_text().split()
    files = [process / "comm", *(Path(f"/proc/{each}/comm") for each in children), *process.glob("task/*/comm")]
    own, *others = (file.read_text().strip() for file in files)
    return own, others[: len(children)], others[len(children) :]


async def test_the_processes_are_found_by_name(folder: Path) -> None:
    """As `pgrep nri-gpu` and top find them: the daemon, with each of its threads, and its children."""
    chain = Chain(folder, TWO, events="all")
    async with chain.running():
        await listens(chain)
        own, children, threads = names(chain.daemon.pid)
        assert (own, {"nri-gpu-nvml", "nri-gpu-events"} - {*children}) == ("nri-gpu", set())
        assert all(name.startswith("nri-gpu") for name in threads), threads


async def test_an_xid_of_one_mig_device(folder: Path) -> None:
    chain = Chain(folder, CUT, events="all")
    chain.capabilities(1, 2)
    async with chain.running():
        await listens(chain)
        assert await chain.ask(f"device={PARTS[0].uuid}") == ""
        happen(chain.root, 1, EventType.XID, 94, part=(1, 0))
        await chain.until("its event", f"device={PARTS[0].uuid}", "XID 94")
        assert await chain.ask(f"device={PARTS[1].uuid}") == ""
    assert chain.refused == []


async def crashes(chain: Chain) -> None:
    chain.kill(LISTENER)


async def babbles(chain: Chain) -> None:
    chain.play(TWO, Act(WAIT, "babble"))
    chain.kill(LISTENER)  # the next one does
    await asyncio.to_thread(chain.daemon.wait_logged, f"sent a malformed line after {WAIT}")
    chain.play(TWO)
    await asyncio.to_thread(chain.daemon.wait_logged, "listening for GPU errors again")


async def is_loaded_again(chain: Chain) -> None:
    """By force: while somebody listens to all GPUs, a module does not unload by itself."""
    chain.play(TWO, Act(INIT, "fail", 9))
    chain.daemon.unload()
    chain.kill(LISTENER)
    await chain.until("the end of grants", "device=1", "kernel module was unloaded")
    chain.play(TWO)
    chain.daemon.load(DRIVER)


async def is_upgraded(chain: Chain) -> None:
    """Files first, then the module: no restart, and no container with one driver's files on another's module."""
    chain.upgrade("590.10")
    chain.kill(LISTENER)
    await chain.shown("the new driver", lambda said: said["node"]["driver_version"] == "590.10")


DEEDS = {
    "crashes": (crashes, ()),
    "babbles": (babbles, ()),
    "is loaded again": (is_loaded_again, ("modprobe nvidia",)),
    "is upgraded": (is_upgraded, ("modprobe nvidia", DRIVER, "590.10")),
}


@pytest.mark.parametrize(("deed", "words"), DEEDS.values(), ids=DEEDS)
async def test_a_driver_that_goes_while_somebody_listens(
    folder: Path, deed: Callable[[Chain], Awaitable[None]], words: tuple[str, ...]
) -> None:
    """Healthy GPUs are refused for as long as they have no driver, and for nothing else."""
    chain = Chain(folder, TWO, events="all")
    async with chain.running():
        await listens(chain)
        await deed(chain)
        await chain.until("grants again", "device=1")
        await listens(chain, times=2)
        await receives_events(chain)
    assert all(any(word in refusal for word in words) for refusal in chain.refused), set(chain.refused)
