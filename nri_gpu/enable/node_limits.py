"""The reasons why a node cannot have a feature, or must not have systemd reloaded now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_gpu.blockers.blocker import BlockerKind
from nri_gpu.blockers.driver_users import blockers
from nri_gpu.blockers.node_users import look_at_users
from nri_gpu.doctor.cdi_checks import KUBELETS
from nri_gpu.doctor.driver_checks import link_findings
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import is_installed, running
from nri_gpu.domain.errors import CommandError, Exit, InventoryError
from nri_gpu.domain.finding import Finding
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.domain.text import listed
from nri_gpu.enable.features import Feature
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.system.storage import below

# Units of kubelets that are installed and do not run yet.
_KUBELET_UNITS: Final = (
    *("kubelet", "k3s", "k3s-agent", "rke2-server", "rke2-agent", "k0sworker", "k0scontroller"),
    *("snap.microk8s.daemon-kubelite", "snap.k8s.kubelet"),
)
_CONTAINERS: Final = (BlockerKind.POD, BlockerKind.STATIC_POD, BlockerKind.CONTAINER)


def require_service(feature: Feature, name: str, root: Path) -> str:
    """Return the service that the feature belongs to. Raises: CommandError, if the node cannot have the feature."""
    seen = Examined(root=root)
    kubelet = any(running(seen.at("/proc"), KUBELETS)) or any(
        is_installed(seen, f"{unit}.service") for unit in _KUBELET_UNITS
    )
    if feature.needs_kubelet and not kubelet:
        sentence = f"{name} is for a kubelet, and this node has none: install it first"
        raise CommandError(Exit.UNAVAILABLE, sentence)
    found = next((each for each in feature.services if is_installed(seen, each)), "")
    if feature.drop_in and not found:
        sentence = f"{name} is for {' or '.join(feature.services)}, which is not installed: install nri-gpu first"
        raise CommandError(Exit.UNAVAILABLE, sentence)
    return found


async def require_safe_reload(root: Path) -> None:
    """Look for containers that a reload of systemd would take devices from. Raises: CommandError, naming them."""
    seen = Examined(root=root)
    finding = next(link_findings(seen), None)
    if finding is None:
        return
    folders = HostFolders(proc=seen.at("/proc"), sys=seen.at("/sys"), dev=seen.at("/dev"), host=root)
    try:
        look = await look_at_users(folders, below(root, DEFAULT_STATE))
    except InventoryError as error:
        raise CommandError(Exit.UNAVAILABLE, f"{error}: nothing was changed") from None
    keeping, _ = blockers(look.users)
    at_risk = [each.name for each in keeping if each.kind in _CONTAINERS]
    if at_risk or look.unseen:
        raise CommandError(Exit.FINDING, _refusal(finding, at_risk, look.unseen))


def _refusal(finding: Finding, at_risk: list[str], hidden: tuple[str, ...]) -> str:
    who = f"containers that have GPUs now: {listed(at_risk)}" if at_risk else f"not seen: {listed(hidden)}"
    return f"{finding.meaning} ({who}): run `nri-gpu prepare` first, or leave --now out; nothing was changed"


def kubeconfig_note(name: str, root: Path) -> Iterator[str]:
    """Say what the DRA driver's unit reads, where that is not there."""
    config = "/etc/kubernetes/kubelet.conf"
    if name == "dra" and not below(root, config).exists():
        yield f"nri-gpu-dra.service reads {config}, which is not there: name the kubelet's in a drop-in (docs/dra.md)"
