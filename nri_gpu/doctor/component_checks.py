"""The checks of other components that give GPUs to containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nri_gpu.doctor.cdi_checks import DOCKER, docker_settings
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.finding import Finding, error, ok, warning
from nri_gpu.host.components import OTHERS, components, node_advice
from nri_gpu.policy.model import Disarm


def other_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Check NVIDIA's runtime, hooks, device plugins and DRA driver, and CDI specifications with hooks."""
    advice = node_advice(seen.policy, seen.root)
    yield from advice
    default = runtime.default_handler if runtime and "nvidia" in runtime.default_handler else ""
    if runtime and default and seen.policy.environment.disarm is not Disarm.ALL:
        yield error(
            "default runtime",
            f"{default} is the default runtime of {runtime.name}: any image that sets NVIDIA_VISIBLE_DEVICES gets "
            "GPUs, past nri-gpu and its policy",
            *_runc(runtime),
        )
    yield from _docker(seen)
    found = tuple(components(seen.root, seen.policy.kubelet.dir, str(Path(seen.policy.kubelet.registry_dir).parent)))
    if not advice and not default:
        yield ok(OTHERS, "no other component that assigns GPUs to containers" if not found else "provided for")


def _runc(runtime: ContainerRuntime) -> tuple[str, ...]:
    if runtime.containerd is None:
        return runtime.edit("runtime", "below [crio.runtime]", 'default_runtime = "crun"')
    return runtime.edit("cri.containerd", "below the CRI plugin's [containerd] table", 'default_runtime_name = "runc"')


def _docker(seen: Examined) -> Iterator[Finding]:
    """Check Docker's default runtime, which Docker's containers alone use: they never come to NRI."""
    settings = docker_settings(seen)
    if settings and "nvidia" in settings.default_runtime:
        yield warning(
            "Docker",
            f"{DOCKER} makes {settings.default_runtime} Docker's default runtime: any image that sets "
            "NVIDIA_VISIBLE_DEVICES gets GPUs there, and nri-gpu does not see it",
            f"# in {DOCKER}, remove the line:",
            f'"default-runtime": "{settings.default_runtime}"',
            "systemctl reload docker    # then give GPUs by `nri-gpu cdi generate` and --device",
        )
