"""The part of the policy that an observer reads. It grants nothing, so a file with a fault keeps it from nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.daemon.answers import PolicyStatus
from nri_gpu.domain.errors import PolicyError
from nri_gpu.policy.lines import key_lines, read_toml
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.policy.read import override, parse_policy
from nri_gpu.records.policy_file import build_policy, read_policy

# Section -> its keys that are read; none: each.
READ: Final[Mapping[str, frozenset[str]]] = {
    "observe": frozenset(),
    "driver": frozenset(),
    "metrics": frozenset(),
    "foreign": frozenset({"monitors"}),
    "stray": frozenset({"exceptions"}),
    "control": frozenset({"group"}),
}


class ObservePolicy:
    """The policy of an observer. Until a file is read without a fault, every default holds.

    policy: the last good one, by what is read of it. fault: of the file as it was read last, or empty.
    """

    def __init__(self, file: Path | None, options: Mapping[str, str | bool | None]) -> None:
        """Begin with the defaults. file: None for the default file. Raises: PolicyError: an option is wrong."""
        self._file = file
        self._options = options
        self.policy = override(Policy.default(), options)
        self.fault = ""
        self._digest = ""  # of the text that the policy is from, or empty

    @property
    def status(self) -> PolicyStatus:
        return PolicyStatus(self.policy.source, "", self.fault, self._digest)

    def read(self) -> None:
        """Read the file. One with a fault is logged, and the last good policy stays."""
        try:
            self.policy, self._digest = self._read()
        except PolicyError as error:
            self.fault = str(error.faults[0])
            for fault in error.faults:
                logger.bind(fault=str(fault)).error("policy not taken, observing goes on")
        else:
            self.fault = ""

    def _read(self) -> tuple[Policy, str]:
        """Return the file's policy and its digest. Raises: PolicyError, for a fault in what is read."""
        source = read_policy(self._file)
        if source is None:
            return parse_policy({}, BUILT_IN, {}, self._options), ""
        raw = read_toml(source.text, source.file)
        policy = parse_policy(dict(_part(raw)), source.file, key_lines(source.text), self._options)
        try:
            build_policy(source)
        except PolicyError as error:
            logger.bind(fault=str(error.faults[0])).info("policy has a fault that does not concern an observer")
        return policy, source.digest


def _part(raw: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the sections that are read, each with those of its keys."""
    for name in READ.keys() & raw.keys():
        table, keys = raw[name], READ[name]
        if not isinstance(table, dict) or not keys:
            yield name, table
        elif found := {key: table[key] for key in keys & table.keys()}:
            yield name, found
