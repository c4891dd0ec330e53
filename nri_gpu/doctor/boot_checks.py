"""The order at boot: nri-gpu and its guard start between runtime and kubelet, where systemd can do that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from nri_gpu.doctor.cdi_checks import KUBELETS
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.kubelet_checks import kubelet_unit
from nri_gpu.doctor.programs import UNIT_FOLDERS, is_enabled, running
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.finding import Finding, error, ok, warning
from nri_gpu.domain.text import listed
from nri_gpu.system.storage import text_of

_SUBJECT: Final = "order at boot"
_UNITS: Final = ("nri-gpu.service", "nri-gpu-guard.service")
_UNIT_MAX: Final = 1 << 16  # bytes


def boot_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Check the units that are enabled, on a node with a kubelet."""
    ours = [unit for unit in _UNITS if is_enabled(seen, unit)]
    if not ours or runtime is None or not any(running(seen.at("/proc"), KUBELETS)):
        return
    kubelet = f"{kubelet_unit(seen, runtime)}.service"
    before = [
        unit for unit in ours if kubelet in _named(seen, unit, "Before") or unit in _named(seen, kubelet, "After")
    ]
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
            f"{kubelet} waits for {listed(before)}, and nri-gpu for the runtime in {kubelet}: at each boot it "
            "starts only after JobRunningTimeoutSec=, 60 s",
            f"systemctl cat {' '.join(before)} {kubelet}    # remove Before={kubelet}, or After= of these in the last",
            "systemctl daemon-reload",
        )
    return ok(
        _SUBJECT,
        f"{kubelet} runs both runtime and kubelet, so systemd cannot start nri-gpu between them: what starts first at "
        "boot is held by the CDI device that the kubelet's allocations require, and else reported by the guard, or "
        "stopped with guard.stop_ungranted; drain the node before a reboot",
    )


def _named(seen: Examined, unit: str, order: str) -> set[str]:
    """Return the units that a unit's file and its drop-ins name. order: Before or After. Source: systemd.unit(5)."""
    etc, *packages = UNIT_FOLDERS
    folders = [seen.at(folder) for folder in (etc, "/run/systemd/system", *packages)]
    own = [folder / unit for folder in folders if (folder / unit).exists()][:1]
    # A drop-in hides one of the same name in a later folder.
    drop_ins = {path.name: path for folder in reversed(folders) for path in (folder / f"{unit}.d").glob("*.conf")}
    texts = ((text_of(path, _UNIT_MAX) or "").replace("\\\n", " ") for path in (*own, *drop_ins.values()))
    lines = re.compile(rf"^[ \t]*{order}[ \t]*=(.*)$", re.MULTILINE)
    return {word for text in texts for line in lines.findall(text) for word in line.split()}
