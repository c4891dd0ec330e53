"""Users of GPUs that are no finding by default: NVIDIA's own pods and programs, and display servers. Pure."""

from __future__ import annotations

from typing import Final

from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import Policy

# Namespaces of GPU Operator: of its Helm chart, of OpenShift's catalogue, and before version 1.9.
_OPERATOR: Final = ("gpu-operator", "nvidia-gpu-operator", "gpu-operator-resources")
# GPU Operator: assets/*/*daemonset.yaml, manifests/*; all of its operands are privileged, and many open GPUs.
_OPERANDS: Final = ("nvidia-*", "gpu-feature-discovery-*")
USUAL_PODS: Final = (
    *(f"{namespace}/{operand}" for namespace in _OPERATOR for operand in _OPERANDS),
    # NVIDIA's device plugin and DRA driver by charts or manifests of their own.
    "kube-system/nvidia-device-plugin-*",
    "nvidia-device-plugin/*nvidia-device-plugin-*",
    "nvidia-dra-driver-gpu/nvidia-dra-driver-gpu-*",
    "dra-driver-nvidia-gpu/dra-driver-nvidia-gpu-*",
)
# Programs of the host by path. The policy's default for stray.exceptions has persistenced, fabric manager and DCGM.
USUAL_PROGRAMS: Final = (
    *("/usr/lib/xorg/Xorg", "/usr/libexec/Xorg", "/usr/bin/Xorg", "/usr/bin/Xwayland"),
    *("/usr/bin/gnome-shell", "/usr/bin/kwin_wayland", "/usr/bin/kwin_x11", "/usr/bin/plasmashell"),
    *("/usr/bin/mutter", "/usr/bin/sway", "/usr/bin/weston"),
    *("/usr/bin/nvidia-cuda-mps-control", "/usr/bin/nvidia-cuda-mps-server", "/usr/bin/nvidia-imex"),
    *("/usr/bin/nvidia-smi", "/usr/bin/nvlsm"),
)


def quiet_patterns(policy: Policy) -> Globs:
    """Return the pods, programs and cgroups that may use GPUs which nobody gave them: the usual ones and policy's."""
    policys = (*policy.foreign.monitors.patterns, *policy.stray.exceptions.patterns)
    return Globs(tuple(dict.fromkeys((*USUAL_PODS, *USUAL_PROGRAMS, *policys))))
