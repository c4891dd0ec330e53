"""The follower of holds on virtual time, with a record of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from nri_gpu.ledger.ledger import Ledger
from nri_gpu.plugin.holds_follower import HoldsFollower
from nri_gpu.records.usage_lines import LogMoment
from nri_gpu.records.usage_log import UsageLog
from nri_gpu.system.state import NodeState
from tests.support import builders as make

EPOCH: Final = 1_700_000_000.0  # when the machine was booted
PARTED: Final = make.inventory([make.gpu(0), *(make.mig_gpu(index, ("1g.5gb",) * 4) for index in range(1, 4))])


class Followed:
    """A follower on virtual time, with a record in a folder of its own."""

    def __init__(self, folder: Path, boot: str = "boot", mono_s: float = 100.0, keep_mib: int = 1) -> None:
        self.mono_s, self.shift_s = mono_s, 0.0
        self.state = NodeState(PARTED, later=lambda action: action())
        self.record = UsageLog(folder, boot, self.now, keep_days=1, keep_mib=keep_mib)
        self.follower = HoldsFollower(self.state, self.record, self.now, boot, lambda action: action())
        self.ledgers: list[tuple[float, Ledger]] = []

    def now(self) -> LogMoment:
        return LogMoment(self.mono_s, EPOCH + self.shift_s + self.mono_s)

    def begin(self, ledger: Ledger) -> None:
        self.state.ledger = ledger
        self.follower.follow()
        self.state.synchronized = True

    def commit(self, ledger: Ledger, after_s: float) -> None:
        self.mono_s += after_s
        if ledger is not self.state.ledger:
            self.ledgers.append((self.mono_s, ledger))
        self.state.commit(ledger)

    def write(self) -> None:
        asyncio.run(self.record.written())
