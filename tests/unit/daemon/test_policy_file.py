"""The policy on disk: read with every fault, kept for the next start, and read again when it changes."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from nri_gpu.daemon import policy_file as settings
from nri_gpu.daemon.policy_file import (
    LAST_GOOD,
    POLICY_MAX,
    PolicyFile,
    PolicyReload,
    PolicyWatch,
    file_advice,
    first_policy,
    keep_last_good,
    load_last_good,
    load_policy,
    read_policy,
)
from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.policy.select import Denied, select
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.configmap import ConfigMapFolder
from tests.support.daemon import Launch, NriGpu
from tests.support.log import Log
from tests.support.scripted_runtime import until

BAD = "[plugin]\nindex = 5\n"


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "policy.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def faults(path: Path | None, overrides: dict[str, object] | None = None) -> tuple[Fault, ...]:
    with pytest.raises(PolicyError) as caught:
        load_policy(path, overrides)
    return caught.value.faults


def fault(path: Path) -> Fault:
    (only,) = faults(path)
    return only


def test_a_file_is_read_and_named(tmp_path: Path) -> None:
    path = written(tmp_path, '[plugin]\nindex = "20"\n')
    policy = load_policy(path)
    assert policy.plugin.index == "20"
    assert policy.source == str(path)


def test_the_default_file_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_PATH", tmp_path / "policy.toml")
    policy = load_policy(None, {"plugin.index": "30"})
    assert (policy.plugin.index, policy.source) == ("30", BUILT_IN)
    assert load_last_good(tmp_path) is None
    written(tmp_path, "x = 1")
    assert faults(None)[0].key == "x"


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "missing.toml").message


def test_options_go_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, '[plugin]\nsocket = "/a"\nindex = "20"\n')
    policy = load_policy(path, {"plugin.socket": "/b", "plugin.index": None})
    assert (policy.plugin.socket, policy.plugin.index) == ("/b", "20")


def test_faults_of_the_file_and_of_options_come_together(tmp_path: Path) -> None:
    path = written(tmp_path, "# comment\n\n[plugin]\nindex = 5\n")
    assert [str(each) for each in faults(path, {"plugin.socket": "b", "plugin.index": "20"})] == [
        f"{path}:4: plugin.index: must be a string, not an integer",
        'command line: --socket: must be an absolute path to a socket without blanks, "." or "..", not "b"',
    ]


SYNTAX = {
    "no value": ("a = 1\nb =\n", 2, "not TOML: invalid value"),
    "at the end of the file": ('a = 1\nb = "', 2, "not TOML: unterminated string"),
    "key twice": ("a = 1\na = 2\n", 2, "not TOML: cannot overwrite a value"),
    "section twice": ("[a]\n[a]\n", 2, "not TOML: cannot declare"),
    "byte order mark": ("\ufeffa = 1\n", 1, "not TOML: invalid statement"),
    "a number of thousands of digits": ("a = " + "1" * 5000, None, "not TOML: exceeds the limit"),
    "deep nesting": ("a = " + "[" * 50_000, None, "nested too deeply"),
    "NUL": ("a = \x00", 1, "not TOML: "),
}


@pytest.mark.parametrize(("text", "line", "sentence"), SYNTAX.values(), ids=SYNTAX.keys())
def test_syntax_errors_are_faults_with_their_line(tmp_path: Path, text: str, line: int | None, sentence: str) -> None:
    found = fault(written(tmp_path, text))
    assert sentence in found.message
    assert found.line == line
    assert str(found).isprintable()


def test_not_utf8(tmp_path: Path) -> None:
    assert fault(written(tmp_path, b"a = '\xff'")).message == "is not UTF-8: byte 6 is 0xff"


def test_too_long(tmp_path: Path) -> None:
    assert "longer than" in fault(written(tmp_path, b"#" * (POLICY_MAX + 1))).message
    assert load_policy(written(tmp_path, b"#" * POLICY_MAX)) == Policy.default()


THOUSANDS = 4000


def test_thousands_of_rules(tmp_path: Path) -> None:
    rules = (f'[[rule]]\nnamespace = "ns-{n}-*"\npod = "*-{n}"\nallow = false\n' for n in range(THOUSANDS))
    policy = load_policy(written(tmp_path, "".join(rules)))
    for number in (0, THOUSANDS - 1):
        verdict = select(policy, make.container(of=make.pod(f"p-{number}", namespace=f"ns-{number}-x")))
        assert isinstance(verdict, Denied)
        assert f"rule[{number}]" in str(verdict)


def test_thousands_of_rules_that_are_all_wrong_each_have_their_line(tmp_path: Path) -> None:
    found = faults(written(tmp_path, "[[rule]]\nallow = 'perhaps'\n" * THOUSANDS))
    assert [each.line for each in found] == [2 * (n + 1) for n in range(THOUSANDS)]


def test_a_folder_is_no_policy(tmp_path: Path) -> None:
    assert "not a regular file" in fault(tmp_path).message


def test_a_fifo_does_not_hold_us(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in fault(tmp_path / "fifo").message


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    assert "cannot be read: Too many levels" in fault(tmp_path / "a").message


def test_a_file_we_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    path = written(tmp_path, "")
    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, who may read everything
    assert fault(path).message == f"user {os.geteuid()} may not read it"


def test_the_last_good_policy_comes_back(tmp_path: Path) -> None:
    source = read_policy(written(tmp_path, '[plugin]\nname = "caf"\n# \u20ac \r\n'))
    assert source is not None
    keep_last_good(tmp_path, source.text)
    assert (tmp_path / LAST_GOOD).read_bytes() == source.text.encode()
    kept = load_last_good(tmp_path, {"plugin.index": "11"})
    assert kept is not None
    assert (kept.plugin.name, kept.plugin.index) == ("caf", "11")
    assert kept.source == str(tmp_path / LAST_GOOD)


def test_keeping_is_private_replaces_the_older_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / f".{LAST_GOOD}.new").write_text("left by a crash")
    keep_last_good(tmp_path, "# one")
    keep_last_good(tmp_path, "# two")
    path = tmp_path / LAST_GOOD
    assert path.read_text() == "# two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_kept_policy_that_no_longer_passes_says_so(tmp_path: Path) -> None:
    keep_last_good(tmp_path, "schema = 0")
    with pytest.raises(PolicyError, match=LAST_GOOD):
        load_last_good(tmp_path)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o644, False), (0o664, True), (0o646, True)])
def test_a_file_others_may_write_is_warned_of(tmp_path: Path, mode: int, warned: bool) -> None:
    path = written(tmp_path, "")
    path.chmod(mode)
    assert bool(file_advice(path)) is warned


LONG_S = 60.0
NEVER = Path("/nonexistent/nri.sock")


class Counted:
    """A running watch, and how often it called."""

    def __init__(self, file: Path, look_s: float) -> None:
        self.calls = 0
        self._task = asyncio.create_task(PolicyWatch(file, self._called, look_s=look_s, settle_s=0.001).run())

    def _called(self) -> None:
        self.calls += 1

    async def saw(self, calls: int) -> None:
        await until(f"{calls} calls", lambda: self.calls == calls)

    async def __aenter__(self) -> Counted:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def watched() -> None:
    """Until somebody of this process watches a folder."""

    def watching() -> bool:
        links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - not a folder
        return any("inotify" in str(link.readlink()) for link in links if link.is_symlink())

    await until("a watch", watching)


def test_a_config_map_that_is_swapped_wakes_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        mounted = ConfigMapFolder(tmp_path / "etc", {"policy.toml": "a"})
        async with Counted(mounted.folder / "policy.toml", LONG_S) as seen:
            for calls in (1, 2):
                await watched()
                mounted.swap({"policy.toml": "another" * calls})
                await seen.saw(calls)

    asyncio.run(scenario())


def test_a_file_written_in_place_is_seen_by_looking(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "policy.toml"
        file.write_text("a")
        async with Counted(file, 0.01) as seen:
            file.write_text("longer")
            await seen.saw(1)
            file.unlink()
            await seen.saw(2)
            file.write_text("back")
            await seen.saw(3)

    asyncio.run(scenario())


def test_the_same_file_is_not_told_of(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "policy.toml"
        file.write_text("a")
        async with Counted(file, 0.001) as seen:
            for _ in range(20):
                await asyncio.sleep(0.001)
                (tmp_path / "neighbour").touch()
            assert seen.calls == 0
            file.write_text("longer")
            await seen.saw(1)

    asyncio.run(scenario())


class Watching(NriGpu):
    """The daemon as the chart starts it."""

    def program(self) -> list[str]:
        return [*super().program(), "--watch-policy"]


def test_the_daemon_takes_a_swapped_policy_up_and_keeps_the_old_over_a_broken_one(tmp_path: Path) -> None:
    mounted = ConfigMapFolder(tmp_path / "etc", {"policy.toml": ""})
    launch = Launch(tmp_path / "d", NEVER, policy=mounted.folder / "policy.toml")
    with Watching(launch) as daemon:
        daemon.wait_logged("inventory changed")
        mounted.swap({"policy.toml": '[namespaces]\nallow = ["research"]\n'})
        daemon.wait_logged("policy reloaded")
        mounted.swap({"policy.toml": "[namespaces]\nallow = 3\n"})
        assert "must be an array" in daemon.wait_logged("policy not reloaded, the old one stays")
        assert (launch.state / "policy.last").read_text() == '[namespaces]\nallow = ["research"]\n'


# --- which policy is in force -----------------------------------------------------------------------------------------


class InForce:
    """A daemon's policy, of a file in this folder; the state folder is its own."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        self.state_dir.mkdir(exist_ok=True)
        self.file = PolicyFile(str(folder / "policy.toml"), {"plugin.socket": "/option.sock"}, self.state_dir)
        self.state = NodeState(Inventory(taken_at=0), policy=first_policy(self.file), fallback=self.file.salvage)
        self.changed: list[Policy] = []
        self.reload = PolicyReload(self.file, self.state, self.changed.append)

    def now(self) -> tuple[str, str]:
        """The index, and the option that goes over every policy."""
        return self.state.settings.plugin.index, self.state.settings.plugin.socket


def test_a_start_takes_the_file_then_the_last_good_one_then_refuses(tmp_path: Path, log: Log) -> None:
    written(tmp_path, BAD)
    first = InForce(tmp_path)
    assert "must be a string" in first.state.policy.fault
    assert first.now() == ("10", "/option.sock")
    assert log.one("no good policy is kept: every container that asks will be refused")
    written(tmp_path, '[plugin]\nindex = "20"\n')
    assert InForce(tmp_path).now() == ("20", "/option.sock")
    written(tmp_path, BAD)
    again = InForce(tmp_path)
    assert (again.now(), again.state.policy.fault) == (("20", "/option.sock"), "")
    assert log.one("started on the last good policy")
    (again.state_dir / LAST_GOOD).write_text(BAD)
    assert InForce(tmp_path).state.policy.fault
    assert log.one("last good policy not usable either")


async def test_a_reload_keeps_the_old_policy_over_a_broken_one(tmp_path: Path, log: Log) -> None:
    written(tmp_path, "")
    daemon = InForce(tmp_path)
    written(tmp_path, '[plugin]\nindex = "20"\n')
    await daemon.reload.read_again()
    assert (daemon.now()[0], daemon.reload.registered.index, len(daemon.changed)) == ("20", "20", 1)
    written(tmp_path, BAD)
    await daemon.reload.read_again()
    assert (daemon.now()[0], len(daemon.changed)) == ("20", 1)
    assert log.one("policy not reloaded, the old one stays")


async def test_the_runtimes_text_replaces_the_file_good_or_not(tmp_path: Path, log: Log) -> None:
    written(tmp_path, "")
    daemon = InForce(tmp_path)
    daemon.state_dir.joinpath(LAST_GOOD).unlink()
    daemon.state_dir.rmdir()
    daemon.reload.take_text('[plugin]\nindex = "30"\n')
    assert (daemon.now()[0], daemon.reload.registered.index, len(daemon.changed)) == ("30", "10", 1)
    assert log.one("policy not kept for the next start")
    daemon.reload.take_text(BAD)
    assert (daemon.now()[0], len(daemon.changed)) == ("10", 1)
    assert daemon.state.policy.fault
    await daemon.reload.read_again()  # the file is not asked any more
    assert daemon.state.policy.fault
