"""The container image of the tests, built on the spot: an OCI layout in a tar, one layer, no registry.

Import it with `Containerd.import_image`. The same image serves as the pause image, since its command only sleeps.
"""

import io
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, assert_never

from msgspec import Struct, field

from deploy.image import write

NAME: Final = "localhost/nri-gpu/busybox:1"
# Without an argument of days or more, a pod of a slow test would end under it.
SLEEP: Final = ("/bin/sleep", "86400")


class File(Struct, frozen=True):
    """A regular file of the layer. mode: permission bits."""

    content: bytes
    mode: int = 0o644


class Link(Struct, frozen=True):
    """A symbolic link of the layer."""

    target: str


class Folder(Struct, frozen=True):
    """A directory of the layer; parents of other entries need not be given."""

    mode: int = 0o755


class Fifo(Struct, frozen=True):
    """A named pipe of the layer: who opens it to read hangs."""


Entry = File | Link | Folder | Fifo


class ImageSpec(Struct, frozen=True):
    """One image: what it is called, what it sets, and what its layer holds beside busybox.

    extra: absolute path in the image -> entry; wins over what busybox put there. userland: all of busybox; without, a
    `sleep` and no shell.
    """

    name: str = NAME
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = SLEEP
    extra: Mapping[str, Entry] = field(default_factory=dict)
    userland: bool = True


def build(tar_path: Path, busybox: Path, spec: ImageSpec | None = None) -> Path:
    """Write the image as an OCI layout tar, which Docker loads too, to `tar_path`, and return that path."""
    spec = spec or ImageSpec()
    layer = _layer((_userland(busybox) if spec.userland else _sleeper(busybox)) | dict(spec.extra))
    config = {"Env": [f"{key}={value}" for key, value in spec.env.items()], "Cmd": list(spec.command)}
    return write(tar_path, layer, config, spec.name)


def _userland(busybox: Path) -> dict[str, Entry]:
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    folders: dict[str, Entry] = {f"/{name}": Folder() for name in ("dev", "etc", "proc", "root", "sys")}
    links: dict[str, Entry] = {f"/bin/{applet}": Link("busybox") for applet in applets if applet != "busybox"}
    return {
        **folders,
        **links,
        "/tmp": Folder(0o1777),
        "/bin/busybox": File(busybox.read_bytes(), 0o755),
        "/etc/passwd": File(b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/:/bin/sh\n"),
        "/etc/group": File(b"root:x:0:\nuser:x:1000:\n"),
    }


def _sleeper(busybox: Path) -> dict[str, Entry]:
    return {SLEEP[0]: File(busybox.read_bytes(), 0o755), "/etc/passwd": File(b"root:x:0:0:root:/:/none\n")}


def _layer(entries: Mapping[str, Entry]) -> bytes:
    parents: dict[str, Entry] = {str(parent): Folder() for path in entries for parent in PurePosixPath(path).parents}
    parents.pop("/", None)
    whole = parents | dict(entries)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(whole):  # a parent sorts before what it holds
            _add(tar, path.lstrip("/"), whole[path])
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, entry: Entry) -> None:
    info = tarfile.TarInfo(name)
    match entry:
        case File(content, mode):
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
        case Link(target):
            info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
            tar.addfile(info)
        case Folder(mode):
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)
        case Fifo():
            info.type, info.mode = tarfile.FIFOTYPE, 0o644
            tar.addfile(info)
        case _:
            assert_never(entry)
