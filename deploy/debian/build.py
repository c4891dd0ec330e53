"""The Debian packages of this tree, with the Python packages that it needs: dist/PACKAGE_VERSION_ARCHITECTURE.deb.

    python -m deploy.debian.build [--output FOLDER] [--compression xz|gzip|none]

Plain dpkg-deb: deploy/bundle.py lays the tree out and says whose each file is. The files in the folder of a package
beside this one become its own, where @NAME@ stands for the text of name.sh. The same tree and lock file make the same
packages, byte by byte, as long as SOURCE_DATE_EPOCH is the same; by default it is the time of the last commit.
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
# These too are in every package's control archive, where its folder has them.
OTHERS: Final = ("control", "triggers")
# The default level of xz takes six times as long, and makes packages that are an eighth smaller.
COMPRESSED: Final = {"xz": ("-Zxz", "-z1"), "gzip": ("-Zgzip",), "none": ("-Znone",)}
SHIPPED: Final = bundle.ROOT / "config/policy.toml"
VERSION: Final = f"{__version__}-{bundle.REVISION}"
# Debian's name of an architecture -> what `uname -m` says.
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}


def build(output: Path, compression: str) -> tuple[Path, ...]:
    """Returns the packages.

    Raises: bundle.BundleError; KeyError: an unknown architecture; and what `pack` does.
    """
    with tempfile.TemporaryDirectory(prefix="nri-gpu-deb-") as name:
        tree = Path(name) / "tree"
        tree.mkdir()
        bundle.lay_out(tree, MACHINES[_architecture()])
        return pack(tree, output, compression)


def pack(tree: Path, output: Path, compression: str) -> tuple[Path, ...]:
    """The packages of a tree that is laid out, whose files it takes.

    Raises: bundle.BundleError, sbom.SbomError, subprocess.CalledProcessError.
    """
    epoch = bundle.released_at()
    (tree / bundle.POLICY).unlink()  # postinst copies it: dpkg would ask everybody who edits it
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nri-gpu-parts-", dir=tree.parent) as parts:
        bundle.split(tree, Path(parts))
        return tuple(_pack(Path(parts) / package, output, compression, epoch) for package in bundle.PACKAGES)


def _pack(part: Path, output: Path, compression: str, epoch: int) -> Path:
    """The package of that folder's name, to which it adds."""
    architecture = _architecture()
    package = output / f"{part.name}_{VERSION}_{architecture}.deb"
    _document(part, epoch)
    bundle.set_modes(part)
    _control(part, architecture)
    bundle.set_times(part, epoch)
    with bundle.step(package.name):
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", *COMPRESSED[compression], "--build", part, package],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return package


def _architecture() -> str:
    return _said("dpkg", "--print-architecture")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _document(part: Path, epoch: int) -> None:
    folder = part / "usr/share/doc" / part.name
    folder.mkdir(parents=True)
    date = format_datetime(datetime.fromtimestamp(epoch, UTC))
    control = (HERE / part.name / "control").read_text()
    maintainer = next(line for line in control.splitlines() if line.startswith("Maintainer: "))
    signed = f" -- {maintainer.partition(': ')[2]}  {date}"
    heading = f"{part.name} ({VERSION}) unstable; urgency=medium"
    entry = f"  * changelog.gz of {bundle.COMMON} says what changed."
    _write_gzip(folder / "changelog.Debian.gz", f"{heading}\n\n{entry}\n\n{signed}\n")
    (folder / "copyright").write_text("\n".join(_copyright(part)))
    if part.name == bundle.COMMON:
        _write_gzip(folder / "changelog.gz", (bundle.ROOT / "CHANGELOG.md").read_text())
        sbom.write(folder)
    completions = part / "usr/share/zsh/site-functions"
    if completions.exists():  # Debian's zsh looks there for what packages bring
        completions.rename(completions.with_name("vendor-completions"))
    for manual in (part / "usr/share/man").rglob("nri-gpu*"):
        _write_gzip(manual.with_name(f"{manual.name}.gz"), manual.read_text())
        manual.unlink()
    overrides = part / "usr/share/lintian/overrides" / part.name
    overrides.parent.mkdir(parents=True)
    overrides.write_text((HERE / part.name / "lintian-overrides").read_text())


def _copyright(part: Path) -> Iterator[str]:
    """Ours, then each bundled package's with the text that came with it."""
    licence = "the Apache License, Version 2.0: /usr/share/common-licenses/Apache-2.0"
    yield f"Copyright 2026 the authors of nri-gpu. It is under {licence}\n"
    if part.name == bundle.COMMON:
        yield "Below /usr/lib/nri-gpu are these Python packages, each under the licence that follows.\n"
    for each in bundle.licences(part):
        yield f"{'=' * 79}\n{each.package} {each.version}: {each.name}\n\n{each.text}\n"


def _write_gzip(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _control(part: Path, architecture: str) -> None:
    files = sorted(path for path in part.rglob("*") if path.is_file() and not path.is_symlink())
    size_kib = sum(-(-path.stat().st_size // 1024) for path in files)
    facts = {"@VERSION@": VERSION, "@ARCHITECTURE@": architecture, "@INSTALLED_SIZE@": str(size_kib)}
    facts["@POLICY_SUM@"] = hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    facts |= {f"@{path.stem.upper()}@": path.read_text().rstrip("\n") for path in HERE.glob("*.sh")}
    folder = part / "DEBIAN"
    folder.mkdir(mode=0o755)
    for source in (HERE / part.name / name for name in (*SCRIPTS, *OTHERS)):
        if source.exists():
            text = source.read_text()
            for mark, fact in facts.items():
                text = text.replace(mark, fact)
            (folder / source.name).write_text(text)
            (folder / source.name).chmod(0o755 if source.name in SCRIPTS else 0o644)
    sums = (f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(part)}" for path in files)
    (folder / "md5sums").write_text("\n".join(sums) + "\n")
    (folder / "md5sums").chmod(0o644)


def main(arguments: Sequence[str]) -> int:
    """Build them and print where they are. Returns an exit code."""
    parser = argparse.ArgumentParser(description="Build the Debian packages.")
    parser.add_argument("--output", type=Path, default=bundle.ROOT / "dist")
    parser.add_argument("--compression", choices=tuple(COMPRESSED), default="xz")
    options = parser.parse_args(arguments)
    return bundle.tell(lambda: build(options.output, options.compression))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
