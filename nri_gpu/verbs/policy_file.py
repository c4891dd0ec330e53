"""The policy file of a running daemon: read, taken up, kept for the next start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nri_gpu.domain.errors import PolicyError
from nri_gpu.log import logger
from nri_gpu.policy.model import Policy
from nri_gpu.policy.parse import override
from nri_gpu.settings import PolicyText, build_policy, keep_last_good, last_good_text, read_policy


class PolicyFile:
    """One policy file with the command line's options over it. path: None for the default file."""

    def __init__(self, path: str | None, options: Mapping[str, object], state_dir: Path) -> None:
        """Raises: PolicyError: an option is wrong."""
        self._path = Path(path) if path else None
        self.options = options
        self._state_dir = state_dir
        self._text: PolicyText | None = None  # in place of the file
        self.taken: PolicyText | None = None  # what the policy in force was read from; None: every default
        self.salvage = override(Policy.default(), options)  # what holds where the file says nothing usable

    def load(self) -> Policy:
        """The file as it is now, kept as the last good one. Raises: PolicyError."""
        return self._take(self._text or read_policy(self._path))

    def load_text(self, name: str, text: str) -> Policy:
        """A policy that came as text, in place of the file from now on, good or not. Raises: PolicyError."""
        self._text = PolicyText(name, text)
        return self._take(self._text)

    def _take(self, source: PolicyText | None) -> Policy:
        policy = build_policy(source, self.options)
        self.taken = source
        try:
            keep_last_good(self._state_dir, source.text if source else "")
        except OSError as error:
            logger.bind(fault=str(error)).warning("this good policy could not be kept for the next start")
        return policy

    def last_good(self) -> Policy | None:
        """The one kept by an earlier run, if it still can be used."""
        try:
            self.taken = last_good_text(self._state_dir)
            return build_policy(self.taken, self.options) if self.taken else None
        except PolicyError as error:
            logger.bind(fault=str(error.faults[0])).error("the kept policy is not usable either")
            return None
