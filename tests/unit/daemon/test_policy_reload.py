"""A policy file that is another one is noticed, however it became that."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from nri_gpu.daemon.policy_file import PolicyWatch
from tests.support.configmap import ConfigMapFolder
from tests.support.daemon import Launch, NriGpu
from tests.support.scripted_runtime import until

LONG_S = 60.0
NEVER = Path("/nonexistent/nri.sock")


class Counted:
    """A running watch, and how often it called."""

    def __init__(self, file: Path, look_s: float) -> None:
        self.calls = 0
        self._task = asyncio.create_task(PolicyWatch(file, self._called, look_s=look_s, settle_s=0.001).run())

    def _called(self) -> None:
        self.calls += 1

    async def saw(self, calls: int) -> None:
        await until(f"{calls} calls", lambda: self.calls == calls)

    async def __aenter__(self) -> Counted:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def watched() -> None:
    """Until somebody of this process watches a folder."""

    def watching() -> bool:
        links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - not a folder
        return any("inotify" in str(link.readlink()) for link in links if link.is_symlink())

    await until("a watch", watching)


def test_a_config_map_that_is_swapped_wakes_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        mounted = ConfigMapFolder(tmp_path / "etc", {"policy.toml": "a"})
        async with Counted(mounted.folder / "policy.toml", LONG_S) as seen:
            for calls in (1, 2):
                await watched()
                mounted.swap({"policy.toml": "another" * calls})
                await seen.saw(calls)

    asyncio.run(scenario())


def test_a_file_written_in_place_is_seen_by_looking(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "policy.toml"
        file.write_text("a")
        async with Counted(file, 0.01) as seen:
            file.write_text("longer")
            await seen.saw(1)
            file.unlink()
            await seen.saw(2)
            file.write_text("back")
            await seen.saw(3)

    asyncio.run(scenario())


def test_the_same_file_is_not_told_of(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "policy.toml"
        file.write_text("a")
        async with Counted(file, 0.001) as seen:
            for _ in range(20):
                await asyncio.sleep(0.001)
                (tmp_path / "neighbour").touch()
            assert seen.calls == 0
            file.write_text("longer")
            await seen.saw(1)

    asyncio.run(scenario())


class Watching(NriGpu):
    """The daemon as the chart starts it."""

    def program(self) -> list[str]:
        return [*super().program(), "--watch-policy"]


def test_the_daemon_takes_a_swapped_policy_up_and_keeps_the_old_over_a_broken_one(tmp_path: Path) -> None:
    mounted = ConfigMapFolder(tmp_path / "etc", {"policy.toml": ""})
    launch = Launch(tmp_path / "d", NEVER, policy=mounted.folder / "policy.toml")
    with Watching(launch) as daemon:
        daemon.wait_logged("inventory changed")
        mounted.swap({"policy.toml": '[namespaces]\nallow = ["research"]\n'})
        daemon.wait_logged("policy reloaded")
        mounted.swap({"policy.toml": "[namespaces]\nallow = 3\n"})
        assert "must be an array" in daemon.wait_logged("policy not reloaded, the old one stays")
        assert (launch.state / "policy.last").read_text() == '[namespaces]\nallow = ["research"]\n'
