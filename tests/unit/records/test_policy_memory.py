"""A policy that was in force and is gone: a fault, and never the defaults, until an operator says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_gpu.domain.node import Inventory
from nri_gpu.plugin.guard_process import guard_settings
from nri_gpu.plugin.guard_state import DaemonState
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import (
    IN_FORCE,
    LAST_GOOD,
    OPTIONS,
    RUNTIME,
    UNKNOWN,
    PolicyFile,
    PolicyMemory,
    first_policy,
    keep_last_good,
    load_last_good,
    unit_folder,
)
from nri_gpu.records.policy_reload import NAMES_SHOWN, PolicyReload
from nri_gpu.system.state import NodeState
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until

ML, PROD = (f'[namespaces]\nallow = ["{name}"]\n' for name in ("ml", "prod"))
BAD = "[plugin]\nindex = 5\n"
KEPT = "policy not reloaded, the old one stays"
LOST = "policy has lost restrictions"
WIDER = "policy lets more namespaces ask for GPUs"
CURE = "run `nri-gpu check --forget` and reload nri-gpu to go back to the defaults"


class Node:
    """A node with the unit's folders; the policy is the default file. unit: whether systemd starts the daemon."""

    def __init__(self, folder: Path) -> None:
        self.file, self.run, self.lib = folder / "policy.toml", folder / "run", folder / "lib"
        self.run.mkdir()
        self.lib.mkdir()
        self.pods = ("here",)

    def start(self, *, unit: bool = True) -> None:
        self.of = PolicyFile(None, {}, self.run, PolicyMemory(self.lib if unit else None))
        self.state = NodeState(Inventory(taken_at=0), policy=first_policy(self.of), fallback=self.of.salvage)
        self.reload_by = PolicyReload(self.of, self.state, lambda _: None, lambda: self.pods)

    def reload(self) -> None:
        asyncio.run(self.reload_by.read_again())

    def reboot(self) -> None:
        """/run is empty then."""
        for each in self.run.iterdir():
            each.unlink()

    def forget(self) -> None:
        for each in (self.run / LAST_GOOD, self.lib / IN_FORCE):
            each.unlink(missing_ok=True)

    def allowed(self) -> tuple[str, ...]:
        return self.state.policy.namespaces.allow.patterns

    @property
    def fault(self) -> str:
        return self.state.policy.fault


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path)
    for module in ("records.policy_file", "plugin.guard_state"):
        monkeypatch.setattr(f"nri_gpu.{module}.DEFAULT_PATH", node.file)
    return node


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone.toml")


def _of_nobody(path: Path) -> None:
    path.unlink()
    path.parent.joinpath("loop").symlink_to("loop")
    path.symlink_to("loop/policy.toml")


GONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "moved away": (Path.unlink, f"is missing, and a policy was in force: put it back, or {CURE}"),
    "zero bytes": (lambda path: path.write_text(""), f"is empty, and a policy was in force: put it back, or {CURE}"),
    "blanks": (lambda path: path.write_text(" \t\r\n \n"), "is empty, and a policy was in force"),
    "NUL bytes": (lambda path: path.write_bytes(bytes(64)), "not TOML"),
    "a byte order mark": (lambda path: path.write_text("\ufeff"), "begins with a byte order mark"),
    "a folder": (_as_folder, "is not a regular file"),
    "a broken link": (_as_broken_link, "is a link to gone.toml, which is missing"),
    "unreadable": (_of_nobody, "cannot be read: Too many levels of symbolic links"),
}


@pytest.mark.parametrize(("make", "words"), GONE.values(), ids=GONE)
def test_a_file_that_is_gone_leaves_the_last_policy_in_force(
    node: Node, log: Log, make: Callable[[Path], object], words: str
) -> None:
    """Over reloads, over restarts, and after a reboot everything is refused."""
    node.file.write_text(ML)
    node.start()
    make(node.file)
    node.reload()
    assert (node.allowed(), words in node.of.fault) == (("ml",), True), node.of.fault
    assert (log.one(KEPT).level, words in str(log.one(KEPT).fields["fault"])) == ("ERROR", True)
    assert (node.run / LAST_GOOD).read_text() == ML
    for _ in range(2):
        node.start()
        assert (node.allowed(), words in node.of.fault) == (("ml",), True)
    node.reboot()
    node.start()
    assert words in node.fault
    node.reload()
    assert words in node.fault


def test_the_operator_goes_back_to_the_defaults(node: Node, log: Log) -> None:
    node.file.write_text(ML)
    node.start()
    node.file.unlink()
    node.reload()
    node.forget()
    node.reload()
    assert (node.allowed(), node.fault, node.of.fault) == (("*",), "", "")
    assert log.one(WIDER).fields["namespaces"] == "here, every namespace"
    node.reboot()
    node.start()
    assert (node.allowed(), node.fault) == (("*",), "")


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_no_file_means_the_defaults_before_a_policy_was_in_force(node: Node, log: Log, text: str | None) -> None:
    """The first installation, and an empty `policy.last` of the version before."""
    if text is not None:
        node.file.write_text(text)
        (node.run / LAST_GOOD).write_text(text)
    for _ in range(2):
        node.start()
        node.reload()
        assert (node.allowed(), node.fault, node.of.fault) == (("*",), "", "")
    assert (list(node.lib.iterdir()), log.warnings()) == ([], [])
    node.file.write_text(BAD)
    node.start()
    assert "must be a string" in node.fault  # there is no good policy that could be in force


def test_comments_alone_are_a_policy(node: Node) -> None:
    node.file.write_text("# every default\n")
    node.start()
    assert (node.lib / IN_FORCE).read_text() == f"{node.file}\n"
    node.file.unlink()
    node.reload()
    assert "is missing" in node.of.fault


def test_a_daemon_by_hand_remembers_nothing(node: Node) -> None:
    node.file.write_text(ML)
    node.start(unit=False)
    node.file.unlink()
    node.reload()
    assert (node.allowed(), node.of.fault, (node.run / LAST_GOOD).read_text()) == (("*",), "", "")
    node.start(unit=False)
    assert (node.allowed(), node.of.fault) == (("*",), "")


def test_what_the_version_before_kept_was_in_force(node: Node) -> None:
    """It remembered nothing, and its file vanished before it was upgraded."""
    keep_last_good(node.run, ML)
    node.start()
    assert (node.allowed(), "is missing" in node.of.fault) == (("ml",), True)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to(path)])
def test_a_memory_that_cannot_be_read_is_one(node: Node, make: Callable[[Path], object]) -> None:
    make(node.lib / IN_FORCE)
    assert PolicyMemory(node.lib).source == UNKNOWN
    node.start()
    assert "is missing" in node.fault


def test_a_memory_that_cannot_be_written_stops_no_policy(node: Node, log: Log) -> None:
    node.lib.rmdir()
    node.file.write_text(ML)
    node.start()
    assert (node.allowed(), (node.run / LAST_GOOD).read_text()) == (("ml",), ML)
    assert IN_FORCE in str(log.one("policy not kept for the next start").fields["fault"])


def test_the_folder_is_the_first_that_systemd_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert unit_folder() is None
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/nri-gpu:/var/lib/nri-gpu/drivers")
    assert unit_folder() == Path("/var/lib/nri-gpu")


# --- what the runtime sends


def test_a_text_that_the_runtime_sends_no_more_stays_in_force(node: Node, log: Log) -> None:
    node.file.write_text('[plugin]\nindex = "20"\n')  # as a package ships one: everybody may
    node.start()
    node.reload_by.configured(ML)
    node.reload_by.configured("")
    words = f"{RUNTIME}: is not sent any more, and a policy was in force: put it back, or {CURE}"
    assert (node.allowed(), node.of.fault) == (("ml",), words)
    assert log.one(KEPT).fields["fault"] == words
    node.reload()
    assert (node.allowed(), node.of.fault) == (("ml",), words)

    node.start()
    assert (node.allowed(), node.reload_by.registered.index) == (("ml",), "20")
    node.reload_by.configured(" \n")
    assert (node.allowed(), node.of.fault) == (("ml",), words)

    node.reboot()
    node.start()
    assert "has not come yet" in node.fault
    node.reload_by.configured("")
    assert node.fault == words

    node.reload_by.configured(PROD)
    assert (node.allowed(), node.fault, node.of.fault) == (("prod",), "", "")
    node.reload_by.configured("")
    node.forget()
    node.reload()
    assert (node.allowed(), node.of.fault) == (("*",), "")
    assert (node.lib / IN_FORCE).read_text() == f"{node.file}\n"


def test_a_runtime_that_never_sent_a_text_changes_nothing(node: Node, log: Log) -> None:
    node.file.write_text(ML)
    node.start()
    node.reload_by.configured("")
    assert (node.allowed(), node.of.fault, log.warnings()) == (("ml",), "", [])


# --- a table without a key


def test_a_table_without_a_key_is_a_fault_of_a_reload_and_a_warning_at_a_start(node: Node, log: Log) -> None:
    """Daemons before this one took such files, and an upgrade refuses nobody."""
    said = "policy has a table without a key"
    odd = f"{ML}[stray]\n"
    node.file.write_text(odd)
    keep_last_good(node.run, odd)
    node.start()
    assert (node.allowed(), node.fault, node.of.fault) == (("ml",), "", "")
    assert "policy.toml:3: stray: has no key" in str(log.one(said).fields["fault"])
    node.file.write_text(f"{PROD}[stray]\n")
    node.reload()
    assert (node.allowed(), "stray: has no key" in node.of.fault) == (("ml",), True)
    node.file.write_text(PROD)
    node.reload()
    assert (node.allowed(), node.of.fault) == (("prod",), "")


# --- who may ask that might not


async def test_a_wider_policy_says_whom_it_lets_ask(node: Node, log: Log) -> None:
    """After a reload, and after a start with another file than before."""
    node.file.write_text(ML)
    node.start()
    node.file.write_text(PROD)
    await node.reload_by.read_again()
    assert (log.one(WIDER).level, log.one(WIDER).fields["namespaces"]) == ("WARNING", "prod")

    names = ", ".join(f'"team-{n:02}"' for n in range(NAMES_SHOWN))
    node.file.write_text(f'[namespaces]\nallow = [{names}, "*"]\n')
    node.start()
    async with running(node.reload_by.run()):
        await until("a warning", lambda: len(log.said(WIDER)) == 2)
    assert str(log.said(WIDER)[1].fields["namespaces"]).endswith("team-19, every namespace and 2 more")
    node.start()
    await node.reload_by.read_again()
    node.reload_by.configured(ML)
    assert len(log.said(WIDER)) == 2


async def test_a_file_that_takes_long_to_read_takes_no_place_of_what_the_runtime_sent_meanwhile(node: Node) -> None:
    node.start()
    rules = "".join(f'[[rule]]\nnamespace = "team-{number}"\nallow = false\n' for number in range(2000))
    node.file.write_text(f"{PROD}{rules}")
    reading = asyncio.create_task(node.reload_by.read_again())
    await asyncio.sleep(0.02)
    assert not reading.done()
    node.reload_by.configured(ML)
    await reading
    assert node.allowed() == ("ml",)
    kept = load_last_good(node.run)
    assert kept
    assert kept.namespaces.allow.patterns == ("ml",)
    assert node.of.from_runtime


async def test_a_warning_names_what_a_file_that_was_cut_off_has_lost(node: Node, log: Log) -> None:
    whole = f'{ML}[limits]\ngpus_per_pod = 1\n[stray]\nenabled = true\n[[pool]]\nname = "big"\ndevice = ["0"]\n'
    node.file.write_text(whole)
    node.start()
    await node.reload_by.read_again()
    assert log.said(LOST) == []
    for cut, lost in (("[[pool]]", "pool big"), ("[stray]", "stray.enabled"), ("[limits]", "limits.gpus_per_pod")):
        node.file.write_text(whole[: whole.index(cut)])
        await node.reload_by.read_again()
        assert (log.said(LOST)[-1].level, log.said(LOST)[-1].fields["settings"]) == ("WARNING", lost)
    assert log.said(WIDER) == []


# --- the guard


def test_the_guard_goes_by_the_last_policy_too(node: Node, log: Log) -> None:
    ignore = f'{ML}otherwise = "ignore"\n[guard]\nindex = "97"\n'
    node.file.write_text(ignore)
    node.start()
    node.file.unlink()
    node.reload()
    settings = guard_settings(node.run, None, {})
    assert settings
    assert (settings.guard.index, settings.namespaces.allow.patterns) == ("97", ("ml",))
    assert CURE in str(log.one("policy not usable").fields["fault"])
    assert DaemonState(node.run, None).policy().namespaces.allow.patterns == ("ml",)


def test_the_guard_takes_a_policy_that_the_daemons_options_mend(node: Node, log: Log) -> None:
    mended = f'{ML}[kubelet]\nenabled = true\n[dra]\nenabled = true\n[guard]\nindex = "97"\n'
    node.file.write_text(mended)
    for kept in ("", mended):
        (node.run / LAST_GOOD).write_text(kept)
        settings = guard_settings(node.run, node.file, {})
        assert settings
        assert settings.guard.index == "97"
        assert DaemonState(node.run, node.file).policy().namespaces.allow.patterns == ("ml",)
    assert log.warnings() == []


def test_the_guard_goes_by_the_daemons_options_too(node: Node, log: Log) -> None:
    """The chart switches the device plugin on by `--kubelet`, and not in the policy."""
    node.file.write_text(ML)
    for kept in ({"kubelet.enabled": True}, {}):
        file = PolicyFile(None, kept, node.run)
        policy = first_policy(file)
        file.keep_options()
        guarded = DaemonState(node.run, None).policy()
        assert guarded.kubelet.enabled is policy.kubelet.enabled is bool(kept)
        assert guarded.namespaces == policy.namespaces
    node.file.write_text("")
    (node.run / LAST_GOOD).write_text("")
    (node.run / OPTIONS).write_text('{"kubelet.enabled": true}')
    assert DaemonState(node.run, node.file).policy().kubelet.enabled
    (node.run / OPTIONS).write_text("{")
    assert "restart nri-gpu" in DaemonState(node.run, None).policy().fault
    assert log.one("policy not usable: every container that requests GPUs needs a valid grant")


@pytest.mark.parametrize("path", ["kubelet.later", "later.enabled", "later", "rule.allow"])
def test_an_option_of_another_version_is_a_fault_to_the_guard(node: Node, log: Log, path: str) -> None:
    """A newer daemon has taken over, and the older guard goes on: a bug here would end it."""
    node.file.write_text(ML)
    (node.run / OPTIONS).write_text(f'{{"{path}": true}}')
    assert f"command line: {path}: is no setting of this nri-gpu" in DaemonState(node.run, node.file).policy().fault
    assert log.one("policy not usable: every container that requests GPUs needs a valid grant")


def test_the_guard_without_any_policy_has_the_defaults(node: Node, log: Log) -> None:
    (node.run / LAST_GOOD).touch()
    assert guard_settings(node.run, None, {}) == Policy.default()
    assert DaemonState(node.run, None).policy() == Policy.default()
    assert log.warnings() == []
