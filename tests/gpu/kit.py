"""`make gpu-kit`: one archive with all that tests/gpu needs on a machine with a GPU and without a network.

python -m tests.gpu.kit [--dist DIR] [--python VERSION]...

nri-gpu-gpu-kit-VERSION/
    run.py       tests/gpu/run_kit.py, which needs nothing but Python
    checkout/    this tree
    wheels/      what deploy/locks/gpu-kit.txt names, for each Python; pip among them
    cache/       containerd with shim and ctr, runc, busybox, laid out as NRI_GPU_CACHE
    programs/    the CUDA programs of this folder, compiled
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deploy import bundle
from nri_gpu import __version__
from tests.gpu import programs
from tests.support import packages
from tests.support.errors import HarnessError

ROOT: Final = Path(__file__).parents[2]
LOCK: Final = ROOT / "deploy" / "locks" / "gpu-kit.txt"
NAME: Final = f"nri-gpu-gpu-kit-{__version__}"
MAX_BYTES: Final = 64 << 20


def build(dist: Path, pythons: Sequence[str] = bundle.PYTHONS) -> Path:
    """The archive, of wheels for these Pythons.

    Raises: HarnessError, BundleError: something is not to be had, or the archive is too large.
    """
    with tempfile.TemporaryDirectory(prefix="nri-gpu-kit-") as name:
        tree = Path(name) / NAME
        lay_out(tree, pythons)
        return pack(tree, dist)


def pack(tree: Path, dist: Path, max_bytes: int = MAX_BYTES) -> Path:
    """The archive of a tree. Raises: HarnessError: it is too large."""
    dist.mkdir(parents=True, exist_ok=True)
    archive = dist / f"{NAME}.tar.xz"
    with lzma.open(archive, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(tree, NAME, filter=_owned_by_root)
    size = archive.stat().st_size
    if size > max_bytes:
        archive.unlink()
        raise HarnessError(f"the kit has {size / 2**20:.1f} MiB, and may have {max_bytes / 2**20:g} MiB")
    return archive


def lay_out(tree: Path, pythons: Sequence[str]) -> None:
    for name in tracked():
        _copy(ROOT / name, tree / "checkout" / name)
    _copy(ROOT / "tests" / "gpu" / "run_kit.py", tree / "run.py")
    for python in pythons:
        bundle.download(LOCK, tree / "wheels", python)
    _fill_cache(tree / "cache")
    (tree / "programs").mkdir()
    for name in programs.NAMES:
        programs.compile_program(name, tree / "programs")


def tracked() -> list[str]:
    """The checkout's files as git knows them, new ones included, by their path from its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def _fill_cache(cache: Path) -> None:
    """Where tests/support/packages.py looks for them, and no more than it takes. Raises: HarnessError."""
    version = packages.Version.V2_1
    containerd = packages.fetch(version)
    for name in ("containerd", "containerd-shim-runc-v2", "ctr"):
        _copy(containerd.folder / name, cache / packages.SUITES[version] / "containerd/usr/bin" / name)
    for package, program in (("runc", packages.runc()), ("busybox-static", packages.busybox())):
        _copy(program, cache / "own-release" / package / "usr/bin" / program.name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def main(arguments: Sequence[str] | None = None) -> int:
    """Build it, and say what was built. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", choices=bundle.PYTHONS, help="only for this one")
    options = parser.parse_args(arguments)
    try:
        archive = build(options.dist, options.python or bundle.PYTHONS)
    except (HarnessError, bundle.BundleError) as fault:
        print(fault, file=sys.stderr)
        return 1
    print(f"{archive} ({archive.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
