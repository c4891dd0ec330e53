"""The observer's package: a host is looked at without becoming ours, and nothing of it is left."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from nri_gpu.domain.errors import Exit
from tests.packages.conftest import AT, NEWER, OBSERVERS, Debs
from tests.packages.test_systemd import DROP_IN, SERVES_S, Machine, booted
from tests.support.booted_root import BootedRoot
from tests.support.waiting import wait_for

UNIT: Final = "nri-gpu-observe.service"
RUN_FOLDER: Final = "/run/nri-gpu-observe"
# systemd's own notes of units that come and go.
NOTES: Final = ("/run/systemd/", "/run/log/")


def running(root: BootedRoot) -> set[str]:
    return first_words(root.run("systemctl", "list-units", "--plain", "--no-legend", "--state=running"))


def enabled(root: BootedRoot) -> set[str]:
    return first_words(root.run("systemctl", "list-unit-files", "--plain", "--no-legend", "--state=enabled"))


def first_words(lines: str) -> set[str]:
    return {line.split()[0] for line in lines.splitlines()}


def files(root: BootedRoot) -> set[str]:
    return {path for path in root.files() if not path.startswith(NOTES)}


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_a_host_that_is_only_looked_at(debs: Debs, tmp_path: Path, suite: str) -> None:
    seen = {debs.folder: AT}
    with BootedRoot(suite, seen, changed=tmp_path) as root:
        before, ran, were_enabled = files(root), running(root), enabled(root)
        said = root.run("apt", "install", *debs.seen(OBSERVERS))
        assert "NRI" not in said
        assert running(root) == ran | {UNIT}
        assert enabled(root) == were_enabled | {UNIT}
        root.run("systemctl", "stop", UNIT)  # as a shutdown does; here everything ends at once

    with BootedRoot(suite, seen, over=tmp_path) as root:  # a reboot
        assert running(root) == ran | {UNIT}
        assert root.run("systemctl", "show", "--value", "--property=NRestarts", UNIT) == "0\n"
        assert root.run("stat", "-c", "%a", RUN_FOLDER) == "700\n"
        assert not Path(root.path / "etc/nri-gpu").exists()

        said = root.run("apt", "remove", "-y", *OBSERVERS)
        assert "still runs" not in said
        assert running(root) == ran
        assert enabled(root) == were_enabled
        assert sorted(files(root) - before) == []
        assert root.run("systemctl", "is-system-running") == "running\n"


def test_an_upgrade_restarts_the_observer_or_leaves_it_off(debs: Debs, with_observer: Path) -> None:
    newer = debs.seen(OBSERVERS, NEWER)
    with BootedRoot("bookworm", {debs.folder: AT}, over=with_observer) as root:
        root.run("apt", "install", *newer)
        pid = root.run("systemctl", "show", "--value", "--property=MainPID", UNIT).strip()
        assert f"/live/{NEWER}-" in root.run("cat", f"/proc/{pid}/cmdline")
        [_] = root.run("ls", "/usr/lib/nri-gpu/live").split()

        root.run("systemctl", "disable", "--now", UNIT)
        root.run("apt", "install", "--allow-downgrades", "-y", *debs.seen(OBSERVERS))
        assert UNIT not in running(root) | enabled(root)


def test_the_daemon_comes_and_goes_beside_the_observer(debs: Debs, with_observer: Path) -> None:
    with booted(debs, with_observer) as machine:
        root = machine.root
        pid = machine.property(UNIT, "MainPID")
        assert told(machine) == "observing"
        root.run("apt", "install", "-y", *debs.this)
        machine.wait_serving()
        machine.node.cri.run_asking("device=1", "train")
        wait_for("the observer to wait", lambda: told(machine).startswith("waiting: a daemon"), SERVES_S)
        assert root.try_run("nri-gpu", "status").returncode in {Exit.OK, Exit.FINDING}

        root.run("apt", "remove", "-y", "nri-gpu")
        wait_for("it to observe again", lambda: told(machine) == "observing", SERVES_S)
        assert enabled(root) & {"nri-gpu.service", UNIT} == {UNIT}
        assert root.run("cat", "/etc/nri-gpu/policy.toml")
        root.run("umount", "--lazy", "/var/lib/nri-gpu")  # what a runtime outside has mounted is not seen in there
        root.run("apt", "purge", "-y", "nri-gpu")
        assert not (root.path / "etc/nri-gpu").exists()
        assert machine.property(UNIT, "MainPID") == pid
        assert machine.property(UNIT, "NRestarts") == "0"
        assert root.run("nri-gpu", "--version").startswith("nri-gpu ")

        root.run("apt", "purge", "-y", *OBSERVERS)
        assert [path for path in root.files() if "nri-gpu" in path] == [DROP_IN]


def told(machine: Machine) -> str:
    return machine.property(UNIT, "StatusText")
