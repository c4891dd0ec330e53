"""The preparation of a claim: it is read from the API server, reserved by the daemon, described to the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.decision import Code
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.resource_claim import AllocatedResult, ClaimUid
from nri_gpu.dra.api_server import ApiServer, NotFoundError, UnavailableError
from nri_gpu.dra.claim_cdi import ClaimSpecifications
from nri_gpu.dra.claim_object import ResourceClaimError, claim_name, is_ending, parse_resource_claim, unserved
from nri_gpu.dra.daemon_client import DaemonAwayError, DaemonClient
from nri_gpu.dra.questions import (
    Answer,
    AskPrepare,
    AskUnprepare,
    AskView,
    ClaimFault,
    NodeView,
    Prepared,
    PreparedName,
    Question,
    Unprepared,
)
from nri_gpu.system.tasks import Backoff

# The node authorizer's answer to a kubelet about a claim that no pod of the node has any more, or not yet after the
# API server's start (kubernetes: plugin/pkg/auth/authorizer/node/node_authorizer.go).
NO_POD: Final = "no relationship found between node"
RUN: Final = "the daemon (`nri-gpu run`)"
Settled = TypeVar("Settled", Prepared, Unprepared)


class ClaimTimes(Struct, frozen=True):
    """The times of a preparation, in seconds.

    A claim that fails is prepared again only after a minute or more (kubernetes: pkg/kubelet/kuberuntime,
    pod workers' resync), so it is worth waiting for a GPU that is being released, or a daemon that is restarted.
    """

    api_server: float = 5.0  # for its answer; the kubelet waits for 45
    daemon: float = 2.0  # for its answer
    again: float = 0.1  # between two questions about what may pass
    passing: float = 10.0  # for how long such questions are asked


class PreparationError(NriGpuError):
    """The reason why a claim is not prepared or unprepared: one sentence, which `kubectl describe pod` shows.

    code: of the refusal. uuid: of the GPU or MIG device that the claim cannot have, or empty.
    """

    def __init__(self, sentence: str, code: str = Code.NODE_NOT_READY.value, uuid: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        self.uuid = uuid


class PreparedDevice(Struct, frozen=True):
    """A device of a prepared claim. cdi: its qualified name."""

    result: AllocatedResult
    cdi: str


class ClaimPreparation:
    """The preparation of claims: of a claim for one caller at a time, of several claims at once.

    pool: of this node's devices.
    """

    def __init__(
        self,
        daemon: DaemonClient,
        api_server: ApiServer,
        specifications: ClaimSpecifications,
        driver: str,
        pool: str,
        times: ClaimTimes | None = None,
    ) -> None:
        self._daemon = daemon
        self._api_server = api_server
        self._specifications = specifications
        self._driver = driver
        self._pool = pool
        self._times = times or ClaimTimes()
        self._locks: WeakValueDictionary[ClaimUid, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, asked: PreparedName) -> tuple[PreparedDevice, ...]:
        """Reserve a claim's devices. The same claim again: the same answer. Raises: NriGpuError, with the sentence."""
        async with self._alone(asked.uid):
            return await self._prepare(asked, new=True)

    async def unprepare(self, uid: ClaimUid) -> None:
        """Release what a claim has, or nothing. Raises: NriGpuError, with the sentence."""
        async with self._alone(uid):
            await self._release(uid)

    async def refresh(self, known: PreparedName) -> None:
        """Prepare a prepared claim again for the pods of now, or release it if the API server has it no more.

        Raises: NriGpuError: it is not known which; the claim stays as it is.
        """
        async with self._alone(known.uid):
            if known.uid not in await self._prepared():
                return  # the kubelet unprepared it meanwhile
            try:
                await self._prepare(known)
            except ResourceClaimError as error:
                if not error.over:
                    raise
                await self._release(known.uid)
                bound = logger.bind(namespace=known.namespace, name=known.name, reason=str(error))
                bound.warning("ResourceClaim released although the kubelet did not unprepare it")

    async def sweep(self) -> None:
        """Remove the specifications that were left by a boot before this one. Raises: NriGpuError."""
        left = self._specifications.outdated()
        for uid in left - await self._prepared():
            async with self._alone(uid):
                if uid not in await self._prepared() and self._specifications.remove(uid):
                    logger.bind(name=uid).info("CDI specification of an unprepared ResourceClaim removed")

    def _alone(self, uid: ClaimUid) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    async def _prepare(self, asked: PreparedName, *, new: bool = False) -> tuple[PreparedDevice, ...]:
        """Prepare a claim. new: for the kubelet.

        A claim that is prepared already is served to the pods that may have it, whoever else it is reserved for.
        """
        claim = parse_resource_claim(await self._document(asked), asked, self._driver, self._pool)
        if new and (fault := unserved(claim)):
            raise ResourceClaimError(fault)
        prepared = await self._settle(AskPrepare(claim), Prepared)
        names = self._specifications.write(claim.uid, prepared, new=new)
        return tuple(map(PreparedDevice, claim.results, names))

    async def _release(self, uid: ClaimUid) -> None:
        await self._settle(AskUnprepare(uid), Unprepared)
        self._specifications.remove(uid)

    async def _document(self, asked: PreparedName) -> bytes:
        """Read a claim, again while the server restarts or is overloaded: the kubelet would wait a minute or more."""
        what, limit_s = claim_name(asked), self._times.api_server
        waits = Backoff(self._times.again, 1.0, jitter=0.5)
        fault = f"the API server did not answer within {limit_s:g} s"
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._api_server.claim(asked.namespace, asked.name)
                    except UnavailableError as error:
                        fault = str(error)
                        await asyncio.sleep(max(waits.next_s(), error.retry_after_s))
        except NotFoundError:
            sentence = f"{what}: the API server has none of this name: it was deleted"
            raise ResourceClaimError(sentence, over=True) from None
        except TimeoutError:
            raise PreparationError(f"{what}: {fault}") from None

    async def _settle(self, question: AskPrepare | AskUnprepare, wanted: type[Settled]) -> Settled:
        """Ask the daemon, again as long as what keeps it from answering may pass soon."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._times.passing
        ending: set[ClaimUid] = set()
        waits = Backoff(self._times.again, 1.0, jitter=0.5)  # after a boot all pods of the node wait here
        while True:
            try:
                answer = await self._ask(question)
                if isinstance(answer, wanted):
                    return answer
                if not isinstance(answer, ClaimFault):
                    raise PreparationError(f"{RUN} sent an unexpected reply: is it a different version of nri-gpu?")
                fault = PreparationError(answer.sentence, answer.code, answer.uuid)
                passes = answer.passing or await self._all_end(answer.holders, ending)
            except DaemonAwayError as error:
                fault, passes = PreparationError(str(error)), True
            if not passes or loop.time() + self._times.again > until:
                raise fault
            await asyncio.sleep(waits.next_s())

    async def _all_end(self, holders: Collection[PreparedName], ending: set[ClaimUid]) -> bool:
        """Return whether the GPU's holders are claims that are all ending. ending: the claims known to be ending.

        Those that were released hold it no more, but their containers may still be ending.
        """
        for each in holders:
            if each.uid not in ending and not await self._ends(each):
                return False
            ending.add(each.uid)
        return bool(ending)

    async def _ends(self, holder: PreparedName) -> bool:
        """Return whether a claim is ending. One that the API server has no more is released: a kubelet may forget it.

        What its containers hold they hold by their grants, until they end.
        """
        try:
            async with asyncio.timeout(self._times.daemon):
                return is_ending(await self._api_server.claim(holder.namespace, holder.name), holder)
        except (NotFoundError, ResourceClaimError):
            with suppress(NriGpuError):
                await self.refresh(holder)
            return True
        except NriGpuError as error:
            return NO_POD in str(error)
        except TimeoutError:
            return False

    async def _prepared(self) -> frozenset[ClaimUid]:
        """Return the claims that the daemon has prepared now."""
        view = await self._ask(AskView())
        if not isinstance(view, NodeView):
            raise PreparationError(f"{RUN} did not report which claims are prepared")
        return frozenset(each.uid for each in view.claims)

    async def _ask(self, question: Question) -> Answer:
        limit_s = self._times.daemon
        try:
            async with asyncio.timeout(limit_s):
                return await self._daemon.ask(question)
        except TimeoutError:
            raise DaemonAwayError(f"{RUN} did not answer within {limit_s:g} s: see `nri-gpu status`") from None
