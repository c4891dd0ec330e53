"""What `nri-gpu dra` talks to besides the kubelet, in this process: a daemon and an API server to be told things.

Tests of the whole have the real daemon, and an API server that speaks HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.api_server import ApiServer, NotFoundError, RefusedError, UnavailableError
from nri_gpu.dra.claim_cdi import ClaimSpecifications
from nri_gpu.dra.claim_service import ClaimService
from nri_gpu.dra.daemon_client import DaemonAwayError, DaemonClient
from nri_gpu.dra.kubelet_sockets import KubeletSockets
from nri_gpu.dra.preparation import ClaimPreparation, ClaimTimes
from nri_gpu.dra.questions import (
    Answer,
    AskPrepare,
    AskUnprepare,
    AskView,
    ClaimFault,
    DriverReport,
    NodeView,
    Prepared,
    PreparedName,
    Question,
    Unprepared,
)
from nri_gpu.kubelet.registered_socket import EndpointTimes
from tests.support.resource_claims import DRIVER, NODE, document

QUICK = EndpointTimes(watched_within=0.3, look_every=0.05, first_wait=0.01, longest_wait=0.1)
TIMES = ClaimTimes(api_server=1.0, daemon=2.0, again=0.01, passing=0.5)


class TellingDaemon(DaemonClient):
    """faults: answers to the next questions, in their stead. away: it cannot be asked. silent: it never answers.

    holder: a claim that has the GPU of all others, for as long as it is prepared. lingers: for how many more questions
    a container has it.
    mac: of its markers. reread: claims whose pods may have changed. reports: what it was told with questions for the
    view. busy: most questions that it was answering at once.
    """

    def __init__(self, folder: Path) -> None:
        self.view = NodeView(
            number=1,
            driver=DRIVER,
            dir=str(folder / "plugins"),
            registry_dir=str(folder / "plugins_registry"),
            cdi_dir=str(folder / "cdi"),
            known=True,
        )
        self.asked: list[Question] = []
        self.prepared: dict[ClaimUid, PreparedName] = {}
        self.faults: list[ClaimFault] = []
        self.holder: PreparedName | None = None
        self.lingers = 0
        self.reread: set[ClaimUid] = set()
        self.reports: list[DriverReport] = []
        self._changed = asyncio.Condition()
        self.away = self.silent = False
        self.required, self.mac = True, "ab"
        self.busy = self._now = 0

    async def ask(self, question: Question) -> Answer:
        self._now += 1
        self.busy = max(self.busy, self._now)
        try:
            await asyncio.sleep(0.01)
            if self.away:
                raise DaemonAwayError("nobody listens on dra.sock")
            if self.silent:
                await asyncio.Event().wait()
            if isinstance(question, AskView):
                return await self._viewed(question)
            self.asked.append(question)
            answer = self._answer(question)
            await self.change()
            return answer
        finally:
            self._now -= 1

    async def change(self, **fields: Any) -> None:  # noqa: ANN401 - of a NodeView
        """The view is another one, with these fields."""
        async with self._changed:
            self.view = replace(self.view, number=self.view.number + 1, **fields)
            self._changed.notify_all()

    async def _viewed(self, question: AskView) -> Answer:
        if self.faults:
            return self.faults.pop(0)
        self.reports += [question.report] if question.report else []
        async with self._changed:
            await self._changed.wait_for(lambda: self.view.number != question.after or self.away)
        if self.away:
            raise DaemonAwayError("it ended")
        claims = tuple(replace(each, reread=each.uid in self.reread) for each in self.prepared.values())
        return replace(self.view, claims=claims)

    def _answer(self, question: AskPrepare | AskUnprepare) -> Answer:
        if self.faults:
            return self.faults.pop(0)
        match question:
            case AskPrepare(claim=claim) if self.holder and self.holder.uid in self.prepared.keys() - {claim.uid}:
                return ClaimFault(f"gpu-0 is held by claim {self.holder.name}", holders=(self.holder,))
            case AskPrepare() if self.lingers:
                self.lingers -= 1
                return ClaimFault("gpu-0 is held by ml/web", code="gpu-busy", uuid="GPU-a")
            case AskPrepare(claim=claim):
                self.reread.discard(claim.uid)
                self.prepared[claim.uid] = PreparedName(claim.uid, claim.namespace, claim.name)
                stem = f"NRI_GPU_CLAIM_{claim.uid.upper().replace('-', '_')}"
                markers = (
                    (f"{stem}_{at}", f"v1;claim={claim.uid};device={at};mac={self.mac}")
                    for at, _ in enumerate(claim.results)
                )
                return Prepared(tuple(markers), required=self.required)
            case AskUnprepare(uid=uid):
                self.prepared.pop(uid, None)
                return Unprepared()


class TellingApiServer(ApiServer):
    """claims: by namespace and name. silent: it never answers. busy: to so many questions it does not answer.

    refused: claims that may not be read, with why. mute: claims about which it never answers.
    """

    def __init__(self) -> None:
        self.busy = 0
        self.refused: dict[tuple[str, str], str] = {}
        self.mute: set[tuple[str, str]] = set()
        self.claims: dict[tuple[str, str], dict[str, Any]] = {}
        self.silent = False
        self.reads = 0
        self.events: list[Mapping[str, object]] = []

    def put(self, claim: dict[str, Any]) -> tuple[str, str, str]:
        """Namespace, name and UID, as the kubelet names it."""
        metadata = claim["metadata"]
        self.claims[metadata["namespace"], metadata["name"]] = claim
        return metadata["namespace"], metadata["name"], metadata["uid"]

    async def node_uid(self, name: str) -> str:
        return f"uid of {name}"

    async def create_event(self, namespace: str, event: Mapping[str, object]) -> None:
        self.events.append(event)
        if self.silent:
            await asyncio.Event().wait()

    async def claim(self, namespace: str, name: str) -> bytes:
        self.reads += 1
        if self.silent or (namespace, name) in self.mute:
            await asyncio.Event().wait()
        if self.busy:
            self.busy -= 1
            raise UnavailableError("the API server answered 503")
        if why := self.refused.get((namespace, name)):
            raise RefusedError(why)
        claim = self.claims.get((namespace, name))
        if claim is None:
            raise NotFoundError("404")
        return document(claim)


class DraNode:
    """Preparation and its sockets for the kubelet, on folders below one."""

    def __init__(self, folder: Path, times: ClaimTimes = TIMES) -> None:
        self.daemon = TellingDaemon(folder)
        self.api_server = TellingApiServer()
        self.cdi = folder / "cdi"
        self.failures: list[Exception] = []  # of which the writer of events is told
        self.claims = ClaimPreparation(self.daemon, self.api_server, ClaimSpecifications(self.cdi), DRIVER, NODE, times)

    def sockets(self, times: EndpointTimes = QUICK) -> KubeletSockets:
        return KubeletSockets(self.daemon.view, ClaimService(self.claims, self.failures.append).handlers(), times)

    def files(self) -> list[str]:
        return sorted(each.name for each in self.cdi.glob("*")) if self.cdi.exists() else []
