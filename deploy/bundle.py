"""Lays nri-gpu out below a folder as distributions' packages have it, with the Python packages that it needs.

    python -m deploy.bundle DESTDIR

    usr/bin/nri-gpu                  picks the folder below, and starts the program there
    usr/bin/kubectl-nri_gpu          and its completion, which need neither
    usr/lib/nri-gpu/bundle/          a virtual environment on the system's Python, without pip
        common/                      what is the same for every Python: our own packages, most of the others
        lib/python3.11/site-packages what was compiled for this one, and a line that adds `common`; so for each Python
    usr/lib/systemd/system/          units, whose programs are in /usr/bin
    usr/share/nri-gpu/               drop-ins of units, chart, manifests, examples of policies and topologies
    usr/share/man, bash-completion, zsh, fish
    usr/share/doc/nri-gpu/           README and manual, with links by which theirs hold
    etc/nri-gpu/policy.toml          and a link to its schema

Distributions' packages are three: nri-gpu-common has all that starts nothing; nri-gpu has the policy and the units that
give containers GPUs; nri-gpu-observe has the observer's unit.

A virtual environment, because Python itself then picks the folder by its version, also in the processes that nri-gpu
starts (`python -I -m ...`), which inherit no variable. The wheels come from pip, pinned by deploy/locks/runtime.txt;
the setuptools that builds our own is that of the environment, which deploy/locks/release.txt pins.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.enable.features import INSTALLED_AS, UNIT_PROGRAM

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "deploy" / "locks" / "runtime.txt"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
# glibc that a wheel may ask for at most: 2.28, older than that of any distribution with one of these Pythons.
PLATFORMS: Final = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
BUNDLE: Final = "usr/lib/nri-gpu/bundle"
SYSTEM_PYTHON: Final = "/usr/bin/python3"
PROGRAM: Final = "/usr/bin/nri-gpu"  # where packages have it
UNITS: Final = "usr/lib/systemd/system"
SHARED: Final = "usr/share/nri-gpu"
MANUAL: Final = "usr/share/doc/nri-gpu"
POLICY: Final = "etc/nri-gpu/policy.toml"
COMMON, DAEMON, OBSERVER = PACKAGES = ("nri-gpu-common", "nri-gpu", "nri-gpu-observe")
# Of the packages of this version: goes up where they change and the version does not.
REVISION: Final = 3
# From the tree to the package, where neither the wheel's metadata nor a unit is it.
COPIED: Final[Mapping[str, str]] = {
    **{f"systemd/{name}": f"{SHARED}/systemd/{name}" for name in ("nri-gpu.service.d",)},
    **{f"deploy/{name}": f"{SHARED}/{name}" for name in ("helm", "manifests", "monitoring")},
    **{name: f"{MANUAL}/{name}" for name in ("README.md", "CHANGELOG.md", "docs")},
    "api/schemas": f"{SHARED}/schemas",
    **{f"config/{name}": f"{SHARED}/{name}" for name in ("containerd", "examples", "topologies", "policy.schema.json")},
    **{f"share/{name}": f"usr/share/{name}" for name in ("bash-completion", "fish", "man", "zsh")},
    **{f"share/kubectl/{name}": f"usr/bin/{name}" for name in ("kubectl-nri_gpu", "kubectl_complete-nri_gpu")},
    "config/policy.toml": f"{SHARED}/policy.toml",
    "deploy/launcher.sh": PROGRAM.strip("/"),
    "deploy/start.py": f"{BUNDLE}/nri-gpu",
}
# So links of README and manual hold: what they name below config/ and deploy/ is all in SHARED.
LINKED: Final[Mapping[str, str]] = {
    **{f"{MANUAL}/{name}": "../../nri-gpu" for name in ("api", "config", "deploy")},
    f"{MANUAL}/systemd": "../../../lib/systemd/system",
    "etc/nri-gpu/policy.schema.json": f"/{SHARED}/policy.schema.json",
}
# In docs/, what only the site is made of.
ONLY_OF_SITE: Final = ("conf.py", "static", "diagrams", "external-links.txt")
# Not needed to run: tests, and what pip knows of an installation, which is not what is here.
LEFT_OUT: Final = ("tests", "testing", "testdata", "RECORD", "INSTALLER", "REQUESTED")
# What a checkout has beside its sources: .gitignore's, and git's own.
NO_SOURCES: Final = (
    *(".git", ".venv", ".cache", ".*_cache", ".hypothesis", ".coverage", "__pycache__"),
    *("build", "dist", "*.egg-info"),
)


class Licence(Struct, frozen=True):
    """What a bundled package says of its licence. text: its licence files, one after the other."""

    package: str
    version: str
    name: str
    text: str


def lay_out(destination: Path, machine: str = platform.machine(), pythons: Sequence[str] = PYTHONS) -> None:
    """Make the tree below a folder. machine: as `uname -m` says it. pythons: that it is to run on.

    Raises: subprocess.CalledProcessError when pip cannot get a wheel; BundleError.
    """
    with tempfile.TemporaryDirectory(prefix="nri-gpu-bundle-") as name:
        work = Path(name)
        with step(f"wheels for Python {', '.join(pythons)}"), ThreadPoolExecutor() as pool:
            found = pool.map(lambda python: download(LOCK, work / python, python, machine), pythons)
            wheels = dict(zip(pythons, found, strict=True))
        with step("our own wheel"):
            own = build_wheel(copy_sources(work / "tree"), work)
        with step("the tree"):
            _unpack_wheels(wheels, own, destination / BUNDLE)
    _make_environment(destination / BUNDLE, pythons)
    for source, target in COPIED.items():
        _copy(ROOT / source, destination / target)
    _copy(destination / SHARED / "policy.toml", destination / POLICY)
    for link, target in LINKED.items():
        (destination / link).symlink_to(target)
    _install_units(destination / UNITS)
    set_modes(destination)


def licences(destination: Path) -> tuple[Licence, ...]:
    """Of each bundled package, ours left out, by name."""
    metadata = sorted((destination / BUNDLE).rglob("*.dist-info/METADATA"))
    found = {licence.package: licence for licence in map(_licence, metadata) if licence.package != "nri-gpu"}
    return tuple(found[package] for package in sorted(found, key=str.lower))


class BundleError(Exception):
    """A tree or a wheel is not as this module expects it. Says what."""


def download(lock: Path, folder: Path, python: str, machine: str = platform.machine()) -> frozenset[Path]:
    """The wheels of a lock for one Python, among what else is in the folder. Raises: BundleError."""
    wanted = ["--no-deps", "--require-hashes", f"--requirement={lock}"]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    platforms = [f"--platform={name}_{machine}" for name in PLATFORMS]
    _pip("download", *wanted, *target, *platforms, f"--dest={folder}")
    return frozenset(folder.glob("*.whl"))


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say on standard error what is being done, and after it how long that took."""
    began = time.monotonic()
    print(what, end=" ... ", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)


def tell(build: Callable[[], Iterable[Path]]) -> int:
    """Build, and print the files, or why there are none. Returns an exit code."""
    try:
        print(*build(), sep="\n")
    except FileNotFoundError as error:
        print(f"{error.filename} is missing: install it", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed with code {error.returncode}", file=sys.stderr)
    except BundleError as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return 1


def tell_of_folder(arguments: Sequence[str], description: str, build: Callable[[Path], Iterable[Path]]) -> int:
    """Build into the folder that the command line names, as `tell` does. description: of the program's help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    output = parser.parse_args(arguments).output
    return tell(lambda: build(output))


def released_at() -> int:
    """Return the time of this release in seconds since 1970: SOURCE_DATE_EPOCH, or the time of the last commit.

    Raises: BundleError.
    """
    if said := os.environ.get("SOURCE_DATE_EPOCH"):
        if not said.isascii() or not said.isdecimal():
            raise BundleError(f"SOURCE_DATE_EPOCH is {said!r}: give seconds since 1970, or unset it")
        return int(said)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"git does not know the time of {ROOT}: {done.stderr.strip()}: set SOURCE_DATE_EPOCH")
    return int(done.stdout)


def set_times(folder: Path, epoch: int) -> None:
    """Give a folder and all in it one time, in seconds since 1970."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def copy_sources(into: Path) -> Path:
    """Copy the tree, and return the copy: in the tree itself setuptools would take what an earlier build left."""
    shutil.copytree(ROOT, into, ignore=shutil.ignore_patterns(*NO_SOURCES))
    return into


def build_wheel(source: Path, into: Path) -> Path:
    """Return the wheel of a tree or an sdist: the same one, byte by byte, of the same source. Raises: BundleError."""
    _pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={into}", str(source))
    [wheel] = into.glob("nri_gpu-*.whl")
    return wheel


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(released_at())}
    done = subprocess.run(command, env=environment, umask=0o022, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"pip {arguments[0]} failed:\n{done.stderr}")


def _unpack_wheels(wheels: Mapping[str, frozenset[Path]], own: Path, bundle: Path) -> None:
    """What every Python has under one name goes to `common`."""
    names = {python: {wheel.name for wheel in found} for python, found in wheels.items()}
    everywhere = set.intersection(*names.values())
    for python, found in wheels.items():
        for wheel in sorted(found):
            if wheel.name not in everywhere:
                _unpack(wheel, bundle / f"lib/python{python}/site-packages")
            elif python == next(iter(wheels)):
                _unpack(wheel, bundle / "common")
    _unpack(own, bundle / "common")


def _unpack(wheel: Path, into: Path) -> None:
    """Its packages and metadata. A wheel of pure or platform libraries alone is its site-packages, zipped (PEP 427)."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            parts = Path(name).parts
            if parts[0].endswith(".data"):
                # Ours has what COPIED takes from the tree.
                if not wheel.name.startswith("nri_gpu-"):
                    raise BundleError(f"{wheel.name} installs {name} outside site-packages: say where it belongs")
            elif not any(part in LEFT_OUT for part in parts):
                archive.extract(name, into)


def _make_environment(bundle: Path, pythons: Sequence[str]) -> None:
    """What makes a folder a virtual environment (PEP 405)."""
    (bundle / "bin").mkdir()
    (bundle / "bin/python3").symlink_to(SYSTEM_PYTHON)
    home = Path(SYSTEM_PYTHON).parent
    (bundle / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    for python in pythons:
        packages = bundle / f"lib/python{python}/site-packages"
        packages.mkdir(parents=True, exist_ok=True)  # empty so far, where it is the only one
        (packages / "common.pth").write_text("../../../common\n")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        left_out = ONLY_OF_SITE if source == ROOT / "docs" else ()
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)


def _install_units(folder: Path) -> None:
    folder.mkdir(parents=True)
    units = [path for path in (ROOT / "systemd").iterdir() if path.suffix in {".service", ".path", ".mount"}]
    for unit in units:
        (folder / INSTALLED_AS.get(unit.name, unit.name)).write_text(unit.read_text().replace(UNIT_PROGRAM, PROGRAM))
    if not any(f"={PROGRAM} run" in unit.read_text() for unit in folder.iterdir()):
        raise BundleError(f"no unit starts {UNIT_PROGRAM} run, so none was made to start {PROGRAM}")


def split(tree: Path, parts: Path) -> None:
    """Move the files of a tree that is laid out to a folder for each package, below `parts`."""
    for path in sorted(tree.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            target = parts / _owner(path.relative_to(tree)) / path.relative_to(tree)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)


def _owner(file: Path) -> str:
    if file == Path(UNITS, "nri-gpu-observe.service"):
        return OBSERVER
    return DAEMON if file.parent == Path(UNITS) or file.parts[0] == "etc" else COMMON


def set_modes(destination: Path) -> None:
    """As in a package: whatever the umask was, everybody may read, and root alone may write."""
    programs = destination / "usr/bin"
    for path in (destination, *destination.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent == programs else 0o644)


def _licence(metadata: Path) -> Licence:
    fields = HeaderParser().parsestr(metadata.read_text())
    classified = [each.rpartition(" :: ")[2] for each in fields.get_all("Classifier", []) if "License :: " in each]
    name = fields["License-Expression"] or (classified or [fields["License"] or "see its text"])[0]
    texts = [path for path in sorted(metadata.parent.rglob("*")) if path.is_file() and _is_licence(path)]
    text = "\n\n".join(path.read_text() for path in texts)
    return Licence(fields["Name"], fields["Version"], name, text)


def _is_licence(path: Path) -> bool:
    return path.name.upper().startswith(("LICEN", "COPYING", "NOTICE", "AUTHORS"))


def main(arguments: Sequence[str]) -> int:
    """Lay it out below the folder that is named. Returns an exit code."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    destination = Path(arguments[0])
    destination.mkdir(parents=True, exist_ok=True)
    lay_out(destination)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
