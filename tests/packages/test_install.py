"""A package's life on a clean Debian: the lines of the pages, then upgrade, downgrade, removal and purge."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.debian.build import VERSION
from nri_gpu import __version__
from tests.packages.conftest import AT, DAEMONS, NEWER, Debs
from tests.support import packages
from tests.support.debian_root import DebianRoot, base

DOCS = Path(__file__).parents[2] / "docs"
BY_HAND = "systemd does not run here"
# Stands for systemd, which cannot run here: it writes down what it is told, and the file `fails` makes a restart fail.
SYSTEMCTL = """#!/bin/sh
echo "$*" >>/run/told
case "$*" in
*is-enabled*) echo enabled ;;
*restart*) [ ! -e /run/fails ] ;;
esac
"""
# Runs `python3 -I -c PROGRAM` as another version, and answers `python3 -I -V`.
STAND_IN = """#!/bin/sh
case "$2" in
-V) echo Python {version} ;;
-c) exec /usr/bin/python3.11 -I -c "import sys; sys.version_info = {tuple}
$3" ;;
*) exec /usr/bin/python3.11 "$@" ;;
esac
"""
DAEMON, GUARD = "--quiet --system restart nri-gpu.service", "--quiet --system restart nri-gpu-guard.service"
WANTED = "/etc/systemd/system/multi-user.target.wants"
TREES = "ls -1 /usr/lib/nri-gpu/live"


def lines_of(page: str, section: str) -> list[str]:
    """The first shell block of a section of a page."""
    part = (DOCS / page).read_text().partition(f"\n## {section}\n")[2]
    block = re.search(r"```sh\n(.*?)```", part, flags=re.DOTALL)
    assert block, section
    return [line.partition(" #")[0].rstrip() for line in block[1].splitlines()]


def follow(root: DebianRoot, page: str, section: str, failing: tuple[str, ...] = ()) -> str:
    """Run the lines where the packages are. failing: lines that may find something wrong."""
    said = ""
    for line in lines_of(page, section):
        done = root.try_run("sh", "-c", f"cd {AT} && {line}", answers="y\n")
        assert done.returncode == 0 or line in failing, f"{line}: {done.returncode}\n{done.stdout}"
        said += done.stdout
    return said


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_the_install_page_on_a_clean_system(debs: Debs, tmp_path: Path, suite: str) -> None:
    for package in debs.files():
        shutil.copy(package, tmp_path)
    with DebianRoot(suite, {tmp_path: AT}) as root:
        before = root.files()
        said = follow(root, "install.md", "Install", failing=("nri-gpu doctor",))
        assert BY_HAND in said
        doctor = " ".join(said.split())  # it wraps its lines
        assert "ERROR container runtime: neither containerd nor CRI-O runs or is configured here" in doctor
        assert "not seen" in said
        assert "Traceback" not in said
        assert root.run("nri-gpu", "--version") == f"nri-gpu {__version__}\n"
        assert root.run("nri-gpu", "check").startswith("/etc/nri-gpu/policy.toml: ok\n")
        assert root.run("dpkg", "-V", *DAEMONS) == ""
        root.run("test", "-f", "/usr/share/zsh/vendor-completions/_nri-gpu")  # where Debian's zsh looks
        assert {f"{WANTED}/nri-gpu.service", f"{WANTED}/nri-gpu-guard.service"} <= root.files()
        follow(root, "upgrade.md", "Remove")
        assert sorted(root.files() - before) == []


def test_an_edited_policy_and_no_old_tree_stay(installed: DebianRoot, debs: Debs) -> None:
    root = installed
    root.run("sh", "-c", "echo '# mine' >>/etc/nri-gpu/policy.toml")

    said = root.run("dpkg", "-i", *debs.newer)
    assert "what runs goes on with the old version until you restart" in said
    assert root.run("nri-gpu", "--version") == f"nri-gpu {NEWER}\n"
    [tree] = root.run("sh", "-c", TREES).split()
    assert tree.startswith(f"{NEWER}-")

    said = root.run("dpkg", "-i", *debs.this)
    assert f"going back from {VERSION.replace(__version__, NEWER)} to {VERSION};" in said
    assert root.run("nri-gpu", "--version") == f"nri-gpu {__version__}\n"

    memories = ("/var/lib/nri-gpu/policy.in-force", "/run/nri-gpu/policy.last")
    root.run("sh", "-c", 'mkdir -p /var/lib/nri-gpu /run/nri-gpu && touch "$@"', "sh", *memories)
    root.run("dpkg", "-i", *debs.this)
    before = root.files()
    assert set(memories) <= before
    root.run("dpkg", "-r", *DAEMONS)
    assert not {"/usr/bin/nri-gpu", *memories} & root.files()
    root.run("dpkg", "-i", *debs.this)
    changed = (root.files() ^ before) - set(memories)
    assert not [path for path in changed if not path.startswith("/usr/lib/nri-gpu/live/")]
    assert root.run("tail", "-1", "/etc/nri-gpu/policy.toml") == "# mine\n"


def test_a_purge_while_an_mps_daemon_runs(installed: DebianRoot) -> None:
    root, clients = installed, "/run/nri-gpu/mps/clients"
    shutil.copy("/usr/bin/umount", root.path / "usr/bin")
    root.run("mkdir", "-p", clients)
    mount = f"import ctypes; ctypes.CDLL(None).mount(b'clients', b'{clients}', b'tmpfs', 0, None)"
    root.run("python3", "-c", mount)
    root.run("touch", f"{clients}/pipe", "/run/nri-gpu/ledger.json")
    within = root.command("sh", "-c", f"cd {clients} && echo there && read -r _")
    with subprocess.Popen(within, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout
        assert daemon.stdout.readline() == b"there\n"
        said = root.run("dpkg", "-P", *DAEMONS)
        daemon.communicate()
    assert f"a program still uses {clients}, such as an MPS daemon" in said
    assert root.run("find", "/run/nri-gpu", "-type", "f") == f"{clients}/pipe\n"
    root.run("umount", clients)


def test_the_guard_is_restarted_once_the_daemon_serves(bookworm: DebianRoot, debs: Debs) -> None:
    root = bookworm
    root.run("mkdir", "-p", "/run/systemd/system")
    (root.path / "usr/bin/systemctl").write_text(SYSTEMCTL)
    root.run("chmod", "+x", "/usr/bin/systemctl")

    def told(*words: str) -> tuple[str, list[str]]:
        (root.path / "run/told").unlink(missing_ok=True)
        return root.run(*words), (root.path / "run/told").read_text().splitlines()

    said, told_systemd = told("dpkg", "-i", *debs.this)
    assert BY_HAND not in said
    assert told_systemd.index("--system daemon-reload") < told_systemd.index(DAEMON) < told_systemd.index(GUARD)
    enabled = {each.rpartition(" preset ")[2] for each in told_systemd}
    assert {"nri-gpu.service", "nri-gpu-guard.service"} <= enabled

    (root.path / "run/fails").touch()
    said, told_systemd = told("dpkg", "-i", *debs.newer)
    assert "nri-gpu: the daemon is not serving yet and keeps trying; see: nri-gpu doctor" in said
    assert DAEMON in told_systemd
    assert GUARD not in told_systemd

    _, told_systemd = told("dpkg", "-P", *DAEMONS)
    assert [each for each in told_systemd if each.startswith("stop ") and " nri-gpu.service" in each]


def test_a_policy_of_a_newer_version_is_named(bookworm: DebianRoot, debs: Debs) -> None:
    root = bookworm
    root.run("dpkg", "-i", *debs.newer)
    root.run("sh", "-c", "echo '[of_tomorrow]' >>/etc/nri-gpu/policy.toml")
    said = root.run("dpkg", "-i", *debs.this)
    assert "this version cannot use /etc/nri-gpu/policy.toml as it is; the daemon goes on with the last good" in said


def test_too_old_a_python_gets_a_sentence(bookworm: DebianRoot, debs: Debs) -> None:
    """Debian 11's Python, on a newer system."""
    for tree in packages.python_39():
        shutil.copytree(tree, bookworm.path, dirs_exist_ok=True, symlinks=True)
    bookworm.run("ln", "-sf", "python3.9", "/usr/bin/python3")
    before = bookworm.files()
    done = bookworm.try_run("apt", "install", *debs.this)
    assert done.returncode == 100
    assert re.search(
        r"nri-gpu needs Python 3\.11 to 3\.14, and /usr/bin/python3 is Python 3\.9\.\d+; nothing was changed",
        done.stdout,
    )
    assert not [path for path in bookworm.files() - before if "/__pycache__" not in path]  # that Python's own


def test_a_python_without_wheels_gets_a_sentence(bookworm: DebianRoot, debs: Debs) -> None:
    """No Debian has these two, so Debian 12's says that it is one of them."""
    root = bookworm
    root.run("rm", "/usr/bin/python3")
    for version in ("3.10.12", "3.15.0"):
        stand_in = root.path / "usr/bin/python3"
        stand_in.write_text(STAND_IN.format(version=version, tuple=tuple(map(int, version.split(".")))))
        stand_in.chmod(0o755)
        before = root.files()
        done = root.try_run("apt", "install", *debs.this)
        assert done.returncode == 100
        assert f"nri-gpu needs Python 3.11 to 3.14, and /usr/bin/python3 is Python {version};" in done.stdout
        assert root.files() == before


def test_the_systems_python_changes_under_it(debs: Debs) -> None:
    """As in an upgrade of the distribution: first Debian 12's Python, then Debian 13's."""
    with DebianRoot("trixie", {debs.folder: AT, base("bookworm") / "usr": "/old"}) as root:
        root.run("sh", "-c", "cp -a /old/bin/python3.11 /usr/bin/ && cp -a /old/lib/python3.11 /usr/lib/")
        root.run("ln", "-sf", "python3.11", "/usr/bin/python3")
        root.run("dpkg", "-i", *debs.this)
        compiled = (
            "cd /usr/lib/nri-gpu/current && find . -name '__init__.cpython-3*.pyc' | sed 's/.*cpython-//' | sort -u"
        )
        assert root.run("sh", "-c", compiled) == "311.pyc\n"
        assert root.run("nri-gpu", "--version") == f"nri-gpu {__version__}\n"

        root.run("ln", "-sf", "python3.13", "/usr/bin/python3")
        assert root.run("nri-gpu", "--version") == f"nri-gpu {__version__}\n"
        root.run("dpkg-trigger", "--by-package=python3-minimal", "/usr/bin/python3")
        root.run("dpkg", "--triggers-only", "--pending")
        assert root.run("sh", "-c", compiled) == "313.pyc\n"
        assert root.run("nri-gpu", "check").startswith("/etc/nri-gpu/policy.toml: ok\n")

        root.run("sh", "-c", "rm -rf /usr/lib/nri-gpu/*/lib/python3.13 /usr/lib/nri-gpu/live/*/lib/python3.13")
        done = root.try_run("nri-gpu", "--version")
        assert done.returncode == 69
        assert done.stdout.endswith(
            "is Python 3.13, and this package is for Python 3.11, 3.12, 3.14: install a newer nri-gpu, or its wheel in "
            "a virtual environment\n"
        )
