"""Findings on what keeps the driver process from working, for `status`, `check` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from nri_gpu.domain.finding import Finding, warning
from nri_gpu.domain.text import counted
from nri_gpu.dra.questions import DriverReport

SUBJECT: Final = "DRA driver"
LOOK: Final = (
    "systemctl restart nri-gpu-dra; journalctl -u nri-gpu-dra -e    # or in a cluster the chart's pods:",
    "kubectl logs --all-namespaces --prefix -l app.kubernetes.io/component=dra",
)
SILENT_S: Final = 60.0  # a driver process that runs asks every 20 s
# By the feature gate that keeps what is published; all are beta in Kubernetes 1.36.
_WITHOUT: Final[Mapping[str, str]] = {
    "DRADeviceTaints": "unhealthy GPUs and GPUs held outside claims leave the ResourceSlices instead of being tainted",
    "DRAConsumableCapacity": "dra.replicas has no effect: each claim has a GPU of its own",
    "DRAPartitionableDevices": "MIG devices are published without the counters of their GPU",
}


def silence(asked_s: float | None, silent_s: float | None) -> str:
    """Return why the driver process seems not to run; empty if it asked lately. asked_s, silent_s: of `DraStatus`."""
    lasting_s = silent_s or 0.0  # a daemon of an earlier version does not say it
    if asked_s is not None and lasting_s <= SILENT_S:
        return ""
    since = "since the daemon began" if asked_s is None else f"for {lasting_s:.0f} s"
    return (
        f"`nri-gpu dra` has not asked the daemon {since}: pods with new ResourceClaims do not start, and its "
        "ResourceSlices are not kept"
    )


def files_advice(report: DriverReport) -> Iterator[Finding]:
    """Warn where something on the node removes what containers with claims need to start."""
    if report.restored:
        yield warning(
            SUBJECT,
            "CDI specifications of prepared claims were removed or changed by something on this node "
            f"{counted(report.restored, 'time')}, and written again; until then their containers could not start: find "
            "what cleans kubelet.cdi_dir",
            *LOOK,
        )


def gate_advice(report: DriverReport) -> Iterator[Finding]:
    """Warn of each feature gate that the API server lacks."""
    for gate in report.missing:
        yield warning(
            SUBJECT,
            f"the API server lacks the feature gate {gate}: {_WITHOUT.get(gate, 'what needs it is not published')}; "
            f"enable it for kube-apiserver, kube-scheduler and kube-controller-manager (--feature-gates={gate}=true)",
            "kubectl get --raw /metrics | grep kubernetes_feature_enabled",
        )
