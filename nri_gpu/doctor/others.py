"""Other components that give GPUs to containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nri_gpu.doctor.finding import DoctorFinding, Examined, error, ok, policy_lines, warning
from nri_gpu.doctor.runtime import ContainerRuntime
from nri_gpu.host.advice import components, node_advice
from nri_gpu.policy.model import Disarm


def other_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[DoctorFinding]:
    """NVIDIA's runtime, hooks, device plugins and DRA driver, and CDI specifications with hooks."""
    advice = node_advice(seen.policy, seen.root)
    for sentence in advice:
        yield warning("other injectors", sentence, *policy_lines(sentence))
    default = runtime.default_handler if runtime and "nvidia" in runtime.default_handler else ""
    disarmed = seen.policy.environment.disarm is Disarm.ALL
    if runtime and default and not disarmed:
        yield error(
            "default runtime",
            f"{default} is the default runtime of {runtime.name}: any image that sets NVIDIA_VISIBLE_DEVICES gets "
            "GPUs, past nri-gpu and its policy",
            *_runc(runtime),
            f"systemctl restart {runtime.name}    # containers go on running",
        )
    found = tuple(components(seen.root, seen.policy.kubelet.dir, str(Path(seen.policy.kubelet.registry_dir).parent)))
    if not advice and not default:
        yield ok("other injectors", "no other component that gives GPUs to containers" if not found else "provided for")


def _runc(runtime: ContainerRuntime) -> tuple[str, str]:
    if runtime.containerd is None:
        return f"# in {runtime.config}, below [crio.runtime]:", 'default_runtime = "crun"'
    return f"# in {runtime.config}, below the CRI plugin's [containerd] table:", 'default_runtime_name = "runc"'
