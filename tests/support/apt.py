"""Debian packages without installing them: a private apt, so that its signatures, proxies and mirrors count.

Nothing of the system changes: the lists lie in the cache folder, and a package is unpacked, never installed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.support.cache import cache_folder, one_at_a_time
from tests.support.errors import HarnessError, UnavailableError

COMMAND_TIMEOUT_S: Final = 300.0
AGAIN_S: Final = 60.0
LISTS_KEPT_S: Final = 3600.0  # a mirror keeps what its last lists name for longer
KEYRINGS: Final = (  # where Debian's own archive keys lie; the second is the name from Debian 13 on
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
DOWNLOAD_ONLY: Final = ("install", "--yes", "--download-only", "--no-install-recommends", "-o")  # and a folder for them
INSTALLED: Final = Path("/var/lib/dpkg/status")
# What a system whose /bin leads to /usr/bin has as links; packages of Debian 12 still have files in them.
MERGED: Final = ("bin", "sbin", "lib", "lib64")


class Archive(Struct, frozen=True):
    """A Debian mirror this machine is configured for, and the release it takes from there."""

    site: str
    release: str


def archives() -> tuple[Archive, ...]:
    """Every Debian mirror in the machine's apt sources, in their order. Raises: UnavailableError: there is none."""
    release = Path("/etc/os-release")
    if not release.exists() or "ID=debian" not in release.read_text().splitlines():
        raise UnavailableError(
            "programs are fetched from Debian, and this is no Debian machine: install containerd >= 1.7"
        )
    own = _of_this_machine()
    rows = own.run("indextargets", "--format", "$(CREATED_BY)|$(COMPONENT)|$(RELEASE)|$(SITE)", "Target-Of: deb")
    found = dict.fromkeys(
        Archive(site, release)
        for created_by, component, release, site in (row.split("|") for row in rows.splitlines())
        # A release with a dash is an overlay (-updates, -security) and holds a few packages only.
        if created_by == "Packages" and component == "main" and "-" not in release
    )
    if not found:
        raise UnavailableError(
            "apt could read no list of a Debian archive with component main: is one in its sources, and the network "
            f"there? {own.complaints}"
        )
    return tuple(found)


def download(
    packages: Sequence[str],
    suite: str | None,
    into: Path,
    components: str = "main",
    architecture: str = "",
    *,
    whole: bool = False,
) -> None:
    """Download packages of `suite` (None: the machine's own release), verified, as .deb files into a folder.

    components: of the archive, separated by blanks. architecture: Debian's name of it; this machine's when empty.
    whole: with all that they depend on, down to the C library.
    Raises: UnavailableError: no mirror could give them.
    """
    faults = []
    for archive in archives():
        chosen = suite or archive.release
        keyring = next((key for key in KEYRINGS if key.exists()), None)
        signed_by = f"[signed-by={keyring}] " if keyring else ""
        source = f"deb {signed_by}{archive.site} {chosen} {components}"
        lists = "-".join((chosen, *components.split(), architecture or "own"))
        try:
            (into / "partial" if whole else into).mkdir(parents=True, exist_ok=True)
            words = (*DOWNLOAD_ONLY, f"Dir::Cache::archives={into}") if whole else ("download",)
            _Apt(lists, source, architecture).run(*words, *packages, cwd=into)
        except HarnessError as fault:
            faults.append(str(fault))
        else:
            return
    raise UnavailableError(
        f"cannot fetch Debian's {', '.join(packages)} ({suite or 'own release'}, {components}); is the network there? "
        + " | ".join(faults)
    )


def unpack(package: str, suite: str | None, into: Path, architecture: str = "") -> None:
    """Download a package, and unpack it to `into`. Arguments and errors as above."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-apt-") as work:
        download([package], suite, Path(work), architecture=architecture)
        _unpack_all(Path(work), into)


def unpack_whole(packages: Sequence[str], suite: str, into: Path) -> None:
    """The same of several, with all that they depend on, down to the C library."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-apt-") as work:
        download(packages, suite, Path(work), whole=True)
        _unpack_all(Path(work), into)


def unpack_missing(packages: Sequence[str], into: Path) -> None:
    """Unpack to `into` what `apt install` of the packages would bring to this machine. Raises: UnavailableError."""
    archives()
    with tempfile.TemporaryDirectory(prefix="nri-gpu-apt-") as work:
        (Path(work) / "partial").mkdir()
        try:
            _of_this_machine().run(*DOWNLOAD_ONLY, f"Dir::Cache::archives={work}", *packages)
        except HarnessError as fault:
            raise UnavailableError(
                f"cannot fetch Debian's {', '.join(packages)}; is the network there? {fault}"
            ) from fault
        for each in MERGED if Path("/bin").is_symlink() else ():
            (into / "usr" / each).mkdir(parents=True)
            (into / each).symlink_to(f"usr/{each}")
        _unpack_all(Path(work), into)


def _unpack_all(debs: Path, into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    script = 'dpkg-deb --fsys-tarfile "$0" | tar -x --keep-directory-symlink --no-same-owner -C "$1"'
    for deb in debs.glob("*.deb"):
        run_command("bash", "-o", "pipefail", "-c", script, str(deb), str(into))


class _Apt:
    """apt-get with lists of its own, fetched when it is made. source: the machine's own sources when empty."""

    def __init__(self, name: str, source: str = "", architecture: str = "", installed: str = "/dev/null") -> None:
        state = cache_folder() / "apt" / name
        (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        own = {"APT::Architecture": architecture, "APT::Architectures": architecture} if architecture else {}
        if source:
            (state / "sources.list").write_text(f"{source}\n")
            # A mirror that does not answer is an error, not a warning.
            own |= {"Dir::Etc::SourceList": f"{state}/sources.list", "Dir::Etc::SourceParts": "/dev/null"}
            own |= {"APT::Update::Error-Mode": "any"}
        settings = own | {
            "Dir::State": state,
            "Dir::State::status": installed,
            "APT::Sandbox::User": "root",  # the unprivileged fetcher could not write to our folder
            "Acquire::Check-Valid-Until": "false",  # a mirror may be a snapshot; its signature counts
            "Acquire::Languages": "none",
            "Acquire::Retries": 2,
            "Acquire::http::Timeout": 20,
            "Acquire::https::Timeout": 20,
            "Debug::NoLocking": 1,  # nothing of the system's is written
        }
        self._options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        self.complaints = ""  # of fetching the lists, where that was done now
        fetched = state / "fetched"
        with one_at_a_time(state / "fetched.lock"):
            if not fetched.exists() or time.time() - fetched.stat().st_mtime > LISTS_KEPT_S:
                fetched.touch()
                try:
                    self.complaints = run_command("apt-get", *self._options, "-qq", "update").stderr.strip()[-300:]
                except HarnessError as fault:
                    # Asked again later, so that a hundred tests do not wait for a network that is away.
                    os.utime(fetched, times=(0, time.time() - LISTS_KEPT_S + AGAIN_S))
                    if source:
                        raise
                    self.complaints = str(fault)  # of one source of many, perhaps

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """Return what apt-get prints. Raises: HarnessError."""
        return run_command("apt-get", *self._options, "-qq", *words, cwd=cwd).stdout


def _of_this_machine() -> _Apt:
    return _Apt(f"this-machine-{platform.machine()}", installed=str(INSTALLED))


def run_command(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Raises: HarnessError: it failed, with what it said last."""
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as fault:
        raise HarnessError(f"{command[0]} failed: {' '.join(fault.stderr.split())[-300:]}") from fault
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise HarnessError(f"{command[0]} failed: {fault}") from fault
