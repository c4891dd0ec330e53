"""The upgrade from the package that had all in it, and the way back to it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import pytest

from deploy.bundle import COMMON, DAEMON
from deploy.debian.build import VERSION
from tests.packages.conftest import AT, DAEMONS, Debs, install
from tests.packages.test_systemd import FORGOTTEN_S, SERVES_S, UNITS, Machine, booted
from tests.support.booted_root import BootedRoot
from tests.support.cache import once
from tests.support.daemon import UUIDS
from tests.support.debian_root import DebianRoot
from tests.support.waiting import wait_for

WHOLE_AT: Final = "/whole"
GUARD: Final = UNITS[1]
ALL_UNITS: Final = (*UNITS, "nri-gpu-dra.service", "nri-gpu-prepare.service", "nri-gpu-cdi.service", "nri-gpu-cdi.path")


@pytest.fixture(scope="session")
def with_whole(tmp_path_factory: pytest.TempPathFactory, worker_id: str, whole_deb: Path) -> Path:
    """The layer of a Debian 12 with that package."""
    return once(
        tmp_path_factory, worker_id, "with-whole", lambda folder: install(folder, whole_deb, [seen_in(whole_deb)])
    )


def seen_in(folder: Path, at: str = AT) -> str:
    [package] = folder.glob("*.deb")
    return f"{at}/{package.name}"


def choices(root: BootedRoot) -> list[str]:
    return root.try_run("systemctl", "is-enabled", *ALL_UNITS).stdout.split()


def activity(root: BootedRoot) -> list[str]:
    return root.try_run("systemctl", "is-active", *ALL_UNITS).stdout.split()


@pytest.mark.parametrize("choice", ["", "disable", "mask"])
def test_a_node_that_serves_goes_on(debs: Debs, with_whole: Path, choice: str) -> None:
    """choice: what was done to the guard."""
    with booted(debs, with_whole) as machine:
        root, node = machine.root, machine.node
        machine.wait_serving()
        if choice:
            root.run("systemctl", choice, "--now", GUARD)
        train = node.cri.run_asking("device=1", "train")
        before = choices(root), activity(root)
        if choice:
            root.run("apt", "install", *debs.this)
        else:
            machine.create_while("apt", "install", *debs.this)
        wait_for("the daemon to serve", lambda: (choices(root), activity(root)) == before, SERVES_S)

        wait_for("the ledger", lambda: machine.held() == {"train/main": [UUIDS[1]]}, FORGOTTEN_S)
        assert node.cri.execute(train, "/bin/ls", "/dev/nvidia1").code == 0
        for unit in UNITS[:1] if choice else UNITS:
            assert f"/live/{VERSION}." in machine.runs_from(unit)
            assert starts(machine, unit) == 2  # at boot, and now
        [_] = root.run("ls", "/usr/lib/nri-gpu/live").split()
        assert root.run("dpkg", "-V", *DAEMONS) == ""


def starts(machine: Machine, unit: str) -> int:
    return machine.root.run("journalctl", "--unit", unit).count("systemd[1]: Started ")


@pytest.mark.parametrize("choice", ["disable", "mask"])
def test_units_that_are_off_stay_off_and_those_that_are_on_stay_on(
    debs: Debs, whole_deb: Path, tmp_path: Path, choice: str
) -> None:
    lines = (f"systemctl {choice} {' '.join(UNITS)}", "systemctl enable nri-gpu-cdi.path")
    install(tmp_path, whole_deb, [seen_in(whole_deb)], *lines)
    with BootedRoot("bookworm", {debs.folder: AT}, over=tmp_path) as root:
        before = choices(root), activity(root)
        assert before[1] == [*["inactive"] * (len(ALL_UNITS) - 1), "active"]
        root.run("apt", "install", *debs.this)
        assert (choices(root), activity(root)) == before
        assert f"Version: {VERSION}\n" in root.run("dpkg", "-s", DAEMON)


def test_the_way_back(debs: Debs, whole_deb: Path, with_package: Path) -> None:
    with DebianRoot("bookworm", {whole_deb: WHOLE_AT, debs.folder: AT}, over=with_package) as root:
        tree = root.run("readlink", "-e", "/usr/lib/nri-gpu/current").strip()
        waits = root.command(f"{tree}/bin/python3", "-c", "input()")
        with subprocess.Popen(waits, stdin=subprocess.PIPE) as runs:
            said = root.run("apt", "install", "-y", "--allow-downgrades", seen_in(whole_deb, WHOLE_AT))
            assert "going back from" in said
            assert root.run("ls", f"{tree}/common")  # whatever runs imports from it
            runs.communicate(b"\n")
        assert "ok installed" not in root.try_run("dpkg", "-s", COMMON).stdout
        assert root.run("dpkg", "-V", DAEMON) == ""
        assert root.run("nri-gpu", "check").startswith("/etc/nri-gpu/policy.toml: ok\n")
        root.run("apt", "install", *debs.this)
        assert root.run("dpkg", "-V", *DAEMONS) == ""
        [_] = root.run("ls", "/usr/lib/nri-gpu/live").split()
