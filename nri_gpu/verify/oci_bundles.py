"""The containers of a node, by the OCI bundles that containerd keeps for those that run: what its runtime was told.

A bundle is the folder STATE/io.containerd.runtime.v2.task/NAMESPACE/ID, with `config.json` and `init.pid`. It has what
CRI would answer, of Docker's containers too, and needs no gRPC. Source: containerd docs/ops.md, core/runtime/v2.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.errors import UnseenError, cause_of
from nri_gpu.domain.text import shown
from nri_gpu.verify.oci_spec import Spec

TASKS: Final = "io.containerd.runtime.v2.task"
# State folders of containerd itself, k3s and RKE2, k0s, MicroK8s, and of the containerd that Docker starts.
STATES: Final = (
    "/run/containerd",
    "/run/k3s/containerd",
    "/run/k0s/containerd",
    "/var/snap/microk8s/common/run/containerd",
    "/run/docker/containerd/daemon",
)
STARTING_S: Final = 10.0  # so long after its bundle was written a container may have no process yet
NAME_MAX: Final = 253  # characters of a Kubernetes name
_STATIC_UID: Final = re.compile(r"[0-9a-f]{32}")  # kubernetes: pkg/kubelet/config/common.go, applyDefaults
_CRI: Final = "io.kubernetes.cri."  # containerd: internal/cri/annotations


class Bundle(Struct, frozen=True):
    """A container that runs. pid: its first process on the host. fault: why spec or pid are missing; a clause."""

    id: str
    namespace: str
    spec: Spec = Spec()
    pid: int = 0
    fault: str = ""

    @property
    def sandbox(self) -> bool:
        """Return whether it only holds a pod's namespaces."""
        return self._cri("container-type") == "sandbox"

    @property
    def pod_uid(self) -> str:
        """Return the pod's UID as NRI names it: a hand-made pod without a uid goes by its sandbox."""
        return self._cri("sandbox-uid") or self._cri("sandbox-id")

    @property
    def pod(self) -> str:
        """Return `namespace/name`, or for a container without a pod containerd's namespace for it, such as `moby`."""
        return shown(f"{self.pod_namespace}/{self.pod_name}" if self.pod_name else self.namespace, NAME_MAX)

    @property
    def pod_namespace(self) -> str:
        return self._cri("sandbox-namespace")

    @property
    def pod_name(self) -> str:
        """Return the pod's own name, or empty for a container without a pod."""
        return self._cri("sandbox-name")

    @property
    def static(self) -> bool:
        """Return whether the kubelet made the pod of a manifest, by its UID, which is an MD5 sum."""
        return bool(_STATIC_UID.fullmatch(self._cri("sandbox-uid")))

    @property
    def name(self) -> str:
        """Return the container's name in its pod, or the short id if it has no pod."""
        return "(sandbox)" if self.sandbox else shown(self._cri("container-name") or self.id[:12], NAME_MAX)

    def _cri(self, key: str) -> str:
        return (self.spec.annotations or {}).get(f"{_CRI}{key}", "")


def read_bundles(states: Iterable[Path], *, starting: bool = False) -> tuple[Bundle, ...]:
    """Return all containers that run, of each containerd with a state folder of these.

    starting: also those that have no process yet, with pid 0.

    Raises: UnseenError: none of the folders has containers' bundles, or they may not be listed.
    """
    given = tuple(states)
    found = [folders for state in given if (folders := _entries(state / TASKS)) is not None]
    if not found:
        raise UnseenError(
            f"no containerd keeps containers below {', '.join(map(str, given))}: name the folder that `containerd "
            "config dump` shows as `state` with --containerd-state"
        )
    bundles = [bundle for folders in found for folder in folders for bundle in _entries(folder) or ()]
    return tuple(read for bundle in bundles if (read := _read(bundle, starting=starting)))


def _entries(folder: Path) -> list[Path] | None:
    """Return what is in a folder, by name, or None if there is no such folder. Raises: UnseenError."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnseenError(f"{folder} cannot be listed: {cause_of(error)}; be root", error) from error


def _read(path: Path, *, starting: bool) -> Bundle | None:
    """Read a bundle. Return None if the container does not run yet, unless starting ones are wanted, or no more."""
    file, bundle = path / "config.json", Bundle(path.name, path.parent.name)
    try:
        written_s = file.stat().st_mtime
        bundle = replace(bundle, spec=msgspec.json.decode(file.read_bytes(), type=Spec))
        return replace(bundle, pid=int((path / "init.pid").read_text()))
    except FileNotFoundError as error:
        # Files have the time of day: where that was set back, a spec of tomorrow must not count as young for a day.
        if not file.exists():
            return None
        if abs(time.time() - written_s) < STARTING_S:
            return bundle if starting else None
        return replace(bundle, fault=f"its runtime wrote no {error.filename}: it may run in a virtual machine")
    except OSError as error:
        return replace(bundle, fault=f"{error.filename} cannot be read: {cause_of(error)}")
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        return replace(bundle, fault=f"its bundle {path} cannot be understood: {error}")
