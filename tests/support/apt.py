"""Debian packages without installing them: a private apt, so that its signatures, proxies and mirrors count.

Nothing of the system changes: the lists live in a folder of ours, and a package is unpacked, never installed.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from msgspec import Struct

from tests.support.errors import HarnessError

COMMAND_TIMEOUT_S = 300.0
KEYRINGS = (  # where Debian's own archive keys lie; the second is the name from Debian 13 on
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)


class Archive(Struct, frozen=True):
    """A Debian mirror this machine is configured for, and the release it takes from there."""

    site: str
    release: str


def archives() -> tuple[Archive, ...]:
    """Every Debian mirror in the machine's apt sources, in their order.

    Raises: HarnessError where there is none, for example on another distribution.
    """
    if "ID=debian" not in Path("/etc/os-release").read_text().splitlines():
        raise HarnessError("runtimes are fetched from Debian, and this is no Debian machine: install containerd >= 1.7")
    rows = _run(
        "apt-get", "indextargets", "--format", "$(CREATED_BY)|$(COMPONENT)|$(RELEASE)|$(SITE)", "Target-Of: deb"
    )
    found = dict.fromkeys(
        Archive(site, release)
        for created_by, component, release, site in (row.split("|") for row in rows.splitlines())
        # A release with a dash is an overlay (-updates, -security) and holds a few packages only.
        if created_by == "Packages" and component == "main" and "-" not in release
    )
    if not found:
        raise HarnessError("apt's sources name no Debian archive with component main; add one, or set NRI_GPU_CACHE")
    return tuple(found)


def unpack(package: str, suite: str | None, into: Path, architecture: str = "") -> None:
    """Download `package` of `suite` (None: the machine's own release), verify it, unpack it to `into`.

    architecture: Debian's name of it; this machine's when empty. Raises: HarnessError when no mirror could give it.
    """
    faults = []
    for archive in archives():
        try:
            _unpack_from(archive.site, suite or archive.release, package, into, architecture)
        except HarnessError as fault:
            faults.append(str(fault))
        else:
            return
    raise HarnessError(
        f"cannot fetch Debian's {package} ({suite or 'own release'}); is the network there? " + " | ".join(faults)
    )


def _unpack_from(site: str, suite: str, package: str, into: Path, architecture: str) -> None:
    with tempfile.TemporaryDirectory(prefix="nri-gpu-apt-") as name:
        work = Path(name)
        options = _private_apt(work, site, suite, architecture)
        _run("apt-get", *options, "-qq", "update", cwd=work)
        _run("apt-get", *options, "-qq", "download", package, cwd=work)
        [deb] = work.glob("*.deb")
        into.mkdir(parents=True)
        try:
            _run("dpkg", "-x", str(deb), str(into))
        except HarnessError:
            shutil.rmtree(into)
            raise


def _private_apt(work: Path, site: str, suite: str, architecture: str) -> list[str]:
    keyring = next((key for key in KEYRINGS if key.exists()), None)
    signed_by = f"[signed-by={keyring}] " if keyring else ""
    (work / "sources.list").write_text(f"deb {signed_by}{site} {suite} main\n")
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    other = {"APT::Architecture": architecture, "APT::Architectures": architecture} if architecture else {}
    settings = other | {
        "Dir::State": work / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": work / "cache",
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Sandbox::User": "root",  # the unprivileged fetcher could not write to our folder
        "APT::Update::Error-Mode": "any",  # a mirror that does not answer is an error, not a warning
        "Acquire::Languages": "none",
        "Acquire::Retries": 2,
        "Acquire::http::Timeout": 20,
        "Acquire::https::Timeout": 20,
    }
    return [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]


def _run(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
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
    return done.stdout
