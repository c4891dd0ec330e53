"""The RPMs of this tree, with the Python packages that it needs: dist/PACKAGE-VERSION-REVISION.ARCHITECTURE.rpm.

    python -m deploy.rpm.build [--output FOLDER]

deploy/bundle.py lays the tree out, as for the Debian packages; the specification beside this file packs it. The same
tree and lock file make the same packages, byte by byte, as long as SOURCE_DATE_EPOCH and rpmbuild are the same.
"""

from __future__ import annotations

import os
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

SPEC: Final = Path(__file__).with_name("nri-gpu.spec")
LICENSE: Final = bundle.ROOT / "LICENSE"
# Level 19 takes ten times as long, and makes packages that are a ninth smaller.
COMPRESSION: Final = "w9.zstdio"
# No time and no name of the machine that builds.
REPRODUCIBLE: Final = (
    "--define=use_source_date_epoch_as_buildtime 1",
    "--define=clamp_mtime_to_source_date_epoch 1",
    "--define=_buildhost localhost",
)


def build(output: Path) -> tuple[Path, ...]:
    """Returns the packages. Raises: bundle.BundleError, subprocess.CalledProcessError: rpmbuild failed."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-tree-") as name:
        tree = Path(name)
        bundle.lay_out(tree)
        return pack(tree, output)


def pack(
    tree: Path, output: Path, payload: str = COMPRESSION, rpmbuild: Sequence[str] = ("rpmbuild",)
) -> tuple[Path, ...]:
    """The packages of a tree that is laid out.

    payload: how they are compressed, as rpm writes it. rpmbuild: its command.

    Raises: bundle.BundleError, subprocess.CalledProcessError: rpmbuild failed.
    """
    epoch = bundle.released_at()
    with tempfile.TemporaryDirectory(prefix="nri-gpu-rpm-") as name, bundle.step("the RPMs"):
        work = Path(name)
        sources = work / "SOURCES"
        sources.mkdir()
        with tarfile.open(sources / f"nri-gpu-{__version__}-tree.tar", "w") as archive:
            archive.add(tree, ".", filter=lambda member: _owned_by_root(member, epoch))
        for path in (bundle.LOCK, LICENSE):
            shutil.copy(path, sources)
        defines = (f"--define=_topdir {work}", f"--define=_binary_payload {payload}")
        # --nodeps: what it requires is for the machine that it is installed on.
        command = [*rpmbuild, "-bb", "--quiet", "--nodeps", *REPRODUCIBLE, *defines, str(SPEC)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
        subprocess.run(command, env=environment, umask=0o022, check=True, stdout=subprocess.DEVNULL)
        output.mkdir(parents=True, exist_ok=True)
        return tuple(Path(shutil.copy(package, output)) for package in sorted((work / "RPMS").rglob("*.rpm")))


def _owned_by_root(member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    member.mtime = epoch
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def main(arguments: Sequence[str]) -> int:
    """Build them and print where they are. Returns an exit code."""
    return bundle.tell_of_folder(arguments, "Build the RPMs.", build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
