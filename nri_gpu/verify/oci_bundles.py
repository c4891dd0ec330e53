"""The containers of a node, by the OCI bundles that containerd keeps for those that run: what its runtime was told.

A bundle is the folder STATE/io.containerd.runtime.v2.task/NAMESPACE/ID, with `config.json` and `init.pid`. It has what
CRI would answer, of Docker's containers too, and needs no gRPC. Source: containerd docs/ops.md, core/runtime/v2.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.json import Decoder
from msgspec.structs import replace

from nri_gpu.domain.errors import UnseenError, cause_of
from nri_gpu.domain.text import shown
from nri_gpu.system.untrusted_files import folders_in, names_in, opened_folder, read_in
from nri_gpu.verify.oci_spec import Spec, spec_decoder

TASKS: Final = "io.containerd.runtime.v2.task"
CONFIG: Final = "config.json"
SPEC_MAX: Final = 16 << 20  # bytes
PID_BYTES_MAX: Final = 32
PID_LIMIT: Final = 1 << 22  # Linux: include/linux/threads.h, PID_MAX_LIMIT
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
MANAGER, CRIO = "io.container.manager", "cri-o"  # an annotation, and its value on all containers of CRI-O
_BY_CRIO: Final = {  # its keys for containerd's; of labels the kubelet's. CRI-O: internal/factory/container
    "container-type": "io.kubernetes.cri-o.ContainerType",
    "container-name": "io.kubernetes.container.name",
    "sandbox-id": "io.kubernetes.cri-o.SandboxID",
    "sandbox-name": "io.kubernetes.pod.name",
    "sandbox-namespace": "io.kubernetes.pod.namespace",
    "sandbox-uid": "io.kubernetes.pod.uid",
}


class Bundle(Struct, frozen=True):
    """A container that runs. pid: its first process on the host. fault: why spec or pid are missing; a clause."""

    id: str
    namespace: str
    spec: Spec = Spec()
    pid: int = 0
    fault: str = ""
    written_s: float = 0.0  # when its spec was, seconds since the epoch

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
        annotations = self.spec.annotations or {}
        return annotations.get(_BY_CRIO[key] if annotations.get(MANAGER) == CRIO else f"{_CRI}{key}", "")


def read_bundles(
    states: Iterable[Path], *, starting: bool = False, variables: Set[str] = frozenset()
) -> tuple[Bundle, ...]:
    """Return all containers that run, of each containerd with a state folder of these.

    starting: also those that have no process yet, with pid 0. variables: of the environment, that are kept.

    Raises: UnseenError: none of the folders has containers' bundles, or they may not be listed.
    """
    given, decoder = tuple(states), spec_decoder(variables)
    found = [
        bundles for state in given if (bundles := _read_tasks(state / TASKS, decoder, starting=starting)) is not None
    ]
    if not found:
        raise UnseenError(
            f"no containerd keeps containers below {', '.join(map(str, given))}: name the folder that `containerd "
            "config dump` shows as `state` with --containerd-state"
        )
    return tuple(bundle for bundles in found for bundle in bundles)


def _read_tasks(path: Path, decoder: Decoder[Spec], *, starting: bool) -> list[Bundle] | None:
    """Return the containers of one containerd, or None if it has no such folder. Raises: UnseenError."""
    try:
        with opened_folder(path) as tasks:
            read = (
                _read(Bundle(name, namespace), folder, decoder, starting=starting)
                for namespace, folder in folders_in(tasks)
                for name in names_in(folder)
            )
            return [bundle for bundle in read if bundle]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnseenError(f"{path} cannot be listed: {cause_of(error)}; be root", error) from error


def _read(bundle: Bundle, above: int, decoder: Decoder[Spec], *, starting: bool) -> Bundle | None:
    """Read a bundle. Return None if the container does not run yet, unless starting ones are wanted, or no more."""
    try:
        with opened_folder(bundle.id, above) as folder:
            bundle = with_spec(bundle, folder, decoder)
            with suppress(FileNotFoundError):
                return replace(bundle, pid=read_pid(folder, "init.pid"))
            os.stat(CONFIG, dir_fd=folder)  # the whole bundle may be gone by now
    except FileNotFoundError:
        return None
    except OSError as error:
        return replace(bundle, fault=f"its {error.filename} cannot be read: {cause_of(error)}")
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        return replace(bundle, fault=f"its bundle cannot be understood: {error}")
    # Files have the time of day: where that was set back, a spec of tomorrow must not count as young for a day.
    if abs(time.time() - bundle.written_s) < STARTING_S:
        return bundle if starting else None
    return replace(bundle, fault="its runtime wrote no init.pid: it may run in a virtual machine")


def with_spec(bundle: Bundle, folder: int, decoder: Decoder[Spec]) -> Bundle:
    """Add the spec that lies in a folder. Raises: OSError, ValueError, RecursionError."""
    content, written_s = read_in(folder, CONFIG, SPEC_MAX)
    return replace(bundle, spec=decoder.decode(content), written_s=written_s)


def read_pid(folder: int, name: str) -> int:
    """Return the number in a file. Raises: OSError, ValueError."""
    text = read_in(folder, name, PID_BYTES_MAX)[0].strip()
    if not text.isdigit() or int(text) > PID_LIMIT:
        raise ValueError(f"{name} names no process")
    return int(text)
