"""The controller that looks for stray use now and then, and reports each finding once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec
from loguru import logger
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.errors import NriGpuError, fault_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Majors
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.stray_settings import StraySettings
from nri_gpu.stray.allocated import AllocationsUnknownError, allocated
from nri_gpu.stray.judge import Known, PodName, StrayProcess, StrayUse, container_of, judge
from nri_gpu.stray.uses import LIBCUDA, Extent, Use
from nri_gpu.system.child import python, run
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import LogOnce, set_within

LOOK_LIMIT_S: Final = 20.0
REPORTED_MAX: Final = 1024
HIDDEN: Final = (
    "the processes of the host are hidden from nri-gpu: a pod needs hostPID (chart: stray.enabled=true), the systemd "
    "unit its drop-in stray.conf"
)
CLOSED: Final = (
    "nri-gpu cannot see what some processes have open: it needs the capabilities SYS_PTRACE and "
    "DAC_READ_SEARCH, which the systemd unit's drop-in stray.conf gives it"
)
Containers = Callable[[], Mapping[ContainerId, ListedContainer]]
Allocations = Mapping[PodName, frozenset[GpuUuid]]
_Seen = tuple[str, StrayProcess]  # a finding's container, and one of its processes


class LookError(NriGpuError):
    """A scan failed; the message says why, in one sentence."""


class Look(Struct, frozen=True):
    """The result of one scan."""

    uses: tuple[Use, ...]
    extent: Extent

    @property
    def fault(self) -> str:
        """Return why something may be missing, or empty."""
        if not self.extent.whole:
            return HIDDEN
        return CLOSED if self.extent.closed else self.extent.unread and f"not seen: {self.extent.unread}"


async def look(majors: Majors, limit_s: float = LOOK_LIMIT_S) -> Look:
    """Look at every process that this one can see. Raises: LookError."""
    numbers = (majors.nvidia, majors.nvidia_uvm, majors.nvidia_caps)
    return await look_for([number for number in numbers if number is not None], limit_s)


async def look_for(majors: Iterable[int], limit_s: float = LOOK_LIMIT_S, *, libcuda: bool = False) -> Look:
    """Look for processes with nodes of these majors open; libcuda: for those that map it, too. Raises: LookError."""
    arguments = [*[LIBCUDA] * libcuda, str(os.getpid()), *map(str, majors)]
    try:
        child = await run([python(), "-I", "-m", "nri_gpu.stray.process_scan", *arguments], limit_s)
    except TimeoutError as error:
        why = str(error) or f"a scan of all processes took longer than {limit_s:.0f} s, and was stopped"
        raise LookError(why) from None
    except OSError as error:
        raise LookError(f"the process that scans the others cannot be started: {fault_of(error)}") from error
    found = [msgspec.json.decode(line, type=Use | Extent) for line in child.output.splitlines()]
    if not found or not isinstance(extent := found.pop(), Extent):
        raise LookError(f"the process that scans the others failed: {child.complaint or 'it reported nothing'}")
    return Look(tuple(each for each in found if isinstance(each, Use)), extent)


class StrayController:
    """A controller for the life of the daemon.

    findings: of the last look.
    fault: why it found less than there may be, or empty.
    looked_s: when it was, or None if there was none, or it failed; seconds since the epoch.
    containers: the runtime's live ones.
    scan: takes a look.
    allocations: of the kubelet, by its socket.
    """

    def __init__(
        self,
        node_state: NodeState,
        containers: Containers,
        *,
        scan: Callable[[Majors], Awaitable[Look]] = look,
        allocations: Callable[[str], Awaitable[Allocations]] = allocated,
    ) -> None:
        self.findings: tuple[StrayUse, ...] = ()
        self.fault = ""
        self.looked_s: float | None = None
        self._node_state = node_state
        self._containers = containers
        self._scan = scan
        self._allocated = allocations
        # On the host, MPS daemons are known by their programs; they outlive the daemon that started them.
        self._programs = f"{os.path.realpath(node_state.settings.driver.stage_dir)}/*"
        self._first_seen: dict[_Seen, float] = {}  # seconds since the epoch
        self._reported: dict[tuple[object, ...], None] = {}
        self._log = LogOnce()
        self._woken = asyncio.Event()
        node_state.then(self._woken.set, Changed.POLICY)

    @property
    def _settings(self) -> StraySettings:
        return self._node_state.settings.stray

    async def run(self) -> None:
        """Run until cancelled. The first look comes after an interval: by then a daemon before this one is gone."""
        while True:
            await set_within(self._woken, self._settings.every_s if self._settings.enabled else None)
            self._woken.clear()
            if not self._settings.enabled:
                self._forget()
                continue
            try:
                await self.look_again()
            except LookError as error:
                self._forget(str(error))
                self._log.warning("scan for stray GPU use failed", str(error))
            except Exception as error:  # the NRI plugin goes on serving, whatever goes wrong here
                if repr(error) != self._log.fault:
                    logger.opt(exception=True).error("bug: scan for stray GPU use failed")
                self._forget(f"a bug of nri-gpu ({type(error).__name__}); its log has the traceback")
                self._log.fault = repr(error)

    async def look_again(self) -> None:
        """Take a look, and do what follows from it. Raises: LookError."""
        state = self._node_state
        if not state.synchronized:
            self._forget("the runtime has not listed its containers yet, so no process is judged")
            return
        if state.node.inventory.majors.nvidia is None:
            self._forget("the driver's kernel module is not loaded, so no process can use a GPU")
            return
        before = (state.ledger, self._containers())
        seen = await self._scan(state.node.inventory.majors)
        known = Known.of(state.node.inventory, before, (state.ledger, self._containers()))
        # Processes in nri-gpu's own container are its own: MPS daemons, which are not its children any more.
        ours = seen.extent.cgroups if container_of(seen.extent.cgroups, known) else None
        found, unknown = await self._judge([use for use in seen.uses if use.cgroups != ours], known)
        self.looked_s, self.fault = time.time(), unknown or seen.fault
        self._see(found)
        for each in self.findings:
            self._report(each)
        self._log.warning("scan for stray GPU use is incomplete", self.fault)

    async def _judge(self, uses: Iterable[Use], known: Known) -> tuple[tuple[StrayUse, ...], str]:
        """Return the findings, and why it is not known what of them the kubelet allocated, or empty."""
        settings = self._node_state.settings
        monitors = settings.foreign.monitors.patterns  # no path of a program or a cgroup looks like one
        exceptions = Globs((*settings.stray.exceptions.patterns, *monitors, self._programs))
        found = await asyncio.to_thread(judge, uses, known, exceptions)  # some milliseconds on a full node
        if not any(each.pod for each in found):
            return found, ""
        try:
            given = await self._allocated(settings.kubelet.podresources)
        except AllocationsUnknownError as error:
            return (
                found,
                f"the kubelet does not report which GPUs it allocated ({error}), so its pods are findings, too",
            )
        return await asyncio.to_thread(judge, uses, replace(known, allocated=given), exceptions), ""

    def _forget(self, why: str = "") -> None:
        self.findings, self.fault, self.looked_s = (), why, None
        self._first_seen.clear()

    def _see(self, found: Iterable[StrayUse]) -> None:
        """Keep the findings, each with when one of its processes was first seen."""
        now = time.time()
        dated: list[StrayUse] = []
        seen: dict[_Seen, float] = {}
        for each in found:
            keys = [(each.container_id, process) for process in each.processes]
            times = {key: self._first_seen.get(key, now) for key in keys}
            seen |= times
            dated.append(replace(each, since_s=min(times.values())))
        self.findings, self._first_seen = tuple(dated), seen

    def _report(self, found: StrayUse) -> None:
        """Report once for each container, and for each program of the host."""
        whose = found.container_id or tuple(each.program for each in found.processes)
        about = (found.kind, whose, found.nodes)
        if about in self._reported:
            return
        while len(self._reported) >= REPORTED_MAX:
            del self._reported[next(iter(self._reported))]
        self._reported[about] = None
        bound = logger.bind(
            namespace=found.namespace,
            pod_name=found.pod,
            container_name=found.container,
            container_id=found.container_id,
            gpu_uuid=",".join(found.gpu_uuids),
        )
        bound.bind(pid=found.processes[0].pid, fault=found.message).warning("stray GPU use")
