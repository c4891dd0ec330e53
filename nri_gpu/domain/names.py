"""Names that several packages share: annotation keys, the state folder and its files, NVIDIA's CDI devices."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# Annotation keys. A pod asks by the first three; the last two stand on containers and are written by nri-gpu alone.
BASE_KEY: Final = "gpu.nri.io"
KEY_PREFIX: Final = f"{BASE_KEY}/"
POD_KEY: Final = f"{KEY_PREFIX}pod"
CONTAINER_PREFIX: Final = f"{KEY_PREFIX}container."  # and the container's name
GRANT_KEY: Final = f"{KEY_PREFIX}grant"  # the signed grant
KUBELET_KEY: Final = f"{KEY_PREFIX}kubelet"  # what the kubelet allocated; `.` and the resource follow

# Annotations that containerd sets on a container which it restores from a checkpoint, over those of the checkpoint
# (internal/cri/server/container_checkpoint_linux.go).
RESTORED_KEY: Final = "restored"
CHECKPOINTED_KEY: Final = "checkpointedAt"

# Begins the variables by which a container shows its devices of a ResourceClaim; the claim's UID follows.
MARKER_PREFIX: Final = "NRI_GPU_CLAIM_"

POLICY_FILE: Final = "/etc/nri-gpu/policy.toml"  # unless an option names another file
DEFAULT_STATE: Final = Path("/run/nri-gpu")
DEFAULT_OBSERVE: Final = Path("/run/nri-gpu-observe")  # the observer's run folder
CONTROL_SOCKET: Final = "control.sock"
LEDGER: Final = "ledger.json"
# In the sentence about a library that is in none of the driver's folders; the folders stand between these two.
NOT_FOUND: Final = "libnvidia-ml.so.1 was not found"
SOUGHT, INSTALL = "searched below the driver root in ", "; install the driver"
# Programs that NVIDIA's runtimes and CDI specifications have run as hooks.
NVIDIA_HOOKS: Final = frozenset({"nvidia-cdi-hook", "nvidia-ctk", "nvidia-container-runtime-hook"})


def is_nvidia_device(cdi_name: str) -> bool:
    """Return whether a CDI device is of NVIDIA, of its device plugin or of its DRA drivers: these vendors end alike.

    They are `nvidia.com`, `k8s.device-plugin.nvidia.com`, `k8s.gpu.nvidia.com` and so on.
    """
    return f".{cdi_name.partition('/')[0]}".endswith(".nvidia.com")
