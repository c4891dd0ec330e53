"""The sources of a release and what needs no packager: sdist, wheel and chart archive, in dist/.

    python -m deploy.dist [--output FOLDER]

The wheel is made from the sdist. The same tree makes the same files, byte by byte, as long as SOURCE_DATE_EPOCH is the
same; by default it is the time of the last commit. setuptools and Helm write the time of the build into their archives,
and setuptools the builder's name, so these are written here: the sdist once more, the chart without Helm.
"""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import yaml

from deploy import bundle
from nri_gpu import __version__

CHART: Final = bundle.ROOT / "deploy" / "helm" / "nri-gpu"
SDIST: Final = f"nri_gpu-{__version__}.tar.gz"
# PEP 517: what pip would call.
BUILD_SDIST: Final = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def build(output: Path) -> tuple[Path, ...]:
    """Return sdist, wheel and chart archive. Raises: bundle.BundleError."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nri-gpu-dist-") as name:
        work = Path(name)
        with bundle.step("sdist"):
            sdist = _build_sdist(bundle.copy_sources(work / "tree"), work, output / SDIST)
        with bundle.step("wheel"):
            wheel = Path(shutil.copy(bundle.build_wheel(sdist, work), output))
    return sdist, wheel, pack_chart(output)


def _build_sdist(tree: Path, work: Path, file: Path) -> Path:
    command = [sys.executable, "-c", BUILD_SDIST, str(work)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise bundle.BundleError(f"setuptools made no sdist:\n{done.stderr}")
    with tarfile.open(work / SDIST) as made:
        files = {each.name: (made.extractfile(each), each.mode) for each in made if each.isfile()}
        return _write(file, {name: (part.read(), mode) for name, (part, mode) in files.items() if part})


def pack_chart(output: Path) -> Path:
    """Write the chart's archive, named and filled as by `helm package`, and return it."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    lines = (CHART / ".helmignore").read_text().split("\n")
    ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    found = {
        path: path.relative_to(CHART.parent)
        for path in CHART.rglob("*")
        if path.is_file() and not any(fnmatch(part, rule) for part in path.relative_to(CHART).parts for rule in ignored)
    }
    file = output / f"{about['name']}-{about['version']}.tgz"
    return _write(file, {str(name): (path.read_bytes(), path.stat().st_mode) for path, name in found.items()})


def _write(file: Path, content: Mapping[str, tuple[bytes, int]]) -> Path:
    """Write a compressed tar, and return it. content: by name what is in a file, and its permissions."""
    epoch = bundle.released_at()
    with (
        file.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name in sorted(content):
            data, mode = content[name]
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(data), epoch, 0o755 if mode & 0o100 else 0o644
            archive.addfile(member, io.BytesIO(data))
    return file


def main(arguments: Sequence[str]) -> int:
    """Build them and print where they are. Returns an exit code."""
    return bundle.tell_of_folder(arguments, "Build sdist, wheel and chart archive.", build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
