"""The Debian package of this tree, with the Python packages that it needs: dist/nri-gpu_VERSION_ARCHITECTURE.deb.

    python -m deploy.debian.build [--output FOLDER] [--compression xz|gzip|none]

Plain dpkg-deb: deploy/bundle.py lays the tree out, and the files beside this one become the package's own. The same
tree and lock file make the same package, byte by byte, as long as SOURCE_DATE_EPOCH is the same; by default it is the
time of the last commit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Final

from deploy import bundle, sbom
from nri_gpu import __version__

HERE: Final = Path(__file__).parent
SCRIPTS: Final = ("preinst", "postinst", "prerm", "postrm")
DOCUMENTS: Final = "usr/share/doc/nri-gpu"
# Debian's name of an architecture -> what `uname -m` says.
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}


def build(output: Path, compression: str) -> Path:
    """Returns the package.

    Raises: bundle.BundleError; KeyError: an unknown architecture; and what `pack` does.
    """
    with tempfile.TemporaryDirectory(prefix="nri-gpu-deb-") as name:
        tree = Path(name) / "tree"
        tree.mkdir()
        bundle.lay_out(tree, MACHINES[_architecture()])
        return pack(tree, output, compression)


def pack(tree: Path, output: Path, compression: str) -> Path:
    """The package of a tree that is laid out, to which it adds.

    Raises: sbom.SbomError, subprocess.CalledProcessError.
    """
    architecture = _architecture()
    epoch = int(
        os.environ.get("SOURCE_DATE_EPOCH") or _said("git", "-C", str(bundle.ROOT), "log", "-1", "--format=%ct")
    )
    output.mkdir(parents=True, exist_ok=True)
    package = output / f"nri-gpu_{__version__}_{architecture}.deb"
    _document(tree, epoch)
    bundle.set_modes(tree)
    _control(tree, architecture)
    _set_times(tree, epoch)
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", f"-Z{compression}", "--build", tree, package],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return package


def _architecture() -> str:
    return _said("dpkg", "--print-architecture")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _document(tree: Path, epoch: int) -> None:
    folder = tree / DOCUMENTS
    folder.mkdir(parents=True)
    (folder / "README.md").write_bytes((bundle.ROOT / "README.md").read_bytes())
    _write_gzip(folder / "CHANGELOG.md.gz", (bundle.ROOT / "CHANGELOG.md").read_text())
    date = format_datetime(datetime.fromtimestamp(epoch, UTC))
    maintainer = next(line for line in (HERE / "control").read_text().splitlines() if line.startswith("Maintainer: "))
    signed = f" -- {maintainer.partition(': ')[2]}  {date}"
    entry = "  * CHANGELOG.md.gz says what changed."
    _write_gzip(folder / "changelog.gz", f"nri-gpu ({__version__}) unstable; urgency=medium\n\n{entry}\n\n{signed}\n")
    (folder / "copyright").write_text("\n".join(_copyright(tree)))
    sbom.write(folder)
    for manual in (tree / "usr/share/man").rglob("*.1"):
        _write_gzip(manual.with_name(f"{manual.name}.gz"), manual.read_text())
        manual.unlink()
    overrides = tree / "usr/share/lintian/overrides/nri-gpu"
    overrides.parent.mkdir(parents=True)
    overrides.write_text((HERE / "lintian-overrides").read_text())


def _copyright(tree: Path) -> Iterator[str]:
    """Ours, then each bundled package's with the text that came with it."""
    yield "nri-gpu is under the Apache License, Version 2.0: /usr/share/common-licenses/Apache-2.0\n"
    yield "Below /usr/lib/nri-gpu are these Python packages, each under the licence that follows.\n"
    for each in bundle.licences(tree):
        yield f"{'=' * 79}\n{each.package} {each.version}: {each.name}\n\n{each.text}\n"


def _write_gzip(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _control(tree: Path, architecture: str) -> None:
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    size_kib = sum(-(-path.stat().st_size // 1024) for path in files)
    facts = {"@VERSION@": __version__, "@ARCHITECTURE@": architecture, "@INSTALLED_SIZE@": str(size_kib)}
    facts["@IN_USE@"] = (HERE / "in_use.sh").read_text().rstrip("\n")
    folder = tree / "DEBIAN"
    folder.mkdir(mode=0o755)
    for name in (*SCRIPTS, "control", "conffiles", "triggers"):
        text = (HERE / name).read_text()
        for mark, fact in facts.items():
            text = text.replace(mark, fact)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755 if name in SCRIPTS else 0o644)
    edited = (HERE / "conffiles").read_text().split()  # dpkg itself keeps the sums of these
    summed = [path for path in files if f"/{path.relative_to(tree)}" not in edited]
    sums = (f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}" for path in summed)
    (folder / "md5sums").write_text("\n".join(sums) + "\n")
    (folder / "md5sums").chmod(0o644)


def _set_times(tree: Path, epoch: int) -> None:
    for path in (tree, *tree.rglob("*")):
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def main(arguments: Sequence[str]) -> int:
    """Build it and print where it is. Returns an exit code."""
    parser = argparse.ArgumentParser(description="Build the Debian package.")
    parser.add_argument("--output", type=Path, default=bundle.ROOT / "dist")
    parser.add_argument("--compression", choices=("xz", "gzip", "none"), default="xz")
    options = parser.parse_args(arguments)
    try:
        print(build(options.output, options.compression))
    except (bundle.BundleError, sbom.SbomError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
