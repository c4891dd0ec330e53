"""What the kubelet's device plugin adds to the daemon, with a kubelet on the other side: registered, its stream open.

With and without take turns, so that a busy machine is busy for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.effort import Effort
from bench.figures import Figure
from bench.process import Running, daemon
from nri_gpu._pb import deviceplugin_pb2 as pb
from tests.support.kubelet import Kubelet

GPU: Final = "nvidia.com/gpu"
GPUS: Final = 8
WAIT_S: Final = 30.0


class _Watch(Kubelet):
    """A kubelet that looks at its clock. registered_at: when Register had been answered."""

    registered_at = 0.0

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:  # noqa: ANN401 - grpc has no types
        answer: pb.Empty = await super().Register(request, context)
        self.registered_at = time.perf_counter()
        return answer


class KubeletThread:
    """A kubelet on a loop of its own, beside a bench that blocks."""

    def __init__(self, folder: Path) -> None:
        self.kubelet = _Watch(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self.kubelet.start)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Until something holds, looked at whenever a message came."""
        self._do(lambda: self.kubelet.wait(what, condition, WAIT_S))

    def stop(self) -> None:
        self._do(self.kubelet.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(what(), self._loop).result(WAIT_S * 2)


class Pair:
    """The daemon with and without `--kubelet`, each started as often as the other."""

    def __init__(self, folder: Path, ready: Callable[[Running], None]) -> None:
        self._folder = folder
        self._ready = ready

    def figures(self, effort: Effort) -> Iterator[Figure]:
        with_it, without, register = self._starts(effort)
        yield Figure("exec to registered with NRI, without --kubelet", without, "ms", 200, 110)
        yield Figure("  the same, with --kubelet", with_it, "ms", 260, 130)
        yield Figure("exec to registered with the kubelet", register, "ms", 400, 200)
        yield from self._standing(effort)

    def _starts(self, effort: Effort) -> tuple[float, float, float]:
        """Medians, in ms."""
        taken: dict[str, list[float]] = {"with": [], "without": [], "register": []}
        for number in range(effort.starts):
            with self._one(f"without-{number}", kubelet=None) as plugin:
                taken["without"].append(plugin.registered_s * 1e3)
            with self._kubelet_thread() as thread, self._one(f"with-{number}", kubelet=thread) as plugin:
                thread.wait("a registration", lambda: thread.kubelet.capacity(GPU) == GPUS)
                taken["with"].append(plugin.registered_s * 1e3)
                taken["register"].append((thread.kubelet.registered_at - plugin.began) * 1e3)
        median = statistics.median
        return median(taken["with"]), median(taken["without"]), median(taken["register"])

    def _standing(self, effort: Effort) -> Iterator[Figure]:
        """Memory and CPU of the two, side by side: the one offers all its GPUs on an open stream."""
        with (
            self._kubelet_thread() as thread,
            self._one("standing", kubelet=thread) as plugin,
            self._one("standing-without", kubelet=None) as bare,
        ):
            self._ready(bare)
            self._ready(plugin)
            thread.wait("healthy GPUs", lambda: len(thread.kubelet.healthy(GPU)) == GPUS)
            (rss, pss), (bare_rss, bare_pss) = plugin.memory_mib(), bare.memory_mib()
            yield Figure("resident (RSS), when ready, without --kubelet", bare_rss, "MiB", 35, 28)
            yield Figure("  the same, with --kubelet and an open stream", rss, "MiB", 50, 40)
            yield Figure("  what it adds", rss - bare_rss, "MiB", 15, 12)
            shared = "the bench is a gRPC program, too, and shares its pages"
            yield Figure("  what it adds, as PSS", pss - bare_pss, "MiB", 15, 8, shared)
            time.sleep(effort.settle_s)
            used = [(each.cpu_s(), each) for each in (plugin, bare)]
            time.sleep(effort.idle_s)
            ours, theirs = ((each.cpu_s() - before) * 1e3 / effort.idle_s for before, each in used)
            yield Figure("CPU when idle, without --kubelet", theirs, "ms/s", 0.5, 0.0)
            yield Figure("  the same, with --kubelet and an open stream", ours, "ms/s", 1.0, 0.2)

    @contextlib.contextmanager
    def _one(self, name: str, *, kubelet: KubeletThread | None) -> Iterator[Running]:
        policy = self._folder / f"{name}.toml"
        places = f'dir = "{kubelet.kubelet.dir}"\ncdi_dir = "{self._folder}/cdi"\n' if kubelet else ""
        policy.write_text(f"[kubelet]\nenabled = {str(bool(kubelet)).lower()}\n{places}")
        # Each its own state: two stand side by side.
        plugin = daemon(self._folder, name, policy=policy, state=self._folder / f"state-{name}")
        try:
            yield plugin
        finally:
            plugin.stop()

    @contextlib.contextmanager
    def _kubelet_thread(self) -> Iterator[KubeletThread]:
        with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as made:
            thread = KubeletThread(Path(made))
            try:
                yield thread
            finally:
                thread.stop()
