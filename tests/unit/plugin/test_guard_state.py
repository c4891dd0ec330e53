"""The daemon's state folder as the guard reads it: no request parses anything, and no change is missed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import pytest

from nri_gpu.nri.subscription import Event
from nri_gpu.plugin import guard_state
from nri_gpu.plugin.guard import Guard
from nri_gpu.plugin.guard_state import DaemonState
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import LAST_GOOD, OPTIONS, PolicyFile, keep_last_good, load_last_good
from nri_gpu.records.state_folder import StateFolder
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import KEY, Bench
from tests.support.running import running

SOON_S: Final = 2.0  # less than guard_state.LOOK_S: what the watch tells comes before that
STRICT: Final = "schema = 1\n"
IGNORING: Final = 'schema = 1\n[namespaces]\ndeny = ["*"]\notherwise = "ignore"\n'


def is_ignoring(state: DaemonState) -> bool:
    return state.policy().namespaces.deny.patterns == ("*",)


async def until(state: DaemonState, *, ignoring: bool) -> None:
    async with asyncio.timeout(SOON_S):
        while is_ignoring(state) is not ignoring:  # noqa: ASYNC110 - a value of a thread
            await asyncio.sleep(0.005)


def test_the_key_that_the_daemon_made_and_no_copy_of_it(tmp_path: Path, log: Log) -> None:
    state, file = DaemonState(tmp_path, None), tmp_path / "key"
    assert state.key() is None
    made = StateFolder(tmp_path).key()
    assert state.key() == made
    for other in (KEY[1:], KEY + b"x"):
        file.write_bytes(other)
        assert state.key() is None
    file.write_bytes(KEY)
    assert state.key() == KEY
    assert log.lines == []
    file.chmod(0o644)
    assert (state.key(), state.key()) == (None, None)
    assert [line.fields["path"] for line in log.warnings()] == [str(file)]
    file.unlink()
    assert state.key() is None


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir(0o700)


def a_link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("moved")))


KEY_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "others may read it": (lambda file: file.chmod(0o644), "Remove what is in the place of the key"),
    "a folder": (a_folder, "Remove what is in"),
    "a link": (a_link, "Remove what is in"),
    "not root's guard": (lambda _: os.seteuid(65534), "Run the guard as root, with the daemon's --state-dir."),
}


@pytest.mark.parametrize(("spoil", "fix"), KEY_FAULTS.values(), ids=KEY_FAULTS)
def test_a_key_that_is_not_read_is_logged_with_the_fix_for_that_fault(
    tmp_path: Path, log: Log, spoil: Callable[[Path], None], fix: str
) -> None:
    StateFolder(tmp_path).key()
    state = DaemonState(tmp_path, None)
    spoil(tmp_path / "key")
    try:
        assert state.key() is None
    finally:
        os.seteuid(0)
    assert str(log.one("key not read: no signed grant is valid").fields["fix"]).startswith(fix)


async def test_a_request_takes_the_policy_as_it_was_parsed_and_parses_nothing(tmp_path: Path) -> None:
    """The runtime waits for it; thousands of rules take as long to parse as it waits."""
    rules = "".join(f'[[rule]]\nname = "r{number}"\nallow = true\nnamespace = "n{number}"\n' for number in range(400))
    keep_last_good(tmp_path, STRICT + rules)
    state = DaemonState(tmp_path, None)
    before = state.policy()
    assert len(before.rule.rules) == 400
    keep_last_good(tmp_path, IGNORING)
    assert state.policy() is before
    async with running(state.follow()):
        await until(state, ignoring=True)
        assert state.policy() is state.policy()


@pytest.mark.parametrize("folder_first", [True, False], ids=["folder", "no folder yet"])
async def test_each_change_of_policy_and_options_is_followed_at_once(tmp_path: Path, *, folder_first: bool) -> None:
    """Also in a folder that the daemon makes later, or makes anew."""
    folder, file = tmp_path / "run" / "nri-gpu", tmp_path / "etc" / "policy.toml"
    if folder_first:
        folder.mkdir(parents=True)
    file.parent.mkdir()
    file.write_text(STRICT)
    state = DaemonState(folder, file)
    async with running(state.follow()):
        await asyncio.sleep(0.05)
        file.write_text(IGNORING)  # as long as the daemon kept none
        await until(state, ignoring=True)
        folder.mkdir(parents=True, exist_ok=True)
        keep_last_good(folder, STRICT)
        await until(state, ignoring=False)
        (folder / OPTIONS).write_bytes(msgspec.json.encode({"kubelet.enabled": True}))
        async with asyncio.timeout(SOON_S):
            while not state.policy().kubelet.enabled:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        (folder / OPTIONS).unlink()
        (folder / LAST_GOOD).unlink()
        folder.rmdir()
        await until(state, ignoring=True)
        folder.mkdir()
        keep_last_good(folder, STRICT)
        await until(state, ignoring=False)


async def test_what_changes_while_it_is_parsed_is_parsed_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_last_good(tmp_path, STRICT)
    state = DaemonState(tmp_path, None)
    parsing, parse, load = threading.Event(), threading.Event(), load_last_good

    def slow(*given: object) -> Policy | None:
        found = load(*given)  # type: ignore[arg-type]
        parsing.set()
        parse.wait(SOON_S)
        return found

    monkeypatch.setattr(guard_state, "load_last_good", slow)
    async with running(state.follow()):
        keep_last_good(tmp_path, STRICT + "# changed\n")
        assert await asyncio.to_thread(parsing.wait, SOON_S)
        keep_last_good(tmp_path, IGNORING)
        began = time.monotonic()
        assert not is_ignoring(state)
        assert time.monotonic() - began < SOON_S / 2  # it did not wait for what is being read
        parse.set()
        await until(state, ignoring=True)


@pytest.mark.parametrize("broken", ["schema = ", "schema = 1\n[nonsense]\nx = 1\n"], ids=["no TOML", "unknown"])
async def test_a_policy_that_cannot_be_used_leaves_the_one_before(tmp_path: Path, log: Log, broken: str) -> None:
    """It is logged once, and told in the guard's status, until one can be used."""
    keep_last_good(tmp_path, IGNORING)
    state = DaemonState(tmp_path, None)
    async with running(state.follow()):
        for _ in range(2):
            keep_last_good(tmp_path, broken)
            await asyncio.sleep(0.2)
        assert is_ignoring(state)
        said = log.one("policy not reloaded, the old one stays")
        assert said.level == "ERROR"
        assert said.fields["fault"] == state.policy_fault != ""
        keep_last_good(tmp_path, STRICT)
        await until(state, ignoring=False)
        assert state.policy_fault == ""


@pytest.mark.parametrize("parsed", ["{", '{"a": []}'])
def test_without_any_usable_policy_each_that_asks_needs_a_grant(tmp_path: Path, log: Log, parsed: str) -> None:
    keep_last_good(tmp_path, IGNORING)
    (tmp_path / OPTIONS).write_text(parsed)
    state = DaemonState(tmp_path, None)
    assert state.policy().fault == state.policy_fault != ""
    log.one("policy not usable: every container that requests GPUs needs a valid grant")


@pytest.mark.parametrize("daemon_first", [True, False], ids=["daemon first", "guard first"])
@pytest.mark.parametrize("loosens", [True, False], ids=["ignores now", "grants now"])
async def test_what_the_daemon_signed_decides_whoever_reads_the_new_policy_first(
    tmp_path: Path, *, daemon_first: bool, loosens: bool
) -> None:
    """A container is created between the two reloads, and started before and after the second one."""
    before, after = (STRICT, IGNORING) if loosens else (IGNORING, STRICT)
    (tmp_path / "policy.toml").write_text(before)
    daemon = PolicyFile(str(tmp_path / "policy.toml"), {}, tmp_path)
    bench = Bench(daemon.load())
    StateFolder(tmp_path).key()
    (tmp_path / "key").write_bytes(KEY)
    state = DaemonState(tmp_path, None)
    guard = Guard(state, lambda action: action())
    guard.runtime = "containerd"
    (tmp_path / "policy.toml").write_text(after)
    read = daemon.load(again=True)  # kept for the guard before it is in force
    following = running(state.follow())
    if daemon_first:
        bench.state.use(read)
    else:
        await following.__aenter__()
        await until(state, ignoring=loosens)
    of, made = bench.granted()
    ignored = loosens is daemon_first
    assert bool(bench.phases()) is not ignored
    began = guard.lifecycle(nri.event(Event.START_CONTAINER, of, made)[1])
    assert began == b""
    if daemon_first:
        await following.__aenter__()
        await until(state, ignoring=loosens)
    else:
        bench.state.use(read)
    try:
        assert guard.lifecycle(nri.event(Event.START_CONTAINER, of, made)[1]) == b""
        other = nri.asking("1", "unsigned")
        unsigned = guard.lifecycle(nri.event(Event.START_CONTAINER, other, nri.container(other))[1])
        assert isinstance(unsigned, Status) is not loosens
    finally:
        await following.__aexit__(None, None, None)
