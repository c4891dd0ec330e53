"""The kept record of holds, as `history` and `usage` read it: where it is, and which part of it is asked for."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.cli.ask_daemon import daemon_status
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.records.kept_folder import kept_folder
from nri_gpu.records.policy_file import load_policy
from nri_gpu.records.usage_file import Ending, UsageReader
from nri_gpu.records.usage_lines import Begun, LogMoment, now
from nri_gpu.records.usage_log import FILE
from nri_gpu.system.storage import boot_id, stat_of, why_untrusted

_AGES: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DAY: Final = re.compile(r"(\d{4})-(\d{2})(?:-(\d{2}))?")
WHEN: Final = "write an age such as 12h or 2d, a day such as 2026-11-05, or a month such as 2026-11; in UTC"


class Asked(Struct, frozen=True):
    """The part of the record that is asked for: seconds since the epoch."""

    since_s: float
    until_s: float


class KeptRecord:
    """The record of this node. end: up to when its open holds are known."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Find it. Raises: CommandError: it is not there, or not for us to read."""
        if os.geteuid():
            raise CommandError(Exit.PERMISSION, "who had which GPU is for root to read: run it with sudo")
        status = daemon_status(Path(args.state_dir or DEFAULT_STATE))
        if status and (status.record.folder or status.record.why_none):
            folder: Path | str = Path(status.record.folder) if status.record.folder else status.record.why_none
        else:
            folder = kept_folder(load_policy(args.policy, all_options=False).usage)
        if isinstance(folder, str):
            raise CommandError(Exit.UNAVAILABLE, folder)
        self.file = folder / FILE
        self._runs = status is not None
        self.reader = UsageReader(folder)
        self._check()

    def _check(self) -> None:
        try:
            found = stat_of(self.file)
        except OSError as error:
            raise CommandError(Exit.PERMISSION, error) from None
        if found is None:
            raise CommandError(Exit.UNAVAILABLE, f"nothing is kept yet: there is no {self.file}")
        if why := why_untrusted(found, self.file):
            raise CommandError(Exit.CONFIGURATION, f"{self.file} is not believed: {why}")

    def events(self) -> Iterator[Begun | Ending]:
        """Yield what happened. Raises: CommandError."""
        try:
            yield from self.reader.events()
        except OSError as error:
            raise CommandError(Exit.PERMISSION, error) from None

    @property
    def goes_on(self) -> bool:
        """Return whether what is open at the record's end is held now: the daemon runs, and would have its end."""
        return self._runs and self.reader.boot == boot_id()

    @property
    def end(self) -> LogMoment:
        """Return up to when what is open at the record's end is known to be held."""
        return now() if self.goes_on else self.reader.last

    @property
    def notes(self) -> Iterator[str]:
        if self.reader.skipped:
            what = "1 line is" if self.reader.skipped == 1 else f"{self.reader.skipped} lines are"
            yield f"{what} damaged, or of a later version, and not counted"


def asked(args: argparse.Namespace) -> Asked:
    """Return from when to when. A month or a day as --since alone means until now. Raises: CommandError."""
    since = _moment(args.since, "--since") if args.since else 0.0
    until = _moment(args.until, "--until") if args.until else time.time()
    if until < since:
        raise CommandError(Exit.USAGE, "--until is before --since")
    return Asked(since, until)


def _moment(text: str, option: str) -> float:
    if text[-1:] in _AGES and text[:-1].isdecimal():
        return time.time() - int(text[:-1]) * _AGES[text[-1]]
    if found := _DAY.fullmatch(text):
        try:
            return datetime(int(found[1]), int(found[2]), int(found[3] or 1), tzinfo=UTC).timestamp()
        except ValueError:
            pass
    raise CommandError(Exit.USAGE, f"{option} {text}: {WHEN}")
