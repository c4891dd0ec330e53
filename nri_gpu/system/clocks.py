"""The clocks and their counts. Nothing that decides reads the time of day, which may be set: it is shown and logged.

CLOCK_MONOTONIC (`time.monotonic`): graces of ledger and journal, how long a process has been silent, pauses. An hour in
which the machine is suspended does not count, because nothing ran in it.
CLOCK_BOOTTIME (`since_boot_s`): the age of the inventory and health's hold-downs. That hour counts, because the node
may have changed after it.

Both begin at the boot and are the same for every process of a node, so files of one boot carry them. A value that must
not be taken over from an earlier boot carries the boot's id (`storage.boot_id`).
"""

from __future__ import annotations

import time


def since_boot_s() -> float:
    """Return the seconds since the machine was booted, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
