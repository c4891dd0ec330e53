"""`nri-gpu dra`: the process between the daemon, the kubelet and the API server, without a state of its own."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct, field
from msgspec.structs import replace

from nri_gpu.cdi.spec_file import SpecFileError
from nri_gpu.domain.errors import Exit, NriGpuError, RestartNeededError
from nri_gpu.dra.api_server import ApiServer
from nri_gpu.dra.claim_cdi import ClaimSpecifications
from nri_gpu.dra.claim_service import ClaimService
from nri_gpu.dra.daemon_client import DaemonClient
from nri_gpu.dra.device_health import DeviceHealthService
from nri_gpu.dra.kubelet_sockets import KubeletSockets
from nri_gpu.dra.node_events import NodeEvents
from nri_gpu.dra.preparation import ClaimPreparation, ClaimTimes, PreparationError
from nri_gpu.dra.publisher import Publisher
from nri_gpu.dra.questions import AskView, NodeView, PreparedName
from nri_gpu.kubelet.registered_socket import EndpointTimes, check_reached
from nri_gpu.system.folder_watch import ENTRIES, IN_MODIFY, folder_changed
from nri_gpu.system.liveness import LivenessFile
from nri_gpu.system.service_manager import Notifier, run_until_told
from nri_gpu.system.tasks import Backoff, LogOnce, raised_alone, set_within

REFRESHED_AT_ONCE: Final = 4  # claims
THREADS: Final = 34  # the watch, an event, and 32 questions to the API server at once; asyncio has 6 on two processors


class DriverTimes(Struct, frozen=True):
    """The times of the driver process, in seconds."""

    retry: float = 0.1  # between two questions to the daemon, while it is away
    longest_retry: float = 2.0  # at most, after several of them
    reread: float = 2.0  # until a claim that could not be read is read again
    tidy: float = 600.0  # between two comparisons of all that is prepared with the API server
    look: float = 10.0  # between two looks at the files of prepared claims, if nothing changes in their folder
    restore: float = 0.05  # after a loss of such files, until the next look
    longest_restore: float = 10.0  # at most, after several losses
    claims: ClaimTimes = field(default_factory=ClaimTimes)
    sockets: EndpointTimes = field(default_factory=EndpointTimes)


class DriverProcess:
    def __init__(
        self,
        daemon: DaemonClient,
        api_server: ApiServer,
        publisher: Publisher,
        health: DeviceHealthService,
        events: NodeEvents,
        times: DriverTimes | None = None,
        liveness: LivenessFile | None = None,
    ) -> None:
        self._daemon = daemon
        self._api_server = api_server
        self._publisher = publisher
        self._health = health
        self._events = events
        self._times = times or DriverTimes()
        self._notifier = Notifier()
        self._liveness = liveness or LivenessFile(None)
        self._view: NodeView | None = None
        self._changed = asyncio.Event()
        self._tidy_at = 0.0  # on the loop's clock
        self._away, self._unread, self._unwritten = LogOnce(), LogOnce(), LogOnce()
        self._restored = 0

    async def run(self) -> Exit:
        """Serve until SIGTERM or SIGINT. Slices stay: the next process is there before the kubelet removes them."""
        # The daemon reads the policy.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
        # Ready also while it waits for its lock: only then is the process before it told to stop.
        self._liveness.keep(lambda: True)
        return await run_until_told(asyncio.create_task(self.serve()), self._notifier)

    async def serve(self) -> None:
        """Serve until cancelled. Raises: RestartNeededError."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        view = await self._next()
        specifications = ClaimSpecifications(Path(view.cdi_dir))
        claims = ClaimPreparation(
            self._daemon, self._api_server, specifications, view.driver, self._health.pool, self._times.claims
        )
        sockets = KubeletSockets(
            view,
            (*ClaimService(claims, self._events.claim_failed).handlers(), *self._health.handlers()),
            self._times.sockets,
        )
        await sockets.hold()
        try:
            with raised_alone(RestartNeededError):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(sockets.run())
                    tasks.create_task(self._publish(sockets))
                    tasks.create_task(self._tell())
                    tasks.create_task(self._events.run())
                    tasks.create_task(self._follow(view))
                    tasks.create_task(self._keep(claims))
                    tasks.create_task(self._restore(specifications))
                    await sockets.opened.wait()
                    logger.bind(name=view.driver, socket=str(sockets.socket)).info("serving claims")
                    self._notifier.ready(f"serving claims of {view.driver}")
        finally:
            sockets.release()

    async def _publish(self, sockets: KubeletSockets) -> None:
        """Publish once the driver is registered.

        A kubelet that does not know the driver yet refuses its pods, and tries again only after a minute.
        """
        await sockets.registered.wait()
        await self._publisher.run()

    async def _tell(self) -> None:
        """Send a fresh publishing report: the pending AskView may block for long and carries an older one."""
        while True:
            await self._publisher.reported.wait()
            self._publisher.reported.clear()
            with suppress(NriGpuError):
                await self._daemon.ask(self._ask_view())

    async def _next(self) -> NodeView:
        """Return the daemon's next view, once there is one."""
        waits, after = Backoff(self._times.retry, self._times.longest_retry), self._view.number if self._view else 0
        while True:
            try:
                answer = await self._daemon.ask(self._ask_view(after))
                if not isinstance(answer, NodeView):
                    raise PreparationError(
                        f"the daemon did not say what to serve: {getattr(answer, 'sentence', answer)}"
                    )
            except NriGpuError as error:
                after, self._tidy_at = 0, 0.0  # the next daemon counts anew, and may sign with another key
                self._publisher.away()
                self._away.warning("daemon not reached, trying again", str(error))
                await asyncio.sleep(waits.next_s())
            else:
                self._away.clear()
                self._view = answer
                self._publisher.put(answer)
                self._health.put(answer)
                self._events.put(answer)
                self._changed.set()
                return answer

    def _ask_view(self, after: int = 0) -> AskView:
        report = replace(self._publisher.report, unwritten=self._unwritten.fault, restored=self._restored)
        return AskView(after, report)

    async def _follow(self, first: NodeView) -> None:
        """Take each view. Raises: RestartNeededError: a view is another driver's, or has other folders."""
        while True:
            view = await self._next()
            if _place(view) != _place(first):
                raise RestartNeededError("the policy has another dra.driver or other folders: this process starts over")

    async def _keep(self, claims: ClaimPreparation) -> None:
        """Prepare claims again whose pods may have changed, and all claims now and then and for each new daemon."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            if tidy := loop.time() >= self._tidy_at:
                self._tidy_at = loop.time() + self._times.tidy * random.uniform(0.8, 1.2)
            known = [each for each in self._view.claims if tidy or each.reread] if self._view else []
            well = await self._refresh(claims, known, sweep=tidy)
            left_s = self._tidy_at - loop.time()
            await set_within(self._changed, left_s if well else min(left_s, self._times.reread))

    async def _restore(self, specifications: ClaimSpecifications) -> None:
        """Write files again that somebody removes: without its file no container of a claim starts again.

        Raises: RestartNeededError: this process cannot reach the folder that is there now.
        """
        waits = Backoff(self._times.restore, self._times.longest_restore)
        while True:
            check_reached(specifications.folder)
            told = self._restored, self._unwritten.fault
            try:
                lost = specifications.restore()
                self._unwritten.clear()
            except SpecFileError as error:
                lost = True
                self._unwritten.warning("CDI specification of a prepared claim not written, trying again", str(error))
            self._restored = specifications.restored
            if (self._restored, self._unwritten.fault) != told:
                self._publisher.reported.set()
            if lost:  # whoever removes them may do so for ever
                await asyncio.sleep(waits.next_s())
            else:
                waits.reset()
                await folder_changed(specifications.folder, self._times.look, ENTRIES | IN_MODIFY)

    async def _refresh(self, claims: ClaimPreparation, known: list[PreparedName], *, sweep: bool) -> bool:
        """Prepare known claims again. Return whether all went well. sweep: remove specifications that no claim has."""
        slots = asyncio.Semaphore(REFRESHED_AT_ONCE)

        async def one(work: Coroutine[None, None, None]) -> str:
            try:
                async with slots:
                    await work
            except NriGpuError as error:
                return str(error)
            return ""

        work = [claims.refresh(each) for each in known] + ([claims.sweep()] if sweep else [])
        faults = [fault for fault in await asyncio.gather(*map(one, work)) if fault]
        if faults:
            self._unread.warning("prepared ResourceClaims not compared with the API server", faults[0])
        elif work:
            self._unread.clear()
        return not faults


def _place(view: NodeView) -> tuple[str, ...]:
    return view.driver, view.dir, view.registry_dir, view.cdi_dir
