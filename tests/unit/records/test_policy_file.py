"""The policy on disk: read with every fault, kept for the next start, and read again when it changes."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.kubelet_settings import MigStrategy
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.records import policy_file
from nri_gpu.records.policy_file import (
    LAST_GOOD,
    POLICY_MAX,
    PolicyFile,
    PolicyText,
    build_policy,
    file_advice,
    first_policy,
    keep_last_good,
    load_last_good,
    load_policy,
    read_policy,
)
from nri_gpu.records.policy_reload import PolicyReload, PolicyWatch
from nri_gpu.system.state import NodeState
from tests.support.configmap import ConfigMapFolder
from tests.support.log import Log
from tests.support.running import running
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


def test_the_default_file_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_file, "DEFAULT_PATH", tmp_path / "policy.toml")
    policy = load_policy(None, {"plugin.index": "30"})
    assert (policy.plugin.index, policy.source) == ("30", BUILT_IN)
    written(tmp_path, "x = 1")
    assert faults(None)[0].key == "x"


def test_options_go_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, '[plugin]\nsocket = "/a"\nindex = "20"\n')
    policy = load_policy(path, {"plugin.socket": "/b", "plugin.index": None})
    assert (policy.plugin.socket, policy.plugin.index, policy.source) == ("/b", "20", str(path))


def test_faults_of_the_file_and_of_options_come_together(tmp_path: Path) -> None:
    path = written(tmp_path, "# comment\n\n[plugin]\nindex = 5\n")
    assert [str(each) for each in faults(path, {"plugin.socket": "b", "plugin.index": "20"})] == [
        f"{path}:4: plugin.index: must be a string, not an integer",
        'command line: --socket: must be an absolute path to a socket without blanks, "." or "..", not "b"',
    ]


WAYS: dict[str, str | bool] = {"kubelet.enabled": True, "dra.enabled": True}
ONE_WAY = "[dra]\nenabled = true\n"
POOLS = """
[kubelet]
pool = "a"
[dra]
pool = "b"
[[pool]]
name = "a"
device = ["0"]
[[pool]]
name = "b"
device = ["1"]
"""


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_options_that_contradict_each_other_are_a_fault_without_a_file_too(text: str | None) -> None:
    with pytest.raises(PolicyError) as caught:
        build_policy(None if text is None else PolicyText("f", text), WAYS)
    (fault,) = caught.value.faults
    assert (fault.file, fault.key, fault.line) == ("command line", "--dra, --kubelet", None)


def test_a_table_without_a_key_is_told_of_beside_options(tmp_path: Path) -> None:
    policy = load_policy(written(tmp_path, f"{POOLS}\n[stray]\n"), WAYS)
    assert [fault.key for fault in policy.empty_tables] == ["stray"]


SYNTAX: dict[str, tuple[str | bytes, int | None, str]] = {
    "no value": ("a = 1\nb =\n", 2, "not TOML: invalid value"),
    "at the end of the file": ('a = 1\nb = "', 2, "not TOML: unterminated string"),
    "key twice": ("a = 1\na = 2\n", 2, "not TOML: cannot overwrite a value"),
    "section twice": ("[a]\n[a]\n", 2, "not TOML: cannot declare"),
    "byte order mark": ("\ufeffa = 1\n", 1, "begins with a byte order mark"),
    "a number of thousands of digits": ("a = " + "1" * 5000, None, "not TOML: exceeds the limit"),
    "deep nesting": ("a = " + "[" * 50_000, None, "nested too deeply"),
    "NUL": ("a = \x00", 1, "not TOML: "),
    "not UTF-8": (b"a = '\xff'", None, "is not UTF-8: byte 6 is 0xff"),
    "too long": (b"#" * (POLICY_MAX + 1), None, "longer than"),
}


@pytest.mark.parametrize(("text", "line", "sentence"), SYNTAX.values(), ids=SYNTAX.keys())
def test_bytes_that_are_no_policy(tmp_path: Path, text: str | bytes, line: int | None, sentence: str) -> None:
    (found,) = faults(written(tmp_path, text))
    assert sentence in found.message
    assert found.line == line
    assert str(found).isprintable()


def test_the_longest_policy(tmp_path: Path) -> None:
    assert load_policy(written(tmp_path, b"#" * POLICY_MAX)) == Policy.default()


NO_FILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda _: None, "no such file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "a FIFO, which does not hold us": (os.mkfifo, "not a regular file"),
    "a loop of links": (lambda path: path.symlink_to(path), "cannot be read: Too many levels"),
    "a broken link": (lambda path: path.symlink_to("/gone/p.toml"), "is a link to /gone/p.toml, which is missing"),
}


@pytest.mark.parametrize(("make", "sentence"), NO_FILE.values(), ids=NO_FILE)
def test_what_is_no_file(tmp_path: Path, make: Callable[[Path], object], sentence: str) -> None:
    make(tmp_path / "policy")
    (found,) = faults(tmp_path / "policy")
    assert sentence in found.message


def test_a_file_we_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    path = written(tmp_path, "")
    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, who may read everything
    assert faults(path)[0].message == f"user {os.geteuid()} may not read it"


def test_thousands_of_rules_that_are_all_wrong_each_have_their_line(tmp_path: Path) -> None:
    found = faults(written(tmp_path, "[[rule]]\nallow = 'perhaps'\n" * 4000))
    assert [each.line for each in found] == [2 * (n + 1) for n in range(4000)]


def test_the_last_good_policy_comes_back(tmp_path: Path) -> None:
    """Private, in the place of the one before, and with nothing left behind."""
    source = read_policy(written(tmp_path, '[plugin]\nname = "caf"\n# \u20ac \r\n'))
    assert source is not None
    state = tmp_path / "state"
    state.mkdir()
    (state / f".{LAST_GOOD}.new").write_text("left by a crash")
    keep_last_good(state, "# one")
    keep_last_good(state, source.text)
    (path,) = state.iterdir()
    assert path.read_bytes() == source.text.encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = load_last_good(state, {"plugin.index": "11"})
    assert kept is not None
    assert (kept.plugin.name, kept.plugin.index, kept.source) == ("caf", "11", str(path))


def test_a_kept_policy_that_no_longer_passes_says_so(tmp_path: Path) -> None:
    keep_last_good(tmp_path, "schema = 0")
    with pytest.raises(PolicyError, match=LAST_GOOD):
        load_last_good(tmp_path)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o644, False), (0o664, True), (0o646, True)])
def test_a_file_others_may_write_is_warned_of(tmp_path: Path, mode: int, warned: bool) -> None:
    path = written(tmp_path, "")
    path.chmod(mode)
    assert bool([*file_advice(path)]) is warned


class Watch(PolicyWatch):
    """It remembers how often it called."""

    def __init__(self, file: Path, look_s: float) -> None:
        super().__init__(file, self._called, look_s=look_s, settle_s=0.001)
        self.calls = 0

    def _called(self) -> None:
        self.calls += 1

    async def saw(self, calls: int) -> None:
        await until(f"{calls} calls", lambda: self.calls == calls)


def watches() -> int:
    """How many watches of folders this process has; an earlier test's may be among them."""
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - not a folder
    return sum("inotify" in str(link.readlink()) for link in links if link.is_symlink())


async def test_a_config_map_that_is_swapped_wakes_at_once(tmp_path: Path) -> None:
    mounted = ConfigMapFolder(tmp_path / "etc", {"policy.toml": "a"})
    seen, before = Watch(mounted.folder / "policy.toml", look_s=60.0), watches()
    async with running(seen.run()):
        for calls in (1, 2):
            await until("a watch", lambda: watches() > before)
            mounted.swap({"policy.toml": "another" * calls})
            await seen.saw(calls)


async def test_a_file_written_in_place_is_seen_by_looking(tmp_path: Path) -> None:
    """And one that stays the same is not told of."""
    file = written(tmp_path, "a")
    seen = Watch(file, look_s=0.001)
    async with running(seen.run()):
        for _ in range(20):
            await asyncio.sleep(0.001)
            (tmp_path / "neighbour").touch()
        assert seen.calls == 0
        file.write_text("longer")
        await seen.saw(1)
        file.unlink()
        await seen.saw(2)
        file.write_text("back")
        await seen.saw(3)


# --- which policy is in force -----------------------------------------------------------------------------------------


class InForce:
    """A daemon's policy, of a file in this folder; the state folder is its own."""

    def __init__(self, folder: Path, **options: bool) -> None:
        self.state_dir = folder / "state"
        self.state_dir.mkdir(exist_ok=True)
        over: dict[str, str | bool] = {
            "plugin.socket": "/option.sock",
            **{f"{section}.enabled": on for section, on in options.items()},
        }
        self.file = PolicyFile(str(folder / "policy.toml"), over, self.state_dir)
        self.state = NodeState(Inventory(taken_at=0), policy=first_policy(self.file), fallback=self.file.salvage)
        self.changed: list[Policy] = []
        self.seconds = 0.0
        self.reload = PolicyReload(self.file, self.state, self.changed.append, clock=lambda: self.seconds)

    def now(self) -> tuple[str, str]:
        """The index, and the option that goes over every policy."""
        return self.state.settings.plugin.index, self.state.settings.plugin.socket


def test_a_start_takes_the_file_then_the_last_good_one_then_refuses(tmp_path: Path, log: Log) -> None:
    written(tmp_path, BAD)
    first = InForce(tmp_path)
    assert "must be a string" in first.state.policy.fault
    assert first.now() == ("10", "/option.sock")
    assert log.one("no good policy is kept: every container that requests GPUs is refused")
    written(tmp_path, '[plugin]\nindex = "20"\n')
    assert InForce(tmp_path).now() == ("20", "/option.sock")
    written(tmp_path, BAD)
    again = InForce(tmp_path)
    assert (again.now(), again.state.policy.fault) == (("20", "/option.sock"), "")
    assert log.one("started on the last good policy")
    (again.state_dir / LAST_GOOD).write_text(BAD)
    assert InForce(tmp_path).state.policy.fault
    assert log.one("last good policy not usable either")


def test_a_policy_that_options_contradict_is_a_bad_policy(tmp_path: Path, log: Log) -> None:
    """Never an end of the daemon: the last good policy, or a refusal. They are put over the last good one as well."""
    written(tmp_path, ONE_WAY)
    refused = InForce(tmp_path, kubelet=True).state.policy
    assert refused.fault.startswith("command line: --kubelet: dra.enabled and kubelet.enabled would both offer")
    assert log.one("policy not usable").fields["fault"] == refused.fault
    written(tmp_path, POOLS)
    both = InForce(tmp_path, kubelet=True, dra=True).state.policy
    assert (both.fault, both.kubelet.enabled, both.dra.enabled) == ("", True, True)
    written(tmp_path, ONE_WAY)
    last = InForce(tmp_path, kubelet=True).state.policy
    assert (last.fault, last.kubelet.pool, last.dra.enabled) == ("", "a", False)
    assert log.one("started on the last good policy")
    (tmp_path / "state" / LAST_GOOD).write_text(ONE_WAY)
    assert InForce(tmp_path, kubelet=True).state.policy.fault
    assert log.one("last good policy not usable either")


async def test_options_hold_over_what_a_reload_reads(tmp_path: Path, log: Log) -> None:
    written(tmp_path, POOLS)
    daemon = InForce(tmp_path, kubelet=True, dra=True)
    written(tmp_path, '[plugin]\nindex = "20"\n')
    await daemon.reload.read_again()
    assert (daemon.now()[0], daemon.state.policy.kubelet.pool, len(daemon.changed)) == ("10", "a", 0)
    fault = log.one("policy not reloaded, the old one stays").fields["fault"]
    assert str(fault).startswith("command line: --dra, --kubelet: ")
    daemon.reload.take_text(ONE_WAY)  # the runtime's
    assert daemon.state.policy.fault.startswith("command line: --kubelet: ")


def test_a_policy_that_options_mend_is_kept_and_compared(tmp_path: Path) -> None:
    """Who reads it without the options, as the guard does, reads it all the same."""
    written(tmp_path, "[kubelet]\nenabled = true\n[dra]\nenabled = true\n[limits]\ngpus_per_pod = 1\n")
    assert InForce(tmp_path, kubelet=False).state.policy.fault == ""
    kept = load_last_good(tmp_path / "state")
    assert kept
    assert kept.limits.gpus_per_pod == 1
    written(tmp_path, ONE_WAY)
    before = InForce(tmp_path, kubelet=False).file.before
    assert before
    assert before.limits.gpus_per_pod == 1


async def test_a_reload_leaves_the_device_plugin_as_it_is_served(tmp_path: Path) -> None:
    """Or old pods' containers would start without their GPUs, while the kubelet still counts by the old settings.

    Whom we inject for changes at once: a container that is newly of these waits for the restart.
    """
    written(tmp_path, '[kubelet]\nenabled = true\nresource = "a.com/gpu"\nmig_strategy = "mixed"\n')
    daemon = InForce(tmp_path)
    served = daemon.state.settings.kubelet
    written(tmp_path, '[plugin]\nindex = "20"\n[kubelet]\nresource = "b.com/gpu"\ninject_for = ["nvidia.com/*"]\n')
    await daemon.reload.read_again()
    now = daemon.state.policy.kubelet
    assert (now.enabled, now.resource, now.mig_strategy) == (True, "a.com/gpu", MigStrategy.MIXED)
    assert replace(now, inject_for=served.inject_for) == served
    assert now.inject_for.patterns == ("nvidia.com/*",)
    assert daemon.now()[0] == "20"
    assert [each.kubelet.resource for each in daemon.changed] == ["b.com/gpu"]  # the file's, to say what waits
    daemon.reload.take_text("[kubelet]\nreplicas = 4\n")  # the runtime's
    assert daemon.state.policy.kubelet == served


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


async def test_a_file_that_stays_faulty_is_an_error_after_minutes(tmp_path: Path, log: Log) -> None:
    still = "policy file still has a fault"
    written(tmp_path, "")
    InForce(tmp_path)
    written(tmp_path, BAD)
    daemon = InForce(tmp_path)  # on the last good one

    def waits() -> None:
        for _ in range(20):
            daemon.reload.remind()
            daemon.seconds += 30

    waits()
    assert (log.one(still).level, log.one(still).fields["lasting_s"]) == ("ERROR", 300)
    assert "must be a string" in log.one(still).fields["fault"]
    assert "reload nri-gpu" in log.one(still).fields["fix"]
    written(tmp_path, "")
    await daemon.reload.read_again()
    waits()
    assert len(log.said(still)) == 1
    written(tmp_path, BAD)
    await daemon.reload.read_again()
    daemon.reload.remind()
    assert len(log.said(still)) == 1
    waits()
    assert [line.level for line in log.said(still)] == ["ERROR", "ERROR"]


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
