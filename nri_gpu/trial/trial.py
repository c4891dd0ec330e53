"""The test of a release: it makes pods that ask for a GPU, waits for what becomes of them, and deletes them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from nri_gpu.decision.offered import Way
from nri_gpu.dra.api_server import ApiServer, ApiServerError, RefusedError, UnavailableError
from nri_gpu.trial.trial_pod import Attempt, OwnPod, trial_claim, trial_pod
from nri_gpu.trial.trial_verdict import TrialEvent, TrialOutcome, TrialPod, observers_outcome, outcome_of

WAIT_S: Final = 60.0  # for which what may still change is waited for
_POLL_S: Final = 1.0
_DELETIONS: Final = 3  # how often a deletion is tried
_UNALLOWED: Final = re.compile(r" cannot \w+ resource ")  # what the API server says where no Role allows it


class PodList(Struct, frozen=True):
    items: tuple[TrialPod, ...]


class EventList(Struct, frozen=True):
    items: tuple[TrialEvent, ...]


class Trial:
    """A test in one namespace. wait_s, poll_s: for how long and how often it looks. Methods raise ApiServerError."""

    def __init__(self, api: ApiServer, namespace: str, *, wait_s: float = WAIT_S, poll_s: float = _POLL_S) -> None:
        self._api = api
        self._namespace = namespace
        self._core = f"/api/v1/namespaces/{quote(namespace, safe='')}"
        self._wait_s = wait_s
        self._poll_s = poll_s

    async def own_pod(self, name: str) -> OwnPod:
        """Return the pod in which this program runs."""
        return await self._api.ask("GET", f"{self._core}/pods/{quote(name, safe='')}", OwnPod)

    async def ask(self, attempt: Attempt, own: OwnPod, name: str, place: Mapping[str, object]) -> TrialOutcome:
        """Return what became of a pod that asks. It and its claim are deleted in every case, also when cancelled."""
        group = await self._api.resource_group() if attempt.way is Way.DRA else ""
        claims = f"{group}/namespaces/{quote(self._namespace, safe='')}/resourceclaims"
        try:
            if group:
                claim = trial_claim(attempt, own, name, group.removeprefix("/apis/"))
                await self._api.ask("POST", claims, msgspec.Raw, claim)
            await self._api.ask("POST", f"{self._core}/pods", msgspec.Raw, trial_pod(attempt, own, name, place))
            return await self._wait(attempt, name)
        finally:
            await self._delete(f"{self._core}/pods/{name}")
            if group:
                await self._delete(f"{claims}/{name}")

    async def observers(self, selector: str) -> TrialOutcome:
        """Return whether the observers with these labels are ready."""
        path = f"{self._core}/pods?{urlencode({'labelSelector': selector})}"

        async def look() -> TrialOutcome:
            return observers_outcome((await self._api.ask("GET", path, PodList)).items)

        return await self._until_final(look)

    async def _wait(self, attempt: Attempt, name: str) -> TrialOutcome:
        regards = urlencode({"fieldSelector": f"involvedObject.name={name},type=Warning"})

        async def look() -> TrialOutcome:
            pod = await self._api.ask("GET", f"{self._core}/pods/{name}", TrialPod)
            events = await self._api.ask("GET", f"{self._core}/events?{regards}", EventList)
            return outcome_of(attempt, pod, events.items, self._namespace)

        return await self._until_final(look)

    async def _until_final(self, look: Callable[[], Awaitable[TrialOutcome]]) -> TrialOutcome:
        until = time.monotonic() + self._wait_s
        while True:
            outcome = await look()
            if outcome.final or time.monotonic() > until:
                return outcome
            await asyncio.sleep(self._poll_s)

    async def _delete(self, path: str) -> None:
        """Delete an object that may be there. What cannot be deleted goes with the Job, which owns it."""
        for _ in range(_DELETIONS):
            try:
                await self._api.ask("DELETE", path, msgspec.Raw)
            except UnavailableError:
                await asyncio.sleep(self._poll_s)
            except ApiServerError:
                return
            else:
                return


def lacking(error: ApiServerError, rights: str) -> str:
    """Return what to do about an error: which Role is missing where that is why, else the server's sentence."""
    if not isinstance(error, RefusedError) or not _UNALLOWED.search(str(error)):
        return str(error)
    return (
        f"the Role of this test is missing, as with rbac.create=false: bind its account to a Role in this namespace "
        f"that allows {rights} ({error})"
    )
