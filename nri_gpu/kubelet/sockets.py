"""Where the sockets of the kubelet and of device plugins are, and who listens on them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.policy.kubelet import KubeletSettings, Registration

KUBELET_SOCKET: Final = "kubelet.sock"


class EndpointPaths(Struct, frozen=True):
    """Where the sockets are.

    changed: waits until something appears in a folder, or for that many seconds. wall: seconds since the epoch.
    """

    settings: KubeletSettings
    changed: Callable[[Path, float], Awaitable[None]]
    wall: Callable[[], float] = time.time

    @property
    def by_register(self) -> bool:
        """Whether we call the kubelet; otherwise its plugin watcher finds our socket."""
        return self.settings.registration is Registration.REGISTER

    @property
    def folder(self) -> Path:
        """Of our sockets."""
        return Path(self.settings.dir if self.by_register else self.settings.registry_dir)

    @property
    def kubelet(self) -> Path:
        """The kubelet's own socket."""
        return Path(self.settings.dir) / KUBELET_SOCKET


def removed(folder: Path) -> bool:
    """Whether the folder, or the closest existing one above it, was removed, so that only a mount still shows it."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        return there.stat().st_nlink == 0 and not any(there.iterdir())
    except OSError:
        return False


def rival_of(resource: str, folder: Path) -> str:
    """The socket of NVIDIA's device plugin for a resource if somebody listens on it; else empty."""
    prefix, _, name = resource.partition("/")
    path = folder / f"nvidia-{name}.sock"
    return str(path) if prefix == "nvidia.com" and listens(path) else ""


def remove_stale(folder: Path) -> None:
    """Remove sockets of ours that a killed process left."""
    for path in folder.glob("nri-gpu-*.sock"):
        if path.is_socket() and not listens(path):
            path.unlink(missing_ok=True)


def listens(path: Path) -> bool:
    """Whether somebody listens on a socket. Connecting to a local socket does not wait."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:  # the queue is full, so there is a listener
            return True
        except OSError:
            return False
        return True
