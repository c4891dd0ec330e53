"""What the guard reads of the daemon's state folder, and the one file that it writes about itself.

Nothing is remembered of the key, and of the policy no more than one parsing: both may be replaced at any moment, and
they are looked at only for a container that asked, at some ten microseconds from a filesystem in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from loguru import logger
from msgspec import Struct
from msgspec.structs import asdict

from nri_gpu.allocation.grant import KEY_BYTES, InvalidGrant, SignedGrant
from nri_gpu.decision.claim import may_ask_by_environment, needs_grant
from nri_gpu.decision.validate import grant_of, validate_adjusted, validate_start
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Reason
from nri_gpu.domain.names import DEFAULT_STATE, GRANT_KEY
from nri_gpu.nri import convert, lifecycle, validation
from nri_gpu.nri.convert import EMPTY
from nri_gpu.nri.events import Event
from nri_gpu.nri.lifecycle import Lifecycle
from nri_gpu.nri.session import Listed
from nri_gpu.nri.status import Reply, status_of
from nri_gpu.plugin.decision_log import container_fields, log_refusal
from nri_gpu.policy.health import OnBad
from nri_gpu.policy.model import Policy
from nri_gpu.system.storage import Signature, read_private, signature, write_whole

GUARD_SCHEMA: Final = "nri-gpu/guard/v1"
STATE_FILE: Final = "guard.json"
DEFAULT_RUN_DIR: Final = Path("/run/nri-gpu-guard")
TELL_S: Final = 5.0  # a living guard writes its state so often
_START_TIME: Final = 19  # field of /proc/PID/stat, counted behind the name: starttime (Linux: proc_pid_stat(5))


class DaemonState:
    """The daemon's state folder, read only.

    read_policy: called again when one of the policy_files has changed.
    """

    def __init__(self, folder: Path, policy_files: tuple[Path, ...], read_policy: Callable[[], Policy]) -> None:
        self._folder = folder
        self._policy_files = policy_files
        self._read_policy = read_policy
        self._known: tuple[tuple[Signature | None, ...], Policy] | None = None

    def key(self) -> bytes | None:
        """The marks' key; None where there is none, or none that anybody but root could not have put there."""
        file = self._folder / "key"
        try:
            key = read_private(file, KEY_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.bind(path=str(file), fault=error.strerror).warning("key not read: no mark holds")
            return None
        return key if len(key) == KEY_BYTES else None

    def policy(self) -> Policy:
        """The policy that containers are judged by."""
        signatures = tuple(map(signature, self._policy_files))
        if self._known is None or self._known[0] != signatures:
            self._known = (signatures, self._read_policy())
        return self._known[1]


class Seen(Struct, frozen=True, kw_only=True):
    """What a guard says of itself. validates: whether the runtime lets it judge creations too (NRI 0.10).

    ungranted: containers that ran without the GPUs they asked for when it connected last.
    fault: why it is not connected.
    """

    pid: int
    started: str
    connected: bool = False
    runtime: str = ""
    runtime_version: str = ""
    validates: bool = False
    ungranted: int = 0
    fault: str = ""


def write_seen(folder: Path, seen: Seen) -> None:
    """For `check`: which anybody may run. Raises: OSError."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_whole(folder / STATE_FILE, json.dumps({"schema": GUARD_SCHEMA, **asdict(seen)}).encode(), 0o644)


def read_seen(folder: Path = DEFAULT_RUN_DIR) -> Seen | None:
    """What the guard that runs now says of itself; None where none runs."""
    try:
        raw: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        seen = Seen(**{name: raw[name] for name in Seen.__struct_fields__ if name in raw})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return seen if seen.started == started(seen.pid) else None


def silent_s(folder: Path, now: float) -> float:
    """Seconds since the guard wrote its state. now: since the epoch. Raises: OSError: there is none."""
    return now - (folder / STATE_FILE).stat().st_mtime


def started(pid: int) -> str:
    """When a process was started, in the kernel's own count: a pid may be another's by now. Empty: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_TIME]
    except (OSError, IndexError):
        return ""


EVENTS: Final = (Event.START_CONTAINER, Event.VALIDATE_CONTAINER_ADJUSTMENT)
# Runtimes that heed an error answered to START_CONTAINER. CRI-O logs it and goes on (server/container_start.go), Docker
# sends none: there the creation is judged too, where a plugin behind the injector sees the mark already. It costs a
# round trip for every container, so not where it would only refuse what will not start anyway.
HEED_STARTS: Final = frozenset({"containerd"})


class State(Protocol):
    """What is read of the daemon's state folder."""

    def key(self) -> bytes | None:
        """The marks' key as it is now; None: there is none, so no mark can be valid."""

    def policy(self) -> Policy:
        """The policy that the daemon serves by."""


class Found(Struct, frozen=True):
    """Containers that ask and hold no grant, as the runtime listed them at Synchronize.

    running: nobody ever decided on them. doubtful: they run, with a mark that does not hold. waiting: created and not
    started, and they will not be.
    """

    running: tuple[Container, ...] = ()
    doubtful: tuple[Container, ...] = ()
    waiting: tuple[Container, ...] = ()


class Guard:
    """Judges for one runtime. found: as of the last Synchronize. later: run once the reply is on its way.

    runtime: its name, as it told before it asked for `events`.
    """

    stage_dir = ""  # it lets nothing go

    def __init__(self, state: State, later: Callable[[Callable[[], None]], object]) -> None:
        self.found = Found()
        self.runtime = ""
        self._state = state
        self._later = later

    @property
    def events(self) -> tuple[Event, ...]:
        """What it must hear of."""
        return EVENTS if self.runtime in HEED_STARTS else (*EVENTS, Event.CREATE_CONTAINER)

    def unanswered(self, payload: bytes) -> None:
        """Nothing was promised."""

    def create_container(self, payload: bytes) -> Reply:
        """CreateContainer, as the plugins before this one left it."""
        return self._judge(convert.request_from_pb(payload), "container refused") if self._asks(payload) else EMPTY

    def validate(self, payload: bytes) -> Reply:
        """ValidateContainerAdjustment: no creation without a grant, nor with GPU nodes that no grant names."""
        if not validation.concerns_us(payload) and not self._asks(payload):
            return EMPTY
        adjusted = validation.adjusted_from_pb(payload, GRANT_KEY)
        reason = validate_adjusted(adjusted, self._state.key(), self._state.policy())
        if reason:
            self._log(adjusted.container, reason, "container rejected")
        return validation.verdict_to_pb(reason)

    def lifecycle(self, event: int, payload: bytes) -> Reply:
        """An event by its own RPC."""
        if event != Event.START_CONTAINER or not self._asks(payload):
            return EMPTY
        return self._start(lifecycle.event_from_pb(event, payload))

    def state_change(self, payload: bytes) -> Reply:
        """An event by StateChange."""
        if not self._asks(payload):
            return EMPTY
        change = lifecycle.state_change_from_pb(payload)
        return self._start(change) if change.event == Event.START_CONTAINER else EMPTY

    def synchronized(self, listed: tuple[Listed, ...], request_timeout_s: float = 0.0) -> None:
        """What happened while nobody looked: it is reported, and `found` for whoever stops it."""
        key, policy = self._state.key(), self._state.policy()
        running: list[Container] = []
        doubtful: list[Container] = []
        waiting: list[Container] = []
        for item in listed:
            mark = _mark(item.container, key)
            if isinstance(mark, SignedGrant) or not needs_grant(item.container, policy):
                continue
            (waiting if item.created else doubtful if isinstance(mark, InvalidGrant) else running).append(
                item.container
            )
            _report(item, mark)
        self.found = Found(tuple(running), tuple(doubtful), tuple(waiting))

    def _asks(self, payload: bytes) -> bool:
        """Whether it may ask: by annotation; by environment, which every CUDA image has, where policy lets anybody."""
        if convert.PREFIX.encode() in payload:
            return True
        return convert.VISIBLE_NEEDLE in payload and may_ask_by_environment(self._state.policy())

    def _start(self, change: Lifecycle) -> Reply:
        return self._judge(change.container, "start refused") if change.container else EMPTY

    def _judge(self, container: Container, phrase: str) -> Reply:
        mark = _mark(container, self._state.key())
        if isinstance(mark, SignedGrant):  # the policy is read for the others only
            return EMPTY
        reason = validate_start(container, mark, self._state.policy())
        if reason is None:
            return EMPTY
        self._log(container, reason, phrase)
        return status_of(reason)

    def _log(self, container: Container, reason: Reason, phrase: str) -> None:
        self._later(lambda: log_refusal(container_fields(container), reason, phrase))


def _mark(container: Container, key: bytes | None) -> SignedGrant | InvalidGrant | None:
    return grant_of(container, container.annotations.get(GRANT_KEY), key)


def _report(item: Listed, mark: InvalidGrant | None) -> None:
    bound = logger.bind(**container_fields(item.container))
    if item.created:
        bound.info("container asked for GPUs and holds no grant: it will not start")
    elif mark:
        bound.bind(fault=mark.why).warning("container runs with a grant that does not hold")
    else:
        bound.warning("container runs without the GPUs it asked for")


def guard_advice(policy: Policy, state_dir: Path = DEFAULT_STATE, run_dir: Path = DEFAULT_RUN_DIR) -> tuple[str, ...]:
    """One sentence a thing to be done."""
    # In a pod another pod's guard cannot be seen: its readiness says what is said here.
    seen_here = state_dir.exists() and "KUBERNETES_SERVICE_HOST" not in os.environ
    return (*_settings(policy), *(_on_this_node(run_dir) if seen_here else ()))


def _settings(policy: Policy) -> Iterator[str]:
    if policy.guard.index <= policy.plugin.index:
        yield (
            f'guard.index = "{policy.guard.index}" is not behind plugin.index = "{policy.plugin.index}": starts are '
            "then refused with the guard's sentence, where nri-gpu's own would say more"
        )
    if policy.guard.stop_ungranted and find_spec("grpc") is None:
        yield "guard.stop_ungranted has no effect: grpcio is not installed; pip install 'nri-gpu[cri]'"
    if policy.health.containers is OnBad.STOP and find_spec("grpc") is None:
        yield "health.containers has no effect: grpcio is not installed; pip install 'nri-gpu[cri]'"


def _on_this_node(run_dir: Path) -> Iterator[str]:
    """Of a node that nri-gpu has served since it booted: on any other there is nothing to guard."""
    seen = read_seen(run_dir)
    if seen is None:
        yield (
            "no guard runs on this node: a container that asks for GPUs, created and started while `nri-gpu run` is "
            "away, runs without them; systemctl enable --now nri-gpu-guard"
        )
    elif not seen.connected:
        why = seen.fault or "`systemctl status nri-gpu-guard` says why"
        yield f"the guard (pid {seen.pid}) is not connected to the runtime: {why}"
    elif seen.ungranted:
        yield (
            f"{seen.ungranted} containers ran without the GPUs they asked for when the guard connected: "
            "`journalctl -u nri-gpu-guard` names them; delete their pods to have them granted"
        )
