"""The policy file: its search and parsing, the last good policy kept for the next start, and the policy of this start.

The memory that a policy was in force outlives a reboot: without it, a file that vanished would be no file.
TOML text and command line options become raw mappings here; `nri_gpu.policy` knows what they mean. The environment is
not read: `check` could not show a setting that a unit file or a shell profile changes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import Fault, PolicyError, cause_of, fault_of
from nri_gpu.domain.finding import Finding, warning
from nri_gpu.domain.names import POLICY_FILE
from nri_gpu.policy.lines import key_lines, read_toml
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.policy.read import option_faults, override, parse_policy
from nri_gpu.system.storage import stat_of, text_of, write_whole

DEFAULT_PATH: Final = Path(POLICY_FILE)
LAST_GOOD: Final = "policy.last"  # in the state folder
# A file of its own, since earlier versions read the first as TOML, and take an empty one for no policy. A daemon that
# dies between the two writes has served no runtime yet, and the next one writes both.
OPTIONS: Final = "policy.options"  # likewise, those of the command line that go over it, in JSON: for the guard
POLICY_MAX: Final = 1 << 20  # bytes; the largest lists allowed need a tenth of it
BLANKS: Final = " \t\r\n"  # TOML's; a NUL is none of them
FORGET: Final = "run `nri-gpu check --forget` and reload nri-gpu to go back to the defaults"
UNIT_FOLDER: Final = Path("/var/lib/nri-gpu")  # the state directory of systemd/nri-gpu.service
IN_FORCE: Final = "policy.in-force"  # in that folder
RUNTIME: Final = "the runtime's NRI configuration for this plugin"
UNKNOWN: Final = "a file that is no longer known"


class PolicyText(Struct, frozen=True):
    """A policy file as it was read. file: its name in faults."""

    file: str
    text: str

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the text, as `sha256sum` prints it of the file."""
        return sha256(self.text.encode()).hexdigest()

    @property
    def blank(self) -> bool:
        return not self.text.strip(BLANKS)


def load_policy(
    path: str | Path | None, overrides: Mapping[str, object] | None = None, *, all_options: bool = True
) -> Policy:
    """Return the policy of a file with command line options put over it.

    path: None for the default file, which may be missing: then every default holds. overrides, all_options: as
    `build_policy` takes them.

    Raises: PolicyError, with every fault of the file and of the options.
    """
    return build_policy(read_policy(path), overrides, all_options=all_options)


def read_policy(path: str | Path | None, *, in_force: bool = False) -> PolicyText | None:
    """Return the text of a policy file, or None if the default file is missing.

    in_force: whether a policy was: a file that is missing, or has only blanks, is a fault from then on.

    Raises: PolicyError, if an explicitly named file is missing, or the file cannot be read.
    """
    chosen = Path(path or DEFAULT_PATH)
    try:
        source = PolicyText(str(chosen), _read(chosen))
    except FileNotFoundError:
        if chosen.is_symlink():
            raise _fault(chosen, f"is a link to {chosen.readlink()}, which is missing: restore that file") from None
        if in_force:
            raise _lost(chosen, "is missing") from None
        if not path:
            return None
        raise _fault(chosen, "no such file") from None
    except PermissionError:
        raise _fault(chosen, f"user {os.geteuid()} may not read it", denied=True) from None
    except OSError as error:
        raise _fault(chosen, f"cannot be read: {cause_of(error)}") from None
    except UnicodeDecodeError as error:
        raise _fault(chosen, f"is not UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}") from None
    if in_force and source.blank:
        raise _lost(chosen, "is empty")
    return source


def build_policy(
    source: PolicyText | None, overrides: Mapping[str, object] | None = None, *, all_options: bool = True
) -> Policy:
    """Return the policy of a text already read, with command line options over it; None: no file, so every default.

    overrides: key path (`plugin.socket`) -> raw value, None where the option was not given. all_options: whether these
    are all that the daemon has; if not, what its others could mend is no fault.

    Raises: PolicyError, with all faults of text and options.
    """
    if source is None:
        return parse_policy({}, BUILT_IN, {}, overrides, all_options=all_options)
    try:
        raw = read_toml(source.text, source.file)
    except PolicyError as error:  # in the end as well as the options'
        raise PolicyError((*error.faults, *option_faults(overrides or {}))) from None
    return parse_policy(raw, source.file, key_lines(source.text), overrides, all_options=all_options)


def keep_last_good(state_dir: Path, text: str) -> None:
    """Keep a policy that was put in force: whole or not at all, readable by root alone. Raises: OSError."""
    write_whole(state_dir / LAST_GOOD, text.encode(), sync=True)


def last_good_text(state_dir: Path) -> PolicyText | None:
    """Return the policy kept by an earlier run, or None if none was. Raises: PolicyError, if the file is unreadable."""
    path = state_dir / LAST_GOOD
    kept = read_policy(path) if stat_of(path) else None
    return None if kept is None or kept.blank else kept


def kept_options(state_dir: Path) -> Mapping[str, object]:
    """Return the options of the daemon's command line, or none if it kept none.

    Raises: PolicyError: they are not what was written.
    """
    path = state_dir / OPTIONS
    if (text := text_of(path, encoding="utf-8")) is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str | bool])
    except msgspec.DecodeError as error:
        raise _fault(path, f"is not what nri-gpu wrote ({error}): restart nri-gpu, which writes it anew") from None


def was_kept(state_dir: Path) -> bool:
    """Return whether a daemon kept a policy there; a policy that cannot be read counts."""
    try:
        return last_good_text(state_dir) is not None
    except (PolicyError, OSError):
        return True


def load_last_good(state_dir: Path, overrides: Mapping[str, object] | None = None) -> Policy | None:
    """Return `last_good_text`, parsed, for others than the daemon, which has options that they do not know.

    Raises: PolicyError, if this version cannot read or accept it.
    """
    text = last_good_text(state_dir)
    return build_policy(text, overrides, all_options=False) if text else None


def file_advice(path: Path) -> Iterator[Finding]:
    """Warn of a file that users other than its owner may write: they decide who gets GPUs."""
    with suppress(OSError):
        mode = path.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            who = f"may be written by users other than its owner (mode {stat.S_IMODE(mode):04o})"
            yield warning("policy file", f"{path} {who}: chmod go-w {path}")


def _read(path: Path) -> str:
    # Without O_NONBLOCK, a FIFO in place of the file would block the daemon's start for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _fault(path, "is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(POLICY_MAX + 1)
    if len(data) > POLICY_MAX:
        raise _fault(path, f"is longer than {POLICY_MAX} bytes")
    return data.decode("utf-8")


def _fault(path: Path | str, message: str, *, denied: bool = False) -> PolicyError:
    return PolicyError((Fault(str(path), "", message, denied=denied),))


def _lost(path: Path | str, how: str) -> PolicyError:
    return _fault(path, f"{how}, and a policy was in force: put it back, or {FORGET}")


def unit_folder() -> Path | None:
    """Return the first folder that systemd made for `StateDirectory=`, or None outside a unit."""
    first = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(first) if first else None


class PolicyMemory:
    """The memory in this folder. Without a folder, as for a daemon that is started by hand, nothing is remembered."""

    def __init__(self, folder: Path | None) -> None:
        self.file = folder / IN_FORCE if folder else None

    @property
    def source(self) -> str:
        """Return the origin of the last policy in force, or empty. A memory that cannot be read counts as a policy."""
        if self.file is None:
            return ""
        try:
            if stat_of(self.file) is None:
                return ""
        except OSError:
            return UNKNOWN
        return (text_of(self.file, encoding="utf-8") or "").strip() or UNKNOWN

    def remember(self, source: str) -> None:
        """Remember that a policy from `source` is in force. Raises: OSError."""
        if self.file and self.source != source:
            write_whole(self.file, f"{source}\n".encode(), sync=True)


FORGETFUL: Final = PolicyMemory(None)


class PolicyFile:
    """A policy file with the command line's options over it.

    path: None for the default file. memory: that a policy was in force; by default nothing is remembered.
    """

    def __init__(
        self,
        path: str | None,
        options: Mapping[str, str | bool],
        state_dir: Path,
        memory: PolicyMemory = FORGETFUL,
    ) -> None:
        """Begin without a policy. Raises: PolicyError, if an option is wrong."""
        self._path = path
        self.options = options
        self._state_dir = state_dir
        self._memory = memory
        self.text: PolicyText | None = None  # the runtime's, in place of the file
        self._sends_none = False  # the runtime has told us so
        self._used: Policy | None = None  # the last that had no fault
        self.before: Policy | None = None  # what that took the place of, where a policy was in force
        self.fault = ""  # of what was read last: another policy is in force then
        self.taken: PolicyText | None = None  # what the policy in force was read from; None: every default
        self.salvage = override(Policy.default(), options)  # what holds where the file says nothing usable

    @property
    def from_runtime(self) -> bool:
        """Return whether the last policy in force came from the runtime: then the file says only how we register."""
        return self._memory.source == RUNTIME

    def load(self, *, again: bool = False) -> Policy:
        """Return the file's policy now, kept as the last good one. again: not at a start. Raises: PolicyError."""
        try:
            policy = self._take(self._read(), again=again)
        except PolicyError as error:
            self.fault = str(error.faults[0])
            raise
        self.fault = ""
        return policy

    def load_text(self, text: str) -> Policy:
        """Put the runtime's text in the place of the file from now on, good or not. Raises: PolicyError."""
        self.text = PolicyText(RUNTIME, text)
        return self.load()

    def load_without_text(self) -> Policy:
        """Load the file, as the runtime sends no text. Raises: PolicyError, also if such a text was in force."""
        self.text, self._sends_none = None, True
        return self.load()

    def _read(self) -> PolicyText | None:
        if self.text:
            return self.text
        if not self.from_runtime:
            return read_policy(self._path, in_force=self._was_in_force())
        if self._sends_none:
            raise _lost(RUNTIME, "is not sent any more")
        return read_policy(self._path)

    def _was_in_force(self) -> bool:
        """Return whether a policy was in force; earlier versions only kept the text, and remembered nothing else."""
        return self._memory.file is not None and bool(self._memory.source or was_kept(self._state_dir))

    def _take(self, source: PolicyText | None, *, again: bool) -> Policy:
        policy = build_policy(source, self.options)
        if again and policy.empty_tables:
            raise PolicyError(policy.empty_tables)
        for fault in policy.empty_tables:
            logger.bind(fault=str(fault)).warning("policy has a table without a key")
        if policy.ignored:
            logger.bind(fault="; ".join(each.meaning for each in policy.ignored)).warning(
                "policy has settings that are ignored"
            )
        if self.from_runtime and self.text is None:
            return policy
        self.before = self._used or self._kept_before(source)
        self.taken, self._used = source, policy
        if source and not source.blank:
            self._keep(lambda: self._memory.remember(source.file))
        self._keep(lambda: keep_last_good(self._state_dir, source.text if source else ""))
        return policy

    def keep_options(self) -> None:
        """Keep the options for the guard, which reads the last good policy and has no command line of ours."""
        self._keep(lambda: write_whole(self._state_dir / OPTIONS, msgspec.json.encode(self.options)))

    def _keep(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except OSError as error:
            logger.bind(fault=fault_of(error)).warning("policy not kept for the next start")

    def _kept_before(self, source: PolicyText | None) -> Policy | None:
        """Return the previous daemon's policy, or None if there was none, or it had this very text."""
        try:
            kept = last_good_text(self._state_dir)
            same = kept is None or (source and source.text == kept.text)
            return None if same else build_policy(kept, all_options=False)
        except PolicyError:
            return None

    def last_good(self) -> Policy | None:
        """Return the policy kept by an earlier run, or None if there is none that can be used."""
        try:
            self.taken = last_good_text(self._state_dir)
            return build_policy(self.taken, self.options) if self.taken else None
        except PolicyError as error:
            logger.bind(fault=str(error.faults[0])).error("last good policy not usable either")
            return None


def first_policy(file: PolicyFile) -> Policy:
    """Return the policy to start with: the file's, else the last good one that was kept, else a broken one."""
    try:
        return file.load()
    except PolicyError as error:
        for fault in error.faults:
            logger.bind(fault=str(fault)).error("policy not usable")
        last = file.last_good()
        if last is None:
            logger.error("no good policy is kept: every container that requests GPUs is refused")
            return Policy.broken(str(error.faults[0]))
        logger.warning("started on the last good policy")
        return last
