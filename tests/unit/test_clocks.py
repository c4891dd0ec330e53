"""Who reads which clock: nothing that decides reads the time of day, and few count hours that were slept through."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import nri_gpu

PACKAGE: Final = Path(nri_gpu.__file__).parent
SHOWN: Final = {
    "cli/doctor_command.py": "says that a clock is before 2020, how long ago, and the bundle's name",
    "cli/status_command.py": "how long ago",
    "cli/watch.py": "when something changed",
    "cli/kept_record.py": "which days are asked for",
    "cordon/cordon_controller.py": "when root took a GPU out of use",
    "daemon/app.py": "the audit's records",
    "daemon/connection_report.py": "since when",
    "dra/dra_controller.py": "when the driver process asked",
    "dra/device_health.py": "for the kubelet",
    "dra/node_events.py": "when",
    "health/health_controller.py": "when a state began, beside CLOCK_BOOTTIME",
    "inventory/inventory_controller.py": "when the node changed",
    "kubelet/registered_socket.py": "since when",
    "mps/mps_daemon.py": "since when a process cannot be killed",
    "observe/observe_process.py": "since when",
    "observe/observed_xids.py": "when an XID came",
    "observe/observer.py": "when it looked, beside CLOCK_MONOTONIC",
    "plugin/decision_log.py": "when",
    "records/usage_lines.py": "which days, beside CLOCK_MONOTONIC",
    "stray/stray_controller.py": "since when, beside CLOCK_MONOTONIC",
    "system/child.py": "since when a process cannot be killed, beside CLOCK_MONOTONIC",
    "verify/oci_bundles.py": "whether a bundle was just written: files have no other clock",
}

COUNT_SUSPENDED: Final = {
    "cli/gpus_command.py": "the inventory's age",
    "health/health_controller.py": "hold-downs",
    "inventory/nvml_child.py": "the inventory's age",
    "inventory/inventory_controller.py": "the inventory's age",
    "inventory/nvml_source.py": "the inventory's age",
    "inventory/topology_file.py": "the inventory's age",
    "observe/observed_source.py": "the inventory's age",
    "system/liveness.py": "as in /proc/uptime, by which probes count",
}


def reads(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Name):
            yield node.id


def readers(*clocks: str) -> set[str]:
    """The modules that read one of them."""
    files = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}
    return {name for name, file in files.items() if set(clocks).intersection(reads(file))}


def test_the_time_of_day_is_only_shown() -> None:
    assert readers("time.time", "time.time_ns", "datetime.now", "time.CLOCK_REALTIME") == SHOWN.keys()


def test_a_suspended_hour_counts_for_no_grace_of_ledger_and_journal() -> None:
    assert readers("since_boot_s") == COUNT_SUSPENDED.keys()
    assert readers("time.CLOCK_BOOTTIME") == {"system/clocks.py"}
