"""The order at boot: nri-gpu and its guard start between runtime and kubelet, where systemd can do that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from nri_gpu.doctor.cdi_checks import KUBELETS
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.processes import UNIT_FOLDERS, is_enabled, running, unit_of
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.finding import Finding, error, ok, warning
from nri_gpu.domain.text import listed
from nri_gpu.system.storage import text_of

_SUBJECT: Final = "order at boot"
_UNITS: Final = ("nri-gpu.service", "nri-gpu-guard.service")
_BEFORE: Final = re.compile(r"^Before=(.*)$", re.MULTILINE)
_UNIT_MAX: Final = 1 << 16  # bytes


def boot_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Check the units that are enabled, on a node with a kubelet."""
    ours = [unit for unit in _UNITS if is_enabled(seen, unit)]
    process = next(running(seen.at("/proc"), KUBELETS), None)
    if not ours or process is None or runtime is None:
        return
    distribution = runtime.distribution
    usual = (distribution.kubelet or runtime.service) if distribution else "kubelet"
    kubelet = f"{unit_of(seen, process, (usual,))}.service"
    before = [unit for unit in ours if kubelet in _before(seen, unit)]
    late = [unit for unit in ours if unit not in before]
    if kubelet == f"{runtime.service}.service":
        yield _in_one_unit(kubelet, before)
    elif late:
        yield warning(
            _SUBJECT,
            f"{kubelet} does not wait for {listed(late)}: pods that it starts earlier at boot start without their GPUs",
            *(f"# in /etc/systemd/system/{unit}.d/order.conf:" for unit in late),
            "[Unit]",
            f"After={runtime.service}.service",
            f"Before={kubelet}",
            "systemctl daemon-reload",
        )
    else:
        yield ok(_SUBJECT, f"{kubelet} waits for {listed(ours)}")


def _in_one_unit(kubelet: str, before: list[str]) -> Finding:
    """Return the finding where runtime and kubelet are one unit: whoever waits for the runtime cannot precede it."""
    if before:
        return error(
            _SUBJECT,
            f"{listed(before)} has Before={kubelet}, and waits for the runtime that runs in it: at each boot it starts "
            "only after JobRunningTimeoutSec=, 60 s",
            f"grep -l {kubelet} {' '.join(f'/etc/systemd/system/{unit}.d/*' for unit in before)}    # remove Before=",
            "systemctl daemon-reload",
        )
    return ok(
        _SUBJECT,
        f"{kubelet} runs both runtime and kubelet, so systemd cannot start nri-gpu between them: what starts first at "
        "boot is held by the CDI device that the kubelet's allocations require, and else reported by the guard, or "
        "stopped with guard.stop_ungranted; drain the node before a reboot",
    )


def _before(seen: Examined, unit: str) -> set[str]:
    """Return the units that a unit's file and its drop-ins name in Before=."""
    folders = [seen.at(folder) for folder in (*UNIT_FOLDERS, "/run/systemd/system")]
    own = [folder / unit for folder in folders if (folder / unit).exists()][:1]
    files = [*own, *(path for folder in folders for path in sorted((folder / f"{unit}.d").glob("*.conf")))]
    return {word for path in files for line in _BEFORE.findall(text_of(path, _UNIT_MAX) or "") for word in line.split()}
