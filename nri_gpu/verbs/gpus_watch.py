"""`nri-gpu gpus --watch`: the node's GPUs, and then each change, until told to stop."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from datetime import datetime

from nri_gpu import telemetry
from nri_gpu.domain.gpu import Inventory
from nri_gpu.inventory.cache import InventoryCache
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.source import NvmlSource, TopologySource
from nri_gpu.verbs.exits import Exit
from nri_gpu.verbs.gpus import to_json, to_text
from nri_gpu.verbs.node_watch import node_watch
from nri_gpu.verbs.parts import exit_code


class Printer:
    """Prints the first inventory whole, and of each that follows what changed; as JSON each whole, on one line."""

    def __init__(self, *, as_json: bool, say: Callable[[str], None], clock: Callable[[], datetime]) -> None:
        self._as_json = as_json
        self._say = say
        self._clock = clock
        self._last: Inventory | None = None

    def publish(self, inventory: Inventory) -> None:
        """Of the cache: it differs from the one before."""
        before, self._last = self._last, inventory
        if self._as_json:
            self._say(json.dumps(to_json(inventory)))
        elif before is None:
            self._say(to_text(inventory))
        else:
            for sentence in changes(before, inventory):
                self._line(sentence)

    def fault(self, sentence: str) -> None:
        """Of the cache: the driver was asked in vain. What is known stays."""
        if not self._as_json:
            self._line(f"not refreshed: {sentence}")

    def _line(self, sentence: str) -> None:
        self._say(f"{self._clock():%H:%M:%S} {sentence}")


async def watch(source: TopologySource | NvmlSource, *, as_json: bool, simulated: bool) -> int:
    """Until SIGTERM or SIGINT, or until nobody reads."""
    telemetry.set_up("WARNING")
    printer = Printer(as_json=as_json, say=_print, clock=datetime.now)
    cache = InventoryCache(source, printer.publish, printer.fault)
    seeing = node_watch(source.glance, cache.poke, simulated=simulated)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    parts = [asyncio.create_task(each) for each in (cache.run(), seeing.run())]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({*parts, stopping}, return_when=asyncio.FIRST_COMPLETED)
    broken = any(part.done() and isinstance(part.exception(), BrokenPipeError) for part in parts)
    code = Exit.OK if stop.is_set() or broken else exit_code(parts)
    for task in (*parts, stopping):
        task.cancel()
    await asyncio.gather(*parts, stopping, return_exceptions=True)
    if broken:
        raise BrokenPipeError  # the roof knows what to do
    return code


def _print(text: str) -> None:
    print(text, flush=True)
