"""The table of container runtimes: the folders where each keeps what it was told of its containers.

Sources: containerd docs/ops.md; moby daemon/container (config.v2.json, hostconfig.json); Podman
libpod/oci_conmon_common.go and runtime_ctr.go; CRI-O server/container_create.go and internal/oci/runtime_oci.go (never
run here). Rootless containers lie in their users' homes, which nobody opens: their processes tell of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.system.storage import below
from nri_gpu.verify.oci_bundles import STATES, TASKS

CONTAINERD, DOCKER, PODMAN, CRIO = "containerd", "Docker", "Podman", "CRI-O"
MOBY: Final = "moby"  # Docker's namespace in containerd
CRI: Final = "k8s.io"  # that of pods. containerd: internal/cri/constants, K8sContainerdNamespace


class Layout(StrEnum):
    """The ways in which a folder is laid out."""

    TASKS = "tasks"  # NAMESPACE/ID with config.json and init.pid
    STORAGE = "storage"  # ID/userdata with pidfile, and with config.json in this folder or in a later one of the row
    DETAILS = "details"  # ID with config.v2.json and hostconfig.json; the bundles are in containerd's folders


class RuntimeFolders(Struct, frozen=True):
    """A row of the table. Only root can replace one of the folders by another."""

    runtime: str
    layout: Layout
    folders: tuple[str, ...]


_RUN, _KEPT = (f"/{place}/containers/storage/overlay-containers" for place in ("run", "var/lib"))
RUNTIMES: Final = (
    RuntimeFolders(CONTAINERD, Layout.TASKS, tuple(f"{state}/{TASKS}" for state in STATES)),
    RuntimeFolders(DOCKER, Layout.DETAILS, ("/var/lib/docker/containers",)),
    RuntimeFolders(PODMAN, Layout.STORAGE, (_RUN, _KEPT)),
    RuntimeFolders(CRIO, Layout.STORAGE, (_RUN,)),
)


def mounted_folders() -> tuple[str, ...]:
    """Return all folders of the table: those of the host that a pod mounts to look at its containers."""
    return tuple(dict.fromkeys(folder for row in RUNTIMES for folder in row.folders))


def watched_folders(states: Iterable[str] = (), root: Path = Path("/")) -> list[Path]:
    """Return the folders that exist in which containers come and go. states: of more containerds. root: the host's /.

    Namespaces of containerd come later: ask again after each look.
    """
    tasks = [*(f"{state}/{TASKS}" for state in states), *folders_of(Layout.TASKS)]
    found = [path for path in (below(root, each) for each in tasks) if path.is_dir()]
    inside = [each for path in found for each in path.iterdir() if each.is_dir()]
    stored = [below(root, each) for each in dict.fromkeys(row.folders[0] for row in _rows(Layout.STORAGE))]
    return [*found, *inside, *(path for path in stored if path.is_dir())]


def folders_of(layout: Layout) -> tuple[str, ...]:
    """Return the folders that are laid out so."""
    return tuple(dict.fromkeys(folder for row in _rows(layout) for folder in row.folders))


def _rows(layout: Layout) -> list[RuntimeFolders]:
    return [row for row in RUNTIMES if row.layout is layout]
