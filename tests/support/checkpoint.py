"""A checkpoint as an image, and the registry that containerd takes the image below it from when it restores one.

Source: containerd internal/cri/server/container_checkpoint_linux.go.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

from deploy.image import MANIFEST, write

ANNOTATION: Final = "org.criu.checkpoint.container.name"  # of a manifest: what makes an image a checkpoint
_BLOBS: Final = "blobs/sha256/"
_CONFIG: Final = "config.dump"


def checkpoint_image(tar: Path, checkpoint: Path, below: str, name: str) -> Path:
    """Make an image of a checkpoint archive, and return where it is: `tar`. below: the image to pull for it."""
    layer = io.BytesIO()
    with tarfile.open(checkpoint) as given, tarfile.open(fileobj=layer, mode="w") as made:
        for entry in given:
            content = file.read() if (file := given.extractfile(entry)) else b""
            if entry.name == _CONFIG:
                content = json.dumps(json.loads(content) | {"rootfsImageRef": below}).encode()
                entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return write(tar, layer.getvalue(), {}, name, {ANNOTATION: "main"})


@contextmanager
def registry(image: Path) -> Iterator[str]:
    """A registry with one image, of an OCI layout tar, which runs meanwhile; what to pull it by."""
    with tarfile.open(image) as tar:
        files = {each.name: file.read() for each in tar if (file := tar.extractfile(each))}
    digest = json.loads(files["index.json"])["manifests"][0]["digest"]
    blobs = {f"sha256:{name.removeprefix(_BLOBS)}": content for name, content in files.items() if _BLOBS in name}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(blobs))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"localhost:{server.server_port}/below@{digest}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(blobs: Mapping[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Of OCI's distribution specification: a manifest or a blob, by its digest."""
            digest = self.path.rpartition("/")[2]
            if (blob := blobs.get(digest)) is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", MANIFEST if "/manifests/" in self.path else "application/octet-stream")
            self.send_header("Content-Length", str(len(blob)))
            self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(blob)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Handler
