"""The container image of this tree, without a builder of images: dist/nri-gpu-VERSION.oci.tar.

    python -m deploy.image [--output FOLDER]

One layer: a Debian that mmdebstrap makes, without apt, and over it what deploy/bundle.py lays out, for the one Python
of that Debian. deploy/Containerfile is the other way. Needs root, mmdebstrap, and the network for Debian's packages and
for the wheels. Plain tar, since programs that push an image compress its layers.

Debian's packages are the newest of the suite. PACKAGE_LIST, a file of the image, names each with its version, and so
does its bill of materials, which is written beside it. The same tree, lock and packages make the same image, byte by
byte, as long as SOURCE_DATE_EPOCH is the same; by default it is the time of the last commit.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Final

from deploy import bundle
from nri_gpu import __version__

NAME: Final = f"localhost/nri-gpu:{__version__}"
FILE: Final = f"nri-gpu-{__version__}.oci.tar"
SUITE, PYTHON = "trixie", "3.13"  # which that suite has
# C++ is for wheels, and `mount` for the chart's init container.
PACKAGES: Final = ("python3", "libstdc++6", "mount")
# Licences stay.
PATHS: Final = (
    "exclude=/usr/share/doc/*",
    "include=/usr/share/doc/*/copyright",
    "exclude=/usr/share/man/*",
    "exclude=/usr/share/locale/*",
)
# A line for each Debian package of the image: its name and version.
PACKAGE_LIST: Final = "usr/share/nri-gpu/packages.txt"
# $2: the Debian; $0: what is laid out; $1: gets the list. Compiled here, since the chart's root is read-only. A
# container gets its own name and resolver; what mmdebstrap leaves are the builder's.
FINISH: Final = f"""
cp -a "$0/." "$2"
chroot "$2" python3 -I -m compileall -q -x /pygments/ --invalidation-mode=unchecked-hash /{bundle.BUNDLE}
chroot "$2" dpkg-query --show >"$1"
install -m 0644 "$1" "$2/{PACKAGE_LIST}"
rm -rf "$2/etc/hostname" "$2/etc/resolv.conf" "$2/var/log/apt"
"""
# Not User: only root may connect to the NRI socket. No variable of Python's: the program starts it with -I.
CONFIG: Final[Mapping[str, object]] = {
    "Entrypoint": ["nri-gpu"],
    "Cmd": ["run"],
    "Env": ["PATH=/usr/sbin:/usr/bin"],
    "Labels": {
        "org.opencontainers.image.title": "nri-gpu",
        "org.opencontainers.image.description": "Gives containers NVIDIA GPUs through containerd's NRI",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.licenses": "Apache-2.0",
    },
}
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
LAYER, MANIFEST, INDEX, IMAGE = (
    f"application/vnd.oci.image.{kind}"
    for kind in ("layer.v1.tar", "manifest.v1+json", "index.v1+json", "config.v1+json")
)


def build(output: Path, mmdebstrap: Sequence[str] = ("mmdebstrap",), mirror: str = "") -> Path:
    """Return the archive, and write its bill of materials beside it.

    mmdebstrap: its command. mirror: of Debian; mmdebstrap's own choice when empty.

    Raises: bundle.BundleError; sbom.SbomError; FileNotFoundError: no mmdebstrap; subprocess.CalledProcessError: it said
    why it failed.
    """
    from deploy import sbom  # its library is not where tests only write images

    epoch = bundle.released_at()
    with tempfile.TemporaryDirectory(prefix="nri-gpu-image-") as name:
        tree, layer, listed = (Path(name) / part for part in ("tree", "layer.tar", "packages.txt"))
        tree.mkdir()
        bundle.lay_out(tree, pythons=(PYTHON,))
        bundle.set_times(tree, epoch)
        options = [
            "--mode=root", "--variant=essential", f"--include={','.join(PACKAGES)}", "--skip=output/dev",
            *(f"--dpkgopt=path-{each}" for each in PATHS), "--dpkgopt=force-unsafe-io",
            f'--customize-hook=sh -ec {quote(FINISH)} {quote(str(tree))} {quote(str(listed))} "$1"',
        ]  # fmt: skip
        command = [*mmdebstrap, "--quiet", *options, SUITE, str(layer), *([mirror] if mirror else [])]
        with bundle.step(f"Debian {SUITE}: {', '.join(PACKAGES)} and what they need, from {mirror or 'its mirror'}"):
            subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}, check=True)
        output.mkdir(parents=True, exist_ok=True)
        sbom.write(output, sbom.IMAGE_FILE, sbom.debian(listed.read_text(), SUITE, ARCHITECTURES[platform.machine()]))
        return write(output / FILE, layer.read_bytes(), CONFIG, NAME)


def write(
    archive: Path,
    layer: bytes,
    config: Mapping[str, object],
    name: str,
    annotations: Mapping[str, str] | None = None,
) -> Path:
    """An OCI image layout in a tar, which Docker loads too.

    layer: a tar. config: how it runs, as OCI spells it. annotations: of the manifest.
    """
    system = {"architecture": ARCHITECTURES[platform.machine()], "os": "linux"}
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    whole = _json({**system, "config": config, "rootfs": rootfs})
    parts = {"config": _descriptor(IMAGE, whole), "layers": [_descriptor(LAYER, layer)]}
    more = {"annotations": annotations} if annotations else {}
    manifest = _json({"schemaVersion": 2, "mediaType": MANIFEST, **parts, **more})
    named = {"platform": system, "annotations": {"io.containerd.image.name": name}}
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [_descriptor(MANIFEST, manifest) | named]}
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": _json(index)}
    files |= {_path(blob): blob for blob in (layer, whole, manifest)}
    # What Docker's own image store reads instead of OCI's index.
    files["manifest.json"] = _json([{"Config": _path(whole), "RepoTags": [name], "Layers": [_path(layer)]}])
    with tarfile.open(archive, "w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return archive


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _path(blob: bytes) -> str:
    return f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def main(arguments: Sequence[str]) -> int:
    """Build it and print where it is. Returns an exit code."""
    return bundle.tell_of_folder(arguments, "Build the container image.", lambda output: (build(output),))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
