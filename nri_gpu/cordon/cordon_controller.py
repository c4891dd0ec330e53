"""The controller of GPUs that root takes out of use: root's commands, what ends them, and their file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.cordon.cordon_file import CordonError, CordonRecord, Records, cordons_of, read_cordons, write_cordons
from nri_gpu.decision.cordoned import devices_among, given_after, given_now
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.errors import cause_of
from nri_gpu.domain.gpu import Gpu, GpuUuid, gpu_names
from nri_gpu.domain.node import Inventory
from nri_gpu.health.resets import AwaitedReset
from nri_gpu.ledger.ledger import without
from nri_gpu.ledger.reservations import OPEN_S
from nri_gpu.system.state import NodeState
from nri_gpu.system.storage import boot_id
from nri_gpu.system.tasks import LogOnce, set_within

TICK_S: Final = 5.0
WHY_MAX: Final = 200  # characters
BY_MAX: Final = 64  # characters
UNTIL_RESET: Final = "until-reset"  # words of the command
UNTIL_ROOT: Final = "until-root"
BAD_TEXT: Final = f"the reason is 1 to {WHY_MAX} printable ASCII characters on one line"
NO_GPU: Final = "name a GPU by UUID, index or PCI address, see nri-gpu status"


class CommandOutcome(Struct, frozen=True):
    """The outcome of a command. gpu_uuid: empty where there is no such GPU. fault: why nothing changed, or empty.

    withheld: why the GPU is granted to nobody all the same, after it was taken back into use; or empty.
    """

    gpu_uuid: str = ""
    fault: str = ""
    withheld: str = ""


class CordonController:
    """The controller of one daemon.

    folder: of the file, or a sentence why there is none. told: takes each beginning and end: GPU, its record, why it
    ended or empty. module_load, boot: which load of the driver's kernel module, and of the kernel, this is. recalled_s:
    for how long after the start what the file has of the kubelet's devices counts while the ledger does not know it.
    tick_s: between two looks at that, or two tries to write.
    """

    def __init__(
        self,
        folder: Path | str,
        node_state: NodeState,
        *,
        told: Callable[[GpuUuid, CordonRecord, str], None],
        module_load: Callable[[], str] = str,
        boot: Callable[[], str] = boot_id,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        recalled_s: float = OPEN_S,
        tick_s: float = TICK_S,
    ) -> None:
        self._folder = folder
        self._node_state = node_state
        self._told = told
        self._module_load = module_load
        self._boot = boot
        self._wall = wall
        self._monotonic = monotonic
        self._tick_s = tick_s
        self.records: Records = {}
        self.fault = ""  # why nobody can tell which GPUs are out of use
        self._all_given: Mapping[GpuUuid, frozenset[str]] = {}  # while nobody can
        self._written: Records = {}
        self._turn = asyncio.Lock()  # of who writes
        self._changed = asyncio.Event()
        self._faults = LogOnce()
        self._recalled: frozenset[str] = frozenset()  # devices of the file that the ledger has not shown yet
        self._recalled_until = monotonic() + recalled_s

    def begin(self) -> None:
        """Read the file, from the running event loop and before any GPU is known."""
        self._take(self._read())

    async def read_again(self) -> None:
        """Read the file again, if it could not be read."""
        async with self._turn:
            if self.fault:
                self._take(await asyncio.to_thread(self._read))

    def _read(self) -> Records | CordonError:
        try:
            return {} if isinstance(self._folder, str) else read_cordons(self._folder)
        except CordonError as error:
            return error

    def _take(self, found: Records | CordonError) -> None:
        if isinstance(found, CordonError):
            if str(found) != self.fault:
                logger.bind(fault=str(found)).error("GPUs out of use not known, so nothing new is granted")
            self.fault, ledger = str(found), self._node_state.ledger
            self._all_given = {uuid: given_now(ledger, uuid) for uuid in ledger.usage()}
        else:
            self.records, self._written, self.fault, self._all_given = found, found, "", {}
            given = (ids for record in found.values() for ids in record.given.values())
            self._recalled = devices_among(chain.from_iterable(given))
        self._publish()

    async def cordon(self, line: str) -> CommandOutcome:
        """Take a GPU out of use: `GPU WORD BY WHY`, as `command` makes it."""
        word, until, by, why = (*line.split(" ", 3), "", "", "", "")[:4]
        if is_bad_text(why) or until not in (UNTIL_RESET, UNTIL_ROOT) or is_bad_text(by, BY_MAX):
            return CommandOutcome(fault=BAD_TEXT)
        async with self._turn:
            gpu = self._find(word)
            if gpu is None or isinstance(self._folder, str) or self.fault:
                return CommandOutcome(
                    gpu.uuid if gpu else "", self._hindrance() or f"this node has no GPU {word}: {NO_GPU}"
                )
            if known := self.records.get(gpu.uuid):
                return CommandOutcome(gpu.uuid, f"it is out of use already, by {known.by}: {known.why}")
            ledger = self._node_state.ledger
            reset = AwaitedReset().after(gpu, self._module_load(), self._boot()) if until == UNTIL_RESET else None
            given = {uuid: given_now(ledger, uuid) for uuid in (gpu.uuid, *(part.uuid for part in gpu.mig))}
            record = CordonRecord(at_s=self._wall(), by=by, why=why, given=given, reset=reset)
            self._use({**self.records, gpu.uuid: record})  # nothing new is granted while the disk takes its time
            if fault := await self._write(self.records):
                self._use(without(self.records, {gpu.uuid}))
                return CommandOutcome(gpu.uuid, fault)
            self._told(gpu.uuid, record, "")
            return CommandOutcome(gpu.uuid)

    async def uncordon(self, line: str) -> CommandOutcome:
        """Take a GPU back into use: `GPU BY`. Whoever may have it by then gets it."""
        word, _, by = line.partition(" ")
        async with self._turn:
            gpu = self._find(word)
            uuid = gpu.uuid if gpu else next((each for each in self.records if each == word), GpuUuid(""))
            if isinstance(self._folder, str) or self.fault or not uuid:
                return CommandOutcome(uuid, self._hindrance() or f"this node has no GPU {word}: {NO_GPU}")
            if uuid not in self.records:
                return CommandOutcome(uuid, "it was not taken out of use, so nothing changed")
            if fault := await self._write(without(self.records, {uuid})):
                return CommandOutcome(uuid, fault)
            self._end(uuid, f"by {by or 'root'}")
            gpu = self._find(uuid)
            return CommandOutcome(uuid, withheld=why_not(gpu) if gpu else "")

    def repaired(self, uuid: str) -> bool:
        """Take root's word that a GPU was reset. Return whether that was awaited."""
        record = self.records.get(GpuUuid(uuid))
        awaited = record is not None and record.reset is not None
        if awaited:
            self._end(GpuUuid(uuid), "root reported a reset")
        return awaited

    def looked(self, inventory: Inventory, _: float) -> None:
        """End what waits for a reset that the driver's answer proves."""
        for gpu in inventory.gpus:
            record = self.records.get(gpu.uuid)
            if record is None or record.reset is None:
                continue
            reset = record.reset.after(gpu, self._module_load(), self._boot())
            if reset is None:
                self._end(gpu.uuid, "its reset is proven")
            elif reset != record.reset:
                self._change({gpu.uuid: replace(record, reset=reset)})

    def follow_ledger(self) -> None:
        """Note what has the GPUs by now, and which of the kubelet's devices no pod has any more."""
        ledger, node = self._node_state.ledger, self._node_state.node
        if self.fault:
            units = ledger.usage().keys() | self._all_given.keys()
            self._all_given = {uuid: self._given(uuid, self._all_given.get(uuid, frozenset())) for uuid in units}
            self._publish()
        parts = {gpu.uuid: [part.uuid for part in gpu.mig] for gpu in node.gpus}
        found = {}
        for uuid, record in self.records.items():
            units = {uuid, *parts.get(uuid, ()), *record.given}
            given = {unit: self._given(unit, record.given.get(unit, frozenset())) for unit in units}
            if any(given[unit] != record.given.get(unit, frozenset()) for unit in units):
                found[uuid] = replace(record, given=given)
        if found:
            self._change(found)

    async def run(self) -> None:
        """Write what changes, until cancelled."""
        while True:
            await set_within(self._changed, self._tick_s if self._recalled or self.records != self._written else None)
            self._changed.clear()
            if self._recalled and self._monotonic() >= self._recalled_until:
                self._recalled = frozenset()
                self.follow_ledger()
            async with self._turn:
                if self.records != self._written and not self.fault:
                    self._faults.warning("GPUs out of use not written", await self._write(self.records))

    async def _write(self, records: Records) -> str:
        """Write the file. Return why that failed, or empty."""
        assert isinstance(self._folder, Path)
        try:
            await asyncio.to_thread(write_cordons, self._folder, records)
        except OSError as error:
            return f"{self._folder} cannot be written: {cause_of(error)}; make room there, or fix that"
        self._written = records
        return ""

    def _given(self, uuid: GpuUuid, before: frozenset[str]) -> frozenset[str]:
        ledger = self._node_state.ledger
        after = given_after(before, ledger, uuid, self._recalled)
        self._recalled -= given_now(ledger, uuid)
        return after

    def _hindrance(self) -> str:
        return self.fault or (self._folder if isinstance(self._folder, str) else "")

    def _find(self, word: str) -> Gpu | None:
        names, gpus = gpu_names(word), self._node_state.node.gpus
        return next((gpu for gpu in gpus if not names.isdisjoint({gpu.uuid, gpu.place, gpu.pci_bus_id})), None)

    def _end(self, uuid: GpuUuid, why: str) -> None:
        if record := self.records.get(uuid):  # its reset may have been proven meanwhile
            self._use(without(self.records, {uuid}))
            self._told(uuid, record, why)

    def _change(self, records: Mapping[GpuUuid, CordonRecord]) -> None:
        self._use({**self.records, **records})

    def _use(self, records: Records) -> None:
        self.records = records
        self._changed.set()
        self._publish()

    def _publish(self) -> None:
        cordons = cordons_of(self.records)
        if self.fault:
            cordons = replace(cordons, given=self._all_given, unknown=True)
        self._node_state.put_cordons(cordons)


def command(gpu: str, why: str, by: str, *, until_reset: bool) -> str:
    """Return the words of `cordon` after the verb."""
    return f"{gpu} {UNTIL_RESET if until_reset else UNTIL_ROOT} {by} {why}"


def is_bad_text(text: str, most: int = WHY_MAX) -> bool:
    """Return whether a text is empty, too long, or not of printable ASCII."""
    return not (text.strip() and len(text) <= most and text.isascii() and text.isprintable())
