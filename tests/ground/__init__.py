"""Programs of other projects, built from their Go modules, for tests and the bench to run and compare with.

Each folder here is a set: its go.mod names the programs (`tool`) and pins every version, its go.sum the checksums. So
no line of Python knows a version, and `go get -tool PATH@VERSION` in the folder raises one. What is built lies in the
cache folder, with a digest of what it was built from. Go keeps what it compiled, so a build that was cut goes on.
A set without a program, which is not in SETS, requires a module whose files tests read (`module`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

from tests.support.cache import cache_folder, kept
from tests.support.errors import HarnessError, NotBuiltError

SOURCES: Final = Path(__file__).parent
# In the order in which they are built: what most tests need first, what takes longest last.
SETS: Final = (
    *("helm4", "helm3", "containerd", "containerd-lts", "crictl", "etcd", "nri-plugins", "nvidia"),
    *("kubernetes", "dra-driver"),
)
MADE_FROM: Final = "made-from"
# Where a test builds its set itself, if Go is there: nobody lands a chart that Helm has not seen.
ON_DEMAND: Final = frozenset({"helm4", "helm3"})
# A go.mod chooses its Go; a checkout's version control means nothing to programs of others.
ENVIRONMENT: Final = {"GOTOOLCHAIN": "auto", "GOFLAGS": "-buildvcs=false"}


def built(name: str) -> Path | None:
    """The folder with a set's programs, or None where they are not built from the set of today."""
    folder = cache_folder() / "ground" / name
    made_from = folder / MADE_FROM
    return folder if made_from.is_file() and made_from.read_text() == _fingerprint(name) else None


def need(name: str) -> Path:
    """The folder with a set's programs. Raises: NotBuiltError, and a test that meets it is skipped."""
    if name in ON_DEMAND and shutil.which("go"):
        return build(name)
    folder = built(name)
    if folder is None:
        raise NotBuiltError(f"{name} of tests/ground is not built: run `make ground SETS={name}`, which needs Go")
    return folder


def version(name: str, module: str) -> str:
    """The version of a module that a set pins, such as `2.4.2`, or empty. The programs themselves know less of it."""
    found = re.search(rf"^(?:require |\t){re.escape(module)} v(\S+)", (SOURCES / name / "go.mod").read_text(), re.M)
    return found[1] if found else ""


def module(name: str, path: str) -> Path:
    """The folder of a module that a set requires; nothing of such a set is built. Raises: NotBuiltError."""
    if not shutil.which("go"):
        raise NotBuiltError(f"{path} of tests/ground is not fetched: install Go")
    command = ["go", "mod", "download", "-json", path]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(
        command, cwd=SOURCES / name, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-500:]
        raise NotBuiltError(f"{path} of tests/ground is neither in Go's cache nor served by its proxy: {said}")
    return Path(json.loads(done.stdout)["Dir"])


def build(name: str, timeout_s: float | None = None) -> Path:
    """Build a set's programs unless they are there, and return their folder. Raises: HarnessError."""

    def make(folder: Path) -> None:
        _install(name, folder, timeout_s)
        if (server := folder / "server").exists():  # Go calls a program as its folder
            server.rename(folder / "etcd")
        (folder / MADE_FROM).write_text(_fingerprint(name))

    folder = cache_folder() / "ground" / name
    return kept(folder, make, is_current=lambda: built(name) is not None)


def _fingerprint(name: str) -> str:
    """A digest of a set's folder."""
    found = hashlib.sha256()
    for path in sorted(each for each in (SOURCES / name).rglob("*") if each.is_file()):
        found.update(f"{path.relative_to(SOURCES)}\n{path.read_text()}\n".encode())
    return found.hexdigest()


def _install(name: str, into: Path, timeout_s: float | None) -> None:
    process = subprocess.Popen(
        ["go", "install", "-trimpath", f"-ldflags={_linker_flags(name)}", "tool"],
        cwd=SOURCES / name,
        env=os.environ | ENVIRONMENT | {"GOBIN": str(into)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # compilers and linkers end with it
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as fault:
        raise HarnessError(f"{name} was not built within {timeout_s:.0f} s") from fault
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise HarnessError(f"go install failed for {name}: {said[-1000:]}")


def _linker_flags(name: str) -> str:
    """Without symbols, and with the version that Kubernetes' programs are only told here: else each is v0.0.0."""
    flags = "-s -w"
    if kubernetes := version(name, "k8s.io/kubernetes"):
        major, minor, _ = kubernetes.split(".")
        told = {"gitVersion": f"v{kubernetes}", "gitMajor": major, "gitMinor": minor}
        flags += "".join(f" -X k8s.io/component-base/version.{key}={value}" for key, value in told.items())
    return flags
