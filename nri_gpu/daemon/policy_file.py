"""The policy file: found, read and parsed; the last good one, kept for the next start; and which one is in force.

TOML text and command line options become raw mappings here; `nri_gpu.policy` knows what they mean. The environment is
not read: `check` could not show a setting that a unit file or a shell profile changes.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.policy.lines import key_lines
from nri_gpu.policy.model import Policy
from nri_gpu.policy.parse import override, parse_policy
from nri_gpu.system.storage import Signature, signature, stat_of, write_whole
from nri_gpu.system.tasks import LogOnce

if TYPE_CHECKING:
    from nri_gpu.system.state import NodeState

DEFAULT_PATH: Final = Path("/etc/nri-gpu/policy.toml")
LAST_GOOD: Final = "policy.last"  # in the state folder
POLICY_MAX: Final = 1 << 20  # bytes; the largest lists allowed need a tenth of it

LOOK_S: Final = 10.0
REMIND_S: Final = 30.0
SETTLE_S: Final = 0.2  # a file that is written in place is whole once it has not changed for so long

_PLACE: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class PolicyText(Struct, frozen=True):
    """A policy file as it was read. file: what faults call it."""

    file: str
    text: str


def load_policy(path: str | Path | None, overrides: Mapping[str, object] | None = None) -> Policy:
    """The policy of a file with command line options put over it.

    path: None for the default file, which may be missing: then every default holds. overrides: key path
    (`plugin.socket`) -> raw value, None where the option was not given.

    Raises: PolicyError: with every fault of the file and of the options.
    """
    return build_policy(read_policy(path), overrides)


def read_policy(path: str | Path | None) -> PolicyText | None:
    """The text of a policy file; None when the default file is not there.

    Raises: PolicyError: an explicitly named file is missing, or the file cannot be read.
    """
    chosen = Path(path or DEFAULT_PATH)
    try:
        return PolicyText(str(chosen), _read(chosen))
    except FileNotFoundError:
        if not path:
            return None
        raise _fault(chosen, "no such file; leave --policy out to start with the defaults") from None
    except PermissionError:
        raise _fault(chosen, f"user {os.geteuid()} may not read it") from None
    except OSError as error:
        raise _fault(chosen, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _fault(chosen, f"is not UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}") from None


def build_policy(source: PolicyText | None, overrides: Mapping[str, object] | None = None) -> Policy:
    """The policy of a text already read. Raises: PolicyError: with every fault of the text and of the options."""
    given = overrides or {}
    try:
        policy = Policy.default() if source is None else _parse(source)
    except PolicyError as file_error:
        try:
            override(Policy.default(), given)
        except PolicyError as option_error:
            raise PolicyError(file_error.faults + option_error.faults) from None
        raise
    return override(policy, given)


def keep_last_good(state_dir: Path, text: str) -> None:
    """Keep a policy that was put in force: whole or not at all, readable by root alone. Raises: OSError."""
    write_whole(state_dir / LAST_GOOD, text.encode(), sync=True)


def last_good_text(state_dir: Path) -> PolicyText | None:
    """The policy kept by an earlier run; None when none is. Raises: PolicyError: it cannot be read."""
    path = state_dir / LAST_GOOD
    return read_policy(path) if stat_of(path) else None


def load_last_good(state_dir: Path, overrides: Mapping[str, object] | None = None) -> Policy | None:
    """The same, parsed. Raises: PolicyError: it cannot be read, or this version does not accept it."""
    text = last_good_text(state_dir)
    return build_policy(text, overrides) if text else None


def file_advice(path: Path) -> tuple[str, ...]:
    """What `check` warns of in the file itself: whoever may write it decides who gets GPUs."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ()
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (f"{path} may be written by others than its owner (mode {stat.S_IMODE(mode):04o}): chmod go-w {path}",)
    return ()


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


def _parse(source: PolicyText) -> Policy:
    try:
        raw = tomllib.loads(source.text)
    except RecursionError:
        raise PolicyError((Fault(source.file, "", "is nested too deeply"),)) from None
    except ValueError as error:  # TOMLDecodeError, and what int() says of a number with thousands of digits
        raise PolicyError((_syntax_fault(source, str(error)),)) from None
    return parse_policy(raw, source.file, key_lines(source.text))


def _syntax_fault(source: PolicyText, message: str) -> Fault:
    place = _PLACE.search(message)
    sentence = _PLACE.sub("", message)
    line = source.text.count("\n") + 1 if place and place[1] is None else int(place[1]) if place else None
    shown = ascii(sentence)[1:-1][:200]
    return Fault(source.file, "", f"not TOML: {shown[:1].lower()}{shown[1:]}", line)


def _fault(path: Path, message: str) -> PolicyError:
    return PolicyError((Fault(str(path), "", message),))


class PolicyFile:
    """One policy file with the command line's options over it. path: None for the default file."""

    def __init__(self, path: str | None, options: Mapping[str, str | bool], state_dir: Path) -> None:
        """Raises: PolicyError: an option is wrong."""
        self._path = path
        self.options = options
        self._state_dir = state_dir
        self._text: PolicyText | None = None  # in place of the file
        self.fault = ""  # of what was read last: another policy is in force then
        self.taken: PolicyText | None = None  # what the policy in force was read from; None: every default
        self.salvage = override(Policy.default(), options)  # what holds where the file says nothing usable

    def load(self) -> Policy:
        """The file as it is now, kept as the last good one. Raises: PolicyError."""
        return self._tried(lambda: self._text or read_policy(self._path))

    def load_text(self, name: str, text: str) -> Policy:
        """A policy that came as text: it replaces the file from now on, good or not. Raises: PolicyError."""
        self._text = given = PolicyText(name, text)
        return self._tried(lambda: given)

    def _tried(self, read: Callable[[], PolicyText | None]) -> Policy:
        try:
            policy = self._take(read())
        except PolicyError as error:
            self.fault = str(error.faults[0])
            raise
        self.fault = ""
        return policy

    def _take(self, source: PolicyText | None) -> Policy:
        policy = build_policy(source, self.options)
        self.taken = source
        try:
            keep_last_good(self._state_dir, source.text if source else "")
        except OSError as error:
            logger.bind(fault=str(error)).warning("policy not kept for the next start")
        return policy

    def last_good(self) -> Policy | None:
        """The policy kept by an earlier run; None where there is none that can be used."""
        try:
            self.taken = last_good_text(self._state_dir)
            return build_policy(self.taken, self.options) if self.taken else None
        except PolicyError as error:
            logger.bind(fault=str(error.faults[0])).error("last good policy not usable either")
            return None


def first_policy(file: PolicyFile) -> Policy:
    """The policy to start with: the file's, else the last good one that was kept, else a broken one."""
    try:
        return file.load()
    except PolicyError as error:
        _log_faults(error, "policy not usable")
        last = file.last_good()
        if last is None:
            logger.error("no good policy is kept: every container that asks will be refused")
            return Policy.broken(str(error.faults[0]))
        logger.warning("started on the last good policy")
        return last


class PolicyReload:
    """Puts policies in force. registered: the file's, which says how we register.

    changed: called with each good policy that took the place of another.
    """

    def __init__(
        self,
        file: PolicyFile,
        state: NodeState,
        changed: Callable[[Policy], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registered = state.settings.plugin
        self._faults = LogOnce(clock=clock)
        self._file = file
        self._state = state
        self._changed = changed
        self._one_at_a_time = asyncio.Lock()

    async def run(self) -> None:
        """Remind of a fault of the file, until cancelled."""
        while True:
            self.remind()
            await asyncio.sleep(REMIND_S)

    def remind(self) -> None:
        """Log a fault of the file that lasts for minutes as one error. When it was met, it was logged already."""
        if fault := self._file.fault:
            self._faults.fault = fault
            self._faults.warning("policy file still has a fault", fault)
        else:
            self._faults.clear()

    async def read_again(self) -> None:
        """Read the file again. A policy with faults is logged, and the one in force stays."""
        try:
            async with self._one_at_a_time:
                # In a thread: thousands of rules take as long to read as the runtime waits for an answer.
                policy = await asyncio.to_thread(self._file.load)
        except PolicyError as error:
            _log_faults(error, "policy not reloaded, the old one stays")
            return
        self.registered = policy.plugin
        self._state.use(policy)
        logger.bind(path=policy.source).info("policy reloaded")
        self._changed(policy)

    def take_text(self, text: str) -> None:
        """Use the drop-in file's text from Configure: for a plugin that the runtime starts, that is the policy."""
        try:
            policy = self._file.load_text("the runtime's NRI configuration for this plugin", text)
        except PolicyError as error:
            self._state.use(Policy.broken(str(error.faults[0])))
            _log_faults(error, "policy not usable")
        else:
            self._state.use(policy)
            self._changed(policy)


class PolicyWatch:
    """Calls `changed` once for each content of the file that it finds."""

    def __init__(
        self, file: Path, changed: Callable[[], None], *, look_s: float = LOOK_S, settle_s: float = SETTLE_S
    ) -> None:
        self._file = file
        self._changed = changed
        self._look_s = look_s
        self._settle_s = settle_s
        self._known = signature(file)

    async def run(self) -> None:
        from nri_gpu.system.inotify import folder_changed  # here, because it brings ctypes along

        while True:
            await folder_changed(self._file.parent, self._look_s)
            if signature(self._file) != self._known:
                self._known = await self._settled()
                self._changed()

    async def _settled(self) -> Signature | None:
        """The file's signature once it stays the same."""
        while True:
            before = signature(self._file)
            await asyncio.sleep(self._settle_s)
            if signature(self._file) == before:
                return before


def _log_faults(error: PolicyError, phrase: str) -> None:
    for fault in error.faults:
        logger.bind(fault=str(fault)).error(phrase)
