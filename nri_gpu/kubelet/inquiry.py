"""Asks the kubelet what it gave, off the hook path: each pod as its sandbox comes, and all of them now and then.

Paced to half of what the kubelet answers, and never an error of anybody else's: whoever waits for an answer goes on
without one.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Final, Protocol

from msgspec import Struct

from nri_gpu.domain.container import Pod
from nri_gpu.domain.kubelet import PodGiven
from nri_gpu.kubelet.podresources import PodResources, PodResourcesError
from nri_gpu.log import logger

PACE_S: Final = 0.02  # the kubelet answers 100 a second with a burst of 10, and we are not its only guest
LIST_EVERY_S: Final = 10.0
# From so many pods on that wait, one List is cheaper than a Get for each.
GETS_AT_ONCE: Final = 8
ASKED_MAX: Final = 256  # the next List tells of those that fall out
FIRST_WAIT_S: Final = 0.1
WAIT_MAX_S: Final = 5.0


class Book(Protocol):
    """Who keeps the answers."""

    def pods(self) -> tuple[Pod, ...]:
        """Sandboxes that are there."""
        ...

    def answered(self, pod: Pod, given: PodGiven) -> None:
        """What the kubelet says of one."""
        ...

    def tried(self) -> None:
        """A List was answered, or was not."""
        ...

    def listed(self, pods: tuple[Pod, ...], given: tuple[PodGiven, ...]) -> None:
        """What it says of all. pods: those that were there when it was asked."""
        ...


class Pace(Struct, frozen=True):
    """Seconds. between: two questions. list_every: two Lists. first, most: waits after a failure."""

    between: float = PACE_S
    list_every: float = LIST_EVERY_S
    first: float = FIRST_WAIT_S
    most: float = WAIT_MAX_S


USUAL: Final = Pace()


class Inquiry:
    """The questions."""

    def __init__(self, client: PodResources, book: Book, pace: Pace = USUAL) -> None:
        self._client = client
        self._book = book
        self._pace = pace
        self._asked: deque[Pod] = deque(maxlen=ASKED_MAX)
        self._poked = asyncio.Event()
        self._said = ""
        self._wait_s = pace.first
        self._list_due = 0.0

    def ask(self, pod: Pod) -> None:
        """Soon."""
        if all(each.id != pod.id for each in self._asked):
            self._asked.append(pod)
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._something()
                try:
                    await self._next()
                except PodResourcesError as error:
                    await self._failed(str(error))
                except Exception as error:  # the other half serves on, whatever this one meets
                    logger.opt(exception=True).error("PodResources not read, by a bug of ours")
                    await self._failed(f"a bug of ours: {type(error).__name__}")
                else:
                    self._wait_s = self._pace.first
                    self._said = ""
                    await asyncio.sleep(self._pace.between)
        finally:
            await self._client.close()

    async def _something(self) -> None:
        """Until somebody asks, or it is time for a List."""
        left = self._list_due - asyncio.get_running_loop().time()
        if self._asked or left <= 0:
            return
        self._poked.clear()
        try:
            async with asyncio.timeout(left):
                await self._poked.wait()
        except TimeoutError:
            return

    async def _next(self) -> None:
        """One question. What waits for its answer is forgotten with it only."""
        if not self._asked or len(self._asked) > GETS_AT_ONCE or self._list_due <= asyncio.get_running_loop().time():
            await self._list()
            return
        pod = self._asked[0]
        given = await self._client.get(pod.namespace, pod.name)
        self._drop((pod,))
        self._book.answered(pod, given)

    async def _list(self) -> None:
        pods, asked = self._book.pods(), tuple(self._asked)
        try:
            given = await self._client.list()
            self._drop(asked)
            self._list_due = asyncio.get_running_loop().time() + self._pace.list_every
            self._book.listed(pods, given)
        finally:
            self._book.tried()

    def _drop(self, pods: tuple[Pod, ...]) -> None:
        """They are answered, as far as they will be."""
        ids = {pod.id for pod in pods}
        self._asked = deque((each for each in self._asked if each.id not in ids), maxlen=ASKED_MAX)

    async def _failed(self, sentence: str) -> None:
        """Wait a while; once for each new fault it is said."""
        if sentence != self._said:
            logger.bind(fault=sentence).warning("the kubelet does not tell what it gave, trying again")
        self._said = sentence
        await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))
        self._wait_s = min(self._wait_s * 2, self._pace.most)
