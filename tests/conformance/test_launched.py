"""Launched by containerd itself: no arguments, no environment, no stderr; one connection, and its end is ours.

The wrapper of these tests is what an operator would write to give options, plus two things that need not be there: a
/run of its own, in which the journal's socket is the test's and no state of the machine's own nri-gpu lies; and the
exit code, written down because nobody else could see it.
"""

import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, Launch
from tests.support.driver_root import make_driver_root
from tests.support.marks import on_newest, on_oldest
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

VOID_POLICY = 'schema = 1\n[defaults]\nmode = "shared"\n[environment]\nvisible_devices = "void"\n'
DEADLINE_S = 20.0


class Journal:
    """A journal of a test's own: the socket that systemd's would listen on, and what was sent to it.

    Entries as systemd.journal-fields(7) has them: one datagram of NAME=value lines each.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.entries: list[dict[str, str]] = []

    def close(self) -> None:
        self._socket.close()

    def find(self, text: str) -> list[dict[str, str]]:
        """Entries whose message holds a text."""
        while True:
            try:
                datagram = self._socket.recv(1 << 16).decode()
            except BlockingIOError:
                return [entry for entry in self.entries if text in entry["MESSAGE"]]
            self.entries.append(dict(line.split("=", 1) for line in datagram.splitlines()))

    def wait(self, text: str, count: int = 1) -> dict[str, str]:
        """The newest entry with a text, once there are that many."""
        wait_for(f"the journal to hold {text!r}", lambda: len(self.find(text)) >= count, DEADLINE_S, self._explain)
        return self.find(text)[-1]

    def _explain(self) -> str:
        return "\n".join(entry["MESSAGE"] for entry in self.entries)


class Plugin:
    """A containerd with nri-gpu in its plugin folder. Booted by entering `node`."""

    def __init__(self, node: Containerd, folder: Path) -> None:
        self.node = node
        self.launch = Launch(folder, node.nri_socket, driver_root=make_driver_root(folder / "driver"))
        self.code = folder / "code"
        self.journal = Journal(folder / "journal")
        self._folder = folder

    def install(self, command: str, policy: str = "", config_name: str = "10-nri-gpu.conf") -> None:
        inner = self._folder / "inner.sh"
        inner.write_text(
            "set -e\n"
            "mount -t tmpfs none /run\n"
            "mkdir -p /run/systemd/journal\n"
            ": > /run/systemd/journal/socket\n"
            f"mount --bind {self._folder}/journal /run/systemd/journal/socket\n"
            "set +e\n"
            f"{command}\n"
            f"echo $? > {self.code}\n"
        )
        wrapper = self.node.plugin_path / "10-nri-gpu"
        wrapper.write_text(f"#!/bin/sh\nexec /usr/bin/unshare --mount --propagation private /bin/sh {inner}\n")
        wrapper.chmod(0o755)
        if policy:
            (self.node.plugin_config_path / config_name).write_text(policy)

    def boot(self, policy: str = "", config_name: str = "10-nri-gpu.conf") -> None:
        """As an operator does it who simulates a node; --socket means nothing here, and harms nobody."""
        command = (sys.executable, "-m", "nri_gpu", "run", *self.launch.arguments())
        self.install(shlex.join(command), policy=policy, config_name=config_name)
        self.node.boot()
        self.journal.wait("driver files staged")

    @property
    def pid(self) -> int:
        return int((self.launch.state / "lock").read_text())

    def refused(self, claim: str) -> str:
        return self.node.cri.refused(claim, "late").details

    def wait_ended(self, pid: int) -> int:
        """The exit code, once the process is gone: no zombie either."""
        wait_for("the plugin to end", lambda: not Path(f"/proc/{pid}").exists(), DEADLINE_S)
        wait_for("its exit code", lambda: self.code.exists() and bool(self.code.read_text()), DEADLINE_S)
        return int(self.code.read_text())


@pytest.fixture
def plugin(runtime: packages.Runtime, tmp_path: Path) -> Iterator[Plugin]:
    folder = tmp_path / "d"
    folder.mkdir()
    node = Containerd(runtime)
    made = Plugin(node, folder)
    try:
        yield made
        node.stop()
    finally:
        node.abandon()
        made.journal.close()


@on_newest
@pytest.mark.parametrize("config_name", ["10-nri-gpu.conf", "nri-gpu.conf"])
@pytest.mark.short
def test_it_synchronizes_and_grants_by_its_drop_in_policy(plugin: Plugin, config_name: str) -> None:
    plugin.boot(VOID_POLICY, config_name)
    granted = plugin.node.cri.run_asking("device=2", "one")
    plugin.node.cri.run_asking("device=2", "two")  # shared, as only the drop-in says

    env = plugin.node.cri.status(granted).env
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["NRI_GPU_UUIDS"]) == ("void", UUIDS[2])
    assert plugin.node.cri.execute(granted, "/bin/sh", "-c", "nvidia-smi").code == 0
    assert f"runtime_version={plugin.node.runtime.release}" in plugin.journal.wait("registered")["MESSAGE"]
    entry = plugin.journal.wait("GPU granted", 2)
    assert (entry["SYSLOG_IDENTIFIER"], entry["PRIORITY"]) == ("nri-gpu", "6")
    assert f"gpu_uuid={UUIDS[2]}" in entry["MESSAGE"]
    assert "[no-such-gpu]" in plugin.refused("device=9")


@on_newest
def test_what_it_is_started_with(plugin: Plugin) -> None:
    plugin.boot()
    plugin.journal.wait("ledger rebuilt")
    shell = parent(plugin.pid)
    given = {pair.split("=")[0] for pair in Path(f"/proc/{shell}/environ").read_text().rstrip("\0").split("\0")}
    assert given - {"PWD"} == {"NRI_PLUGIN_IDX", "NRI_PLUGIN_NAME", "NRI_PLUGIN_SOCKET"}  # PWD is the shell's own
    assert str(Path(f"/proc/{plugin.pid}/fd/2").readlink()) == "/dev/null"


@on_newest
@pytest.mark.parametrize("kill", [False, True], ids=["terminated", "killed"])
def test_it_ends_with_containerd_and_the_next_one_knows_all_grants(plugin: Plugin, kill: bool) -> None:
    plugin.boot()
    survivor, first = plugin.node.cri.run_asking("device=1", "survivor"), plugin.pid

    (plugin.node.kill if kill else plugin.node.terminate)()
    assert plugin.wait_ended(first) == 0
    plugin.journal.wait("and this plugin with it")
    plugin.journal.wait("stopped")

    plugin.node.restart()
    assert "grants=1" in plugin.journal.wait("ledger rebuilt", 2)["MESSAGE"]
    plugin.journal.wait("driver files staged", 2)
    assert plugin.pid != first
    assert plugin.node.cri.status(survivor).state == "RUNNING"
    assert re.search(r"\[gpu-busy\].*default/survivor", plugin.refused("device=1"))


@on_newest
def test_the_bare_command_is_enough(plugin: Plugin) -> None:
    """No arguments at all, as when the installed program itself, or a link to it, lies in the plugin folder."""
    program = shlex.quote(str(Path(sys.executable).with_name("nri-gpu")))
    plugin.install(f"mount -t tmpfs none /var/lib && {program}")  # where driver files are staged by default
    plugin.node.boot()
    plugin.journal.wait("ledger rebuilt")
    plugin.node.cri.run(plugin.node.cri.run_pod())
    assert re.search(r"nri-gpu \[(node-not-ready|no-such-gpu)\]", plugin.refused("device=999"))


@on_oldest
def test_1_7_never_synchronizes_so_it_warns_and_grants_all_the_same(plugin: Plugin) -> None:
    plugin.boot(VOID_POLICY)
    warning = plugin.journal.wait("launched by a runtime that will not synchronize")
    assert warning["PRIORITY"] == "4"
    assert "run it as a service" in warning["MESSAGE"]

    granted = plugin.node.cri.run_asking("device=3; mode=exclusive", "one")
    assert plugin.node.cri.status(granted).env["NRI_GPU_UUIDS"] == UUIDS[3]
    assert "[gpu-busy]" in plugin.refused("device=3")
    plugin.node.cri.stop(granted)
    plugin.node.cri.run_asking("device=3", "three")
    assert plugin.journal.find("ledger rebuilt") == []

    pid = plugin.pid
    plugin.node.terminate()
    assert plugin.wait_ended(pid) == 0


def parent(pid: int) -> int:
    """The process that started it: the wrapper's shell."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])
