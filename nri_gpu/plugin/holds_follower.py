"""The follower of holds: it logs each GPU that is given back, sums up the time of holders, and has both recorded.

It works on pairs of committed ledgers. They are noted at each commit, and compared once the reply is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.holds import End, Hold, HoldKey, HoldWay, holds_of, why_ended
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.records.usage_lines import Begun, HeldDevice, LogMoment, begun_line, devices_of, hold_id
from nri_gpu.records.usage_log import UsageLog
from nri_gpu.records.usage_sums import Sums
from nri_gpu.system.state import Changed, NodeState

Account = tuple[str, str, str]  # namespace, model, mode
ACCOUNTS_MAX: Final = 1000  # of the counter; whoever comes later is counted under OTHERS
OTHERS: Final = "(others)"


class _Commit(Struct, frozen=True):
    ledger: Ledger
    inventory: Inventory
    now: LogMoment


class HoldsFollower:
    """The holds of this node, from the ledger that the daemon before left.

    record: None where none is kept. later: runs something once the reply is on its way.
    """

    def __init__(
        self,
        state: NodeState,
        record: UsageLog | None,
        now: Callable[[], LogMoment],
        boot: str,
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._state = state
        self._record = record
        self._now = now
        self._boot = boot
        self._later = later
        self._commits = list[_Commit]()  # that are not compared yet
        self._ledger = Ledger()  # compared last
        self._holds: Mapping[HoldKey, Hold] = {}  # its
        self._since = dict[HoldKey, float]()  # when each began, seconds on the monotonic clock
        self._listed = False  # the runtime has listed its containers, and this was compared
        self._inventory: Inventory | None = None
        self._devices: Mapping[str, HeldDevice] = {}  # its
        self._sums = Sums[Account | None]()
        self._accounts = set[Account]()

    def follow(self) -> None:
        """Begin with the ledger as it is."""
        self._ledger, now = self._state.ledger, self._now().mono_s
        self._holds, entries = holds_of(self._ledger), self._ledger.entries
        self._since = {key: entry.since if (entry := entries.get(ContainerId(key[1]))) else now for key in self._holds}
        self._state.first(self._note, Changed.LEDGER)

    def seconds(self) -> Mapping[Account, float]:
        """Return for how many seconds grants held GPUs, since the runtime listed its containers to this daemon."""
        self._sums.count(self._now())
        return {account: total for account, total in self._sums.totals.items() if account}

    def _note(self) -> None:
        if self._state.synchronized:
            self._commits.append(_Commit(self._state.ledger, self._state.node.inventory, self._now()))
            if len(self._commits) == 1:
                self._later(self._compare)

    def _compare(self) -> None:
        commits, self._commits = self._commits, []
        for each in commits:
            self._take(each)

    def _take(self, commit: _Commit) -> None:
        """Note what ended and what began between the commit before and this one."""
        before, self._ledger = self._ledger, commit.ledger
        if self._listed and all(map(is_, _parts(before), _parts(self._ledger))):
            return
        held, self._holds = self._holds, holds_of(commit.ledger)
        ended = [hold for key, hold in held.items() if self._holds.get(key) != hold]
        begun = [hold for key, hold in self._holds.items() if held.get(key) != hold]
        self._end([(each, self._why(each, before, commit.now.mono_s)) for each in ended], commit.now)
        self._since |= {each.key: commit.now.mono_s for each in begun}
        fresh = [*(begun if self._listed else self._holds.values())]
        if fresh and commit.inventory is not self._inventory:
            self._inventory = commit.inventory
            self._devices = devices_of(commit.inventory)
        lines = [begun_line(each, self._devices, self._since[each.key], self._boot, commit.now) for each in fresh]
        for line in lines:
            devices = {each.uuid: (each.share, self._account(line, each.model)) for each in line.devices}
            self._sums.begun(line.hold, devices, commit.now, line.part)
        if self._record and self._listed:
            for line in lines:
                self._record.begun(line)
        elif self._record:
            self._record.anew(lines)
        self._listed = True

    def _why(self, hold: Hold, before: Ledger, now: float) -> End:
        return End.PASSED if hold.key in self._holds else why_ended(hold, before, self._ledger, now)

    def _end(self, ended: list[tuple[Hold, End]], now: LogMoment) -> None:
        for hold, why in ended:
            id_ = hold_id(hold)
            self._sums.ended(id_, now)
            if self._record and self._listed:
                self._record.ended(id_, why, now)
            _log_released(hold, why, now.mono_s - self._since.pop(hold.key))

    def _account(self, line: Begun, model: str) -> Account | None:
        """Return on whose account a hold is counted, or None for one that is no grant's."""
        account = (line.namespace, model, line.mode)
        if line.way is not HoldWay.GRANTED:
            return None
        if len(self._accounts) < ACCOUNTS_MAX:
            self._accounts.add(account)
        return account if account in self._accounts else (OTHERS, model, line.mode)


def _parts(ledger: Ledger) -> tuple[object, ...]:
    """Return what holds are made of."""
    return ledger.entries, ledger.reservations, ledger.claims, ledger.external


def _log_released(one: Hold, why: End, held_s: float) -> None:
    """Log that a holder of ours gave its GPUs back, as `GPU granted` was logged."""
    if one.way is HoldWay.EXTERNAL or why is End.PASSED:
        return
    fields = {
        "namespace": one.namespace,
        "pod_name": one.pod,
        "container_name": one.container,
        "pod_uid": one.pod_uid,
        "container_id": one.holder if one.way is HoldWay.GRANTED else "",
        "claim": one.claim,
        "gpu_uuid": ",".join(one.uuids),
        "mode": one.mode,
        "reason": why,
        "held_s": round(held_s, 3),
    }
    logger.bind(**{name: value for name, value in fields.items() if value != ""}).info("GPU released")
