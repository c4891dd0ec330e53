"""Locks of Python packages in deploy/locks, with hashes: `dev.txt` for tests, and parts of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from tools.files import ROOT

FOLDER: Final = ROOT / "deploy" / "locks"
PROJECT: Final = ROOT / "pyproject.toml"
DEVELOPMENT: Final = ("dev",)
# Parts of it, so it is made first: all that a node may run, which a release bundles; what the demo imports; what builds
# a release; what builds the site; the kit for machines with a GPU.
PARTS: Final = {
    "runtime.txt": (),
    "demo.txt": ("demo",),
    "release.txt": ("release",),
    "site.txt": ("docs",),
    "gpu-kit.txt": ("hardware",),
}
# Every Python and processor in one file, and no address of an index: whose it is, the installing machine says.
COMPILE: Final = (
    *("uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
    *("--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate", "--upgrade"),
)
LOCKED: Final = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
HASHED: Final = re.compile(r"^\S+==\S+[^\\\n]*\\\n    --hash=sha256:[0-9a-f]{64}", re.MULTILINE)


def lock(name: str, extras: Collection[str], *more: str) -> None:
    """Write one lock.

    Raises:
        subprocess.CalledProcessError: uv found no versions that fit, or no index.

    """
    wanted = [part for extra in extras for part in ("--extra", extra)]
    subprocess.run(
        [
            str(Path(sys.executable).with_name(COMPILE[0])),
            *COMPILE[1:],
            *wanted,
            *more,
            "-o",
            str(FOLDER / name),
            PROJECT,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def write() -> None:
    """Lock the newest versions, over the network."""
    lock("dev.txt", DEVELOPMENT)
    for name, extras in PARTS.items():
        lock(name, extras, "--constraints", str(FOLDER / "dev.txt"))


def locked(name: str) -> dict[str, str]:
    """Return the versions of one lock, by normal name."""
    return {_normal(package): version for package, version in LOCKED.findall((FOLDER / name).read_text())}


def faults() -> Iterator[str]:
    """Yield what stands in pyproject.toml but in no lock, what differs between two locks, what has no hash; offline."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    development = locked("dev.txt")
    for name, extras in {"dev.txt": DEVELOPMENT, **PARTS}.items():
        versions = locked(name)
        text = (FOLDER / name).read_text()
        if len(HASHED.findall(text)) != len(LOCKED.findall(text)):  # some twice, for two Pythons
            yield f"{name} has a package without a hash: run `make lock`"
        if "://" in text:
            yield f"{name} names an address: run `make lock`"
        for requirement in _requirements(project, extras):
            version = versions.get(_normal(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                has = f"{requirement.name} {version or '(none)'}"
                yield f"{name} has {has}, pyproject.toml wants {requirement}: run `make lock`"
        for package, version in versions.items():
            if development.get(package) != version:
                yield f"{name} has {package} {version}, the tests run with {development.get(package)}: run `make lock`"


def _requirements(project: dict[str, dict[str, list[str]]], extras: Collection[str]) -> Iterator[Requirement]:
    """Yield what the extras ask for, those that they name in turn included."""
    for text in [
        *project["dependencies"],
        *(each for extra in extras for each in project["optional-dependencies"][extra]),
    ]:
        requirement = Requirement(text)
        if _normal(requirement.name) == "nri-gpu":
            yield from _requirements(project, requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def _normal(name: str) -> str:
    """Return the name as PEP 503 normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()
