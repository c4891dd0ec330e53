"""The publisher, which keeps this node's ResourceSlices on the API server as the daemon's view wants them.

The kubelet deletes all slices of its node at its start, and the slices of a driver that went away, so slices are
watched and made again. A feature of the API server is used only where a dry run showed that it is kept: a bad GPU must
not be offered for the moment until its taint is known to be missing.
"""

from __future__ import annotations

import asyncio
from typing import Final

from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.dra.api_server import (
    ApiServer,
    ApiServerError,
    ConflictError,
    GoneError,
    NotFoundError,
    RefusedError,
    SliceEvent,
    UnavailableError,
)
from nri_gpu.dra.questions import DriverReport, NodeView
from nri_gpu.dra.slices import (
    ALL_GATES,
    Gate,
    OwnerReference,
    ResourceSlice,
    gates_of,
    gates_wanted,
    kept_as_sent,
    plan_writes,
    slice_specs,
    specimen,
    without_daemon,
)
from nri_gpu.system.tasks import Backoff, LogOnce, cancelled, set_within

_STALE: Final = (ConflictError, GoneError, NotFoundError)  # somebody wrote meanwhile: a list shows what is there now
STALE_MAX: Final = 3  # such errors in a row, until they are told


class PublisherTimes(Struct, frozen=True):
    """The times of publishing, in seconds."""

    first_wait: float = 2.0  # after a failure
    longest_wait: float = 60.0  # at most, after several failures
    lasting: float = 60.0  # a session of so long was a good one
    # Between two bursts of writes; the pause grows while a burst follows another, and is short again after `lasting`
    # without any.
    apart: float = 1.0
    longest_apart: float = 10.0  # at most, after several bursts
    away: float = 30.0  # for how long the daemon may not answer before its devices are tainted
    # Until slices are made where there are none, or somebody deleted them. The kubelet removes slices at its start, and
    # knows the driver a moment later; a pod that came in between would wait for a minute.
    removed: float = 3.0
    probe_again: float = 3600.0  # until a missing feature is looked for again


class Publisher:
    """The publisher, for the life of the driver process. node: its name in Kubernetes.

    report: for the daemon. reported: set when the report changed.
    """

    def __init__(self, api: ApiServer, node: str, *, times: PublisherTimes | None = None) -> None:
        self._api = api
        self._node = node
        self._times = times = times or PublisherTimes()
        self._view: NodeView | None = None
        self._left: asyncio.TimerHandle | None = None  # the daemon does not answer
        self._away = False  # ... and has not for long
        self._woken = asyncio.Event()
        self._slices: dict[str, ResourceSlice] = {}  # that are on the API server, by name
        self._seen = "0"  # version of the last change of which we were told
        self._gates: frozenset[Gate] = frozenset()
        self._probe_at = 0.0  # on the loop's clock
        self._waits = Backoff(times.first_wait, times.longest_wait, jitter=1.0)
        self._pauses = Backoff(times.apart, times.longest_apart)
        self._written_at = 0.0
        self._log, self._log_gates = LogOnce(), LogOnce()
        self.report, self.reported = DriverReport(node=node), asyncio.Event()

    def put(self, view: NodeView) -> None:
        """Take what the daemon offers from now on. While the daemon does not know its GPUs, all stays as it is."""
        if self._left:
            self._left.cancel()
        self._view, self._left, self._away = view, None, False
        self._woken.set()

    def away(self) -> None:
        """Take note that the daemon does not answer. Call it as often as that is so; `put` ends it."""
        if not self._left:
            self._left = asyncio.get_running_loop().call_later(self._times.away, self._taint_all)

    async def run(self) -> None:
        """Publish until cancelled, whatever happens to the API server."""
        loop = asyncio.get_running_loop()
        while True:
            while not (self._view and self._view.known):
                self._woken.clear()
                await self._woken.wait()
            began, pause_s = loop.time(), 0.0
            try:
                await self._session(self._view.driver)
            except ApiServerError as error:
                self._complain(error)
                if isinstance(error, UnavailableError):
                    pause_s = error.retry_after_s
            if loop.time() - began > self._times.lasting:
                self._waits.reset()
            await asyncio.sleep(pause_s + self._waits.next_s())

    def _complain(self, error: ApiServerError) -> None:
        if isinstance(error, _STALE) and self._waits.failures < STALE_MAX:
            return
        self._log.warning("ResourceSlices not published, trying again", str(error))
        self._report(replace(self.report, fault=str(error)))

    def _taint_all(self) -> None:
        self._away = True
        self._woken.set()

    async def _session(self, driver: str) -> None:
        """List the slices, then watch and publish until a new list is needed. Raises: ApiServerError."""
        await self._api.discover()
        listed = await self._api.slices(self._node, driver)
        self._slices = {each.metadata.name: each for each in listed.items}
        self._seen = listed.metadata.resource_version
        await self._probe(driver)  # it may have been restarted, with other features
        tasks = [asyncio.create_task(self._watch(driver)), asyncio.create_task(self._publish(driver))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancelled(tasks)

    async def _watch(self, driver: str) -> None:
        """Watch until the watch is lost, or ends with its server; else the next watch goes on where this one was."""
        try:
            while await self._api.watch(self._node, driver, self._seen, self._take):
                pass
        except UnavailableError as error:
            logger.bind(fault=str(error)).info("watch of ResourceSlices lost")

    def _take(self, event: SliceEvent) -> None:
        self._seen = event.resource_version
        if event.slice is None:
            return
        name = event.slice.metadata.name
        kept = self._slices.get(name)
        if event.kind != "DELETED":
            if kept is None or event.slice.version > kept.version:
                self._slices[name] = event.slice
                self._woken.set()
        elif kept and kept.metadata.uid == event.slice.metadata.uid:
            del self._slices[name]
            asyncio.get_running_loop().call_later(self._times.removed, self._woken.set)

    async def _publish(self, driver: str) -> None:
        """Write whenever the view or the slices changed."""
        loop = asyncio.get_running_loop()
        if not self._slices:
            await asyncio.sleep(self._times.removed)
        while True:
            self._woken.clear()
            if self._gates != ALL_GATES and loop.time() >= self._probe_at:
                await self._probe(driver)
            if self._view and self._view.known and await self._write(self._view):
                if loop.time() - self._written_at > self._times.lasting:
                    self._pauses.reset()
                await asyncio.sleep(self._pauses.next_s())
                self._written_at = loop.time()
            left_s = None if self._gates == ALL_GATES else max(0.0, self._probe_at - loop.time())
            await set_within(self._woken, left_s)

    async def _write(self, view: NodeView) -> bool:
        """Write what is not there as the view wants it. Return whether anything was written."""
        gates = self._gates
        offer = without_daemon(view) if self._away and Gate.TAINTS in gates else view
        writes = plan_writes(slice_specs(offer, self._node, gates), self._slices.values())
        for each in writes.delete:
            await self._api.delete(each)
            self._slices.pop(each.metadata.name, None)
        for each in writes.update:
            self._keep(each, await self._api.update(each))
        owners = (await self._owner(),) if writes.create else ()
        for each in writes.create:
            sent = replace(each, metadata=replace(each.metadata, owner_references=owners))
            self._keep(sent, await self._api.create(sent))
        if gates != self._gates:  # a server with other features answered
            return await self._write(view)
        self._published(view, wrote=bool(writes))
        return bool(writes)

    def _keep(self, sent: ResourceSlice, kept: ResourceSlice) -> None:
        """Take the answer to a write. What the API server dropped is not sent again."""
        if dropped := gates_of(sent.spec) - gates_of(kept.spec):
            self._gates -= dropped
            self._probe_at = asyncio.get_running_loop().time() + self._times.probe_again
        name = kept.metadata.name
        if name not in self._slices and self._seen.isdecimal() and int(self._seen) >= kept.version:
            self._woken.set()  # somebody deleted it before its creation was answered
        else:
            self._slices[name] = kept if dropped else kept_as_sent(sent, kept)

    async def _owner(self) -> OwnerReference:
        """Return the node, asked for each time: a node that registered anew has a new UID. Raises: RefusedError."""
        return OwnerReference(self._node, await self._api.node_uid(self._node), "Node", "v1", controller=True)

    async def _probe(self, driver: str) -> None:
        """Find out which features the API server keeps: together, and each alone where it refuses them together."""
        try:
            self._gates = await self._kept_of(driver, ALL_GATES)
        except RefusedError:
            self._gates = frozenset()
            for gate in Gate:
                try:
                    self._gates |= await self._kept_of(driver, frozenset({gate}))
                except RefusedError as error:
                    logger.bind(name=gate.value, fault=str(error)).debug("the API server refuses a feature")
        self._probe_at = asyncio.get_running_loop().time() + self._times.probe_again

    async def _kept_of(self, driver: str, gates: frozenset[Gate]) -> frozenset[Gate]:
        return gates_of((await self._api.create(specimen(driver, self._node, gates), dry_run=True)).spec) & gates

    def _published(self, view: NodeView, *, wrote: bool) -> None:
        devices = sum(len(each.spec.devices) for each in self._slices.values())
        missing = tuple(sorted(gate.value for gate in gates_wanted(view, self._node) - self._gates))
        if wrote:
            logger.bind(gpus=devices).info("ResourceSlices published")
        self._log.clear()
        self._log_gates.note("feature gates are off on the API server, publishing without them", ", ".join(missing))
        self._report(DriverReport(published=devices, missing=missing, node=self._node))

    def _report(self, report: DriverReport) -> None:
        if report != self.report:
            self.report = report
            self.reported.set()
