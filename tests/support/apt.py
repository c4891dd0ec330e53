"""Debian packages without installing them: a private apt, so that its signatures, proxies and mirrors count.

Nothing of the system changes: the lists lie in the cache folder, and a package is unpacked, never installed.
"""

from __future__ import annotations

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
LISTS_KEPT_S: Final = 3600.0  # a mirror keeps what its last lists name for longer
KEYRINGS: Final = (  # where Debian's own archive keys lie; the second is the name from Debian 13 on
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
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


def unpack(package: str, suite: str | None, into: Path, architecture: str = "") -> None:
    """Download `package` of `suite` (None: the machine's own release), verify it, unpack it to `into`.

    architecture: Debian's name of it; this machine's when empty. Raises: UnavailableError: no mirror could give it.
    """
    faults = []
    for archive in archives():
        chosen = suite or archive.release
        keyring = next((key for key in KEYRINGS if key.exists()), None)
        signed_by = f"[signed-by={keyring}] " if keyring else ""
        source = f"deb {signed_by}{archive.site} {chosen} main"
        try:
            _Apt(f"{chosen}-{architecture or 'own'}", source, architecture).unpack(into, "download", package)
        except HarnessError as fault:
            faults.append(str(fault))
        else:
            return
    raise UnavailableError(
        f"cannot fetch Debian's {package} ({suite or 'own release'}); is the network there? " + " | ".join(faults)
    )


def unpack_missing(packages: Sequence[str], into: Path) -> None:
    """Unpack to `into` what `apt install` of the packages would bring to this machine. Raises: UnavailableError."""
    archives()
    try:
        _of_this_machine().unpack(
            into, "install", "--yes", "--download-only", "--no-install-recommends", *packages, merged=True
        )
    except HarnessError as fault:
        raise UnavailableError(f"cannot fetch Debian's {' '.join(packages)}; is the network there? {fault}") from fault


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
                try:
                    self.complaints = _run("apt-get", *self._options, "-qq", "update").stderr.strip()[-300:]
                except HarnessError as fault:
                    if source:
                        raise
                    self.complaints = str(fault)  # of one source of many, perhaps
                fetched.touch()

    def run(self, *words: str | Path, cwd: Path | None = None) -> str:
        return _run("apt-get", *self._options, "-qq", *words, cwd=cwd).stdout

    def unpack(self, into: Path, *words: str, merged: bool = False) -> None:
        """Unpack what the command downloads. merged: as on a system whose /bin leads to /usr/bin."""
        with tempfile.TemporaryDirectory(prefix="nri-gpu-apt-") as name:
            work = Path(name)
            (work / "partial").mkdir()
            self.run("-o", f"Dir::Cache::archives={work}", *words, cwd=work)
            into.mkdir(parents=True, exist_ok=True)
            for each in MERGED if merged and Path("/bin").is_symlink() else ():
                (into / "usr" / each).mkdir(parents=True)
                (into / each).symlink_to(f"usr/{each}")
            for deb in work.glob("*.deb"):
                script = 'dpkg-deb --fsys-tarfile "$0" | tar -x --keep-directory-symlink --no-same-owner -C "$1"'
                _run("bash", "-o", "pipefail", "-c", script, str(deb), str(into))


def _of_this_machine() -> _Apt:
    return _Apt(f"this-machine-{platform.machine()}", installed=str(INSTALLED))


def _run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
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
