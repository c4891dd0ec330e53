"""`nri-gpu gpus`: the node's GPUs, for people and for programs; with --watch each change too, until stopped.

A running daemon is preferred: only it knows the GPUs' health, and it remembers changes between two questions. Without
one, NVML is polled until a daemon runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from loguru import logger
from msgspec import convert, to_builtins

from nri_gpu.allocation.messages import why_not
from nri_gpu.cli.client import ask, daemon_status, with_health
from nri_gpu.cli.page import Tone
from nri_gpu.cli.render import at, gpus_json, gpus_page, gpus_text, lines, matrix, show, transition_lines
from nri_gpu.daemon import logs
from nri_gpu.daemon.answers import InventoryAnswer, TransitionsAnswer
from nri_gpu.daemon.policy_file import load_policy
from nri_gpu.domain.errors import CommandError, Exit, InventoryError
from nri_gpu.domain.health import Happened, Transition, TransitionKind
from nri_gpu.domain.names import CONTROL_SOCKET, DEFAULT_STATE
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.controller import InventoryCache
from nri_gpu.inventory.node_watch import node_watch
from nri_gpu.inventory.source import NvmlSource
from nri_gpu.simulation.source import TopologySource, ask_once, source_of
from nri_gpu.system.tasks import cancelled, exit_code

ASK_S: Final = 1.0  # between two questions to the daemon
SEEK_S: Final = 2.0  # between two tries to find one
T = TypeVar("T")


def run(args: argparse.Namespace) -> int:
    """Print them. Returns 1 when none can be granted, 69 when NVML cannot be asked."""
    # A simulated node has a daemon only where one is named.
    state_dir = Path(args.state_dir or DEFAULT_STATE) if args.state_dir or not args.gpus else None
    if args.watch:
        _source(args)  # reports a fault of the policy now
        printer = Printer(as_json=args.output == "json", say=partial(print, flush=True))
        daemon = DaemonClient(state_dir / CONTROL_SOCKET if state_dir else None)
        return asyncio.run(_until_stopped(_watch(partial(_source, args), daemon, printer, simulated=bool(args.gpus))))
    try:
        inventory = ask_once(_source(args))
    except InventoryError as error:
        if not error.unlisted or args.record:
            raise
        inventory = Inventory(taken_at=time.time(), fault=str(error), unlisted=error.unlisted)
    if args.record:  # as NVML has it: a GPU that is unhealthy today is not so in a simulation
        return _record(inventory, Path(args.record), scrub=args.scrub)
    status = daemon_status(state_dir) if state_dir else None
    inventory = with_health(inventory, status) if status else inventory
    history = status.transitions if status else None
    if args.output == "json":
        print(json.dumps(gpus_json(inventory, status) | {"transitions": to_builtins(history)}, indent=1))
    elif args.topology:
        show(matrix(inventory))
    else:
        show([*gpus_page(inventory, status), *lines(transition_lines(history), Tone.FAINT)])
    if inventory.fault:
        return Exit.UNAVAILABLE
    return Exit.OK if any(not why_not(unit) for unit in inventory.units) else Exit.FINDING


def _source(args: argparse.Namespace) -> TopologySource | NvmlSource:
    """NVML, with the driver where policy says it is, or a topology file. Raises: PolicyError."""
    if args.gpus:
        return source_of(args.gpus, "/")
    driver = load_policy(args.policy, {"driver.root": args.driver_root}).driver
    return source_of(None, driver.root, driver.library_dirs)


def _record(inventory: Inventory, path: Path, *, scrub: bool) -> int:
    """Write a topology file that `--gpus` simulates."""
    from nri_gpu.simulation.record import scrubbed, topology_text

    comment = "Recorded by `nri-gpu gpus --record`" + (", UUIDs made up (--scrub)." if scrub else ".")
    text = topology_text(scrubbed(inventory) if scrub else inventory, comment)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        code = Exit.PERMISSION if isinstance(error, PermissionError) else Exit.UNAVAILABLE
        raise CommandError(code, f"{path} cannot be written: {error.strerror}") from None
    print(f"{path}: {len(inventory.gpus)} GPUs; try it with `nri-gpu gpus --gpus {path}`")
    return Exit.OK


class Printer:
    """Prints the first inventory whole and then a line for each change; as JSON, each inventory on a line."""

    def __init__(self, *, as_json: bool, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since the epoch."""
        self._as_json = as_json
        self._say = say
        self._clock = clock
        self._last: Inventory | None = None
        self._silent = False

    def publish(self, inventory: Inventory) -> None:
        """For the cache: the inventory changed."""
        if self._last is None:
            self.show(inventory)
            return
        now = self._clock()
        self.tell(inventory, [Happened.at(now, each) for each in changes(self._last, inventory)])

    def show(self, inventory: Inventory) -> None:
        self._last = inventory
        self._say(self._document(inventory, ()) if self._as_json else gpus_text(inventory))

    def tell(self, inventory: Inventory, happened: Iterable[Happened]) -> None:
        """Print changes that led to an inventory, as in `transitions` of `nri-gpu status -o json`."""
        self._last = inventory
        if self._as_json:
            self._say(self._document(inventory, happened))
            return
        for each in happened:
            self._say(f"{at(each.at_s)} {each.what}")

    def begin_anew(self) -> None:
        """The next inventory comes from another source: print it whole."""
        self._last = None

    def fault(self, sentence: str) -> None:
        """For the cache: NVML did not answer. The last inventory stays."""
        self._silent = True
        self.remark(f"not refreshed: {sentence}")

    def answered(self, inventory: Inventory, began: float) -> None:
        """For the cache: NVML answered."""
        del inventory, began
        if self._silent:
            self.remark("the driver answers again", worse=False)
        self._silent = False

    def remark(self, sentence: str, *, worse: bool = True) -> None:
        """Print a line about the source itself."""
        if not self._as_json:
            self._say(f"{at(self._clock())} {sentence}")
        elif self._last is not None:
            remark = Transition(kind=TransitionKind.ANSWER, what=sentence, worse=worse)
            self._say(self._document(self._last, [Happened.at(self._clock(), remark)]))

    def _document(self, inventory: Inventory, happened: Iterable[Happened]) -> str:
        return json.dumps(gpus_json(inventory) | {"at_s": self._clock(), "changes": to_builtins(list(happened))})


class DaemonClient:
    """The daemon at a control socket, if one runs."""

    def __init__(self, socket: Path | None) -> None:
        """socket: None to find none."""
        self._socket = socket

    async def transitions(self) -> TransitionsAnswer | None:
        """Its `transitions`; None where no daemon runs, or one that does not know the question."""
        return await self._ask("transitions", TransitionsAnswer)

    async def inventory(self) -> Inventory | None:
        """Its inventory; None likewise, or where another version wrote it."""
        answer = await self._ask("inventory", dict)
        try:
            return convert(answer, InventoryAnswer).inventory if answer else None
        except ValueError as error:
            logger.bind(fault=str(error)).warning("daemon of another version cannot be followed")
            self._socket = None
            return None

    async def _ask(self, question: str, kind: type[T]) -> T | None:
        if self._socket is None:
            return None
        try:
            return await asyncio.to_thread(ask, self._socket, question, kind)
        except (OSError, ValueError):
            return None

    async def found(self) -> None:
        """Return when a daemon answers that can be followed."""
        while True:
            if await self.transitions() is not None:
                return
            await asyncio.sleep(SEEK_S)


async def follow(daemon: DaemonClient, printer: Printer, *, pause_s: float = ASK_S) -> bool:
    """Print the daemon's changes until it stops answering. Returns whether it answered at all."""
    answer, inventory = await daemon.transitions(), await daemon.inventory()
    if answer is None or inventory is None:
        return False
    printer.show(inventory)
    since_s, number, known = answer.began_s, answer.total, answer.inventory_number
    while (answer := await daemon.transitions()) is not None:
        if answer.began_s != since_s:
            printer.remark("the daemon was restarted", worse=False)
            since_s, number = answer.began_s, 0
        news = [each for each in answer.last if each.number > number]
        if news or answer.inventory_number != known:
            inventory = await daemon.inventory() or inventory
            if lost := answer.total - number - len(news):
                printer.remark(f"{lost} more changes happened meanwhile")
            if news:
                printer.tell(inventory, news)
        number, known = answer.total, answer.inventory_number
        await asyncio.sleep(pause_s)
    return True


async def look(source: TopologySource | NvmlSource, daemon: DaemonClient, printer: Printer, *, simulated: bool) -> None:
    """Poll NVML until a daemon runs."""
    cache = InventoryCache(source, printer.publish, printer.fault)
    cache.subscribe(printer.answered)
    seeing = node_watch(source.kernel_view, cache.poke, simulated=simulated)
    parts = [asyncio.create_task(each) for each in (cache.run(), seeing.run(), daemon.found())]
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            if part.done():
                part.result()
    finally:
        await cancelled(parts)


async def _watch(
    source: Callable[[], TopologySource | NvmlSource], daemon: DaemonClient, printer: Printer, *, simulated: bool
) -> None:
    """source: made each time that no daemon runs."""
    while True:
        if await follow(daemon, printer):
            printer.remark("lost the daemon; polling NVML without health data")
        printer.begin_anew()
        await look(source(), daemon, printer, simulated=simulated)
        printer.remark("found a daemon, following it", worse=False)


async def _until_stopped(watching: Coroutine[object, object, None]) -> int:
    """Until SIGTERM or SIGINT, or until nobody reads."""
    logs.set_up("WARNING")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    working, stopping = asyncio.create_task(watching), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    broken = working.done() and isinstance(working.exception(), BrokenPipeError)
    code = Exit.OK if stop.is_set() or broken else exit_code([working])
    await cancelled([working, stopping])
    if broken:
        raise BrokenPipeError  # main handles it
    return code
