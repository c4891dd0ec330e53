"""A look at the containers of this node, and at the processes that have NVIDIA's nodes open.

It reads what strangers wrote and takes a while on a full node, so it runs in a child process, which can be ended:

    python -I -m nri_gpu.observe.look < WISH

The wish is JSON, a `Wish`. It prints a line of JSON for each thing it sees, a `looks.Line`. Of all that it reads it
prints no more than these have fields for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.errors import UnseenError
from nri_gpu.observe.bundles import Found, found_containers
from nri_gpu.observe.container_seen import Numbers, seen_container
from nri_gpu.observe.looks import Line, Unseen
from nri_gpu.stray.process_scan import NICE, scan
from nri_gpu.system.proc import has_hosts_pids, name_process
from nri_gpu.verify.in_kernel import DeviceFilter, Kernel

RULES: Final = "rules"  # as of `Unseen.what`
_NEEDS: Final = "reading them needs root on the host, and in a pod a privileged one (chart: observe.nvml=true)"


class Wish(Struct, frozen=True, kw_only=True):
    """The things to look at.

    owner: a process that is left out with all its children. majors, numbers: NVIDIA's, as of `Numbers`.
    states: state folders of containerds beside the usual ones. root: the host's /, for its folders.
    """

    owner: int
    majors: tuple[int, ...] = ()
    numbers: tuple[DeviceNumber, ...] = ()
    states: tuple[str, ...] = ()
    processes: bool = True
    root: str = "/"


class _Rules:
    """The kernel's device rules of containers. denied: the first that may not be read, or empty."""

    def __init__(self, numbers: Numbers) -> None:
        self.denied = ""
        self._numbers = numbers
        self._opened: dict[DeviceFilter, tuple[DeviceNumber, ...]] = {}  # most containers' rules are alike
        self._kernel: Kernel | None = None
        with suppress(UnseenError):
            self._kernel = Kernel()

    def opens(self, found: Found) -> tuple[tuple[DeviceNumber, ...] | None, str]:
        """Return the numbers that the kernel lets a container open, or None, and why they were not seen."""
        if not found.bundle.pid or self._kernel is None:
            return None, ""
        try:
            rules = self._kernel.device_filter(found.bundle.pid, found.bundle.id)
            if rules not in self._opened:
                self._opened[rules] = tuple(number for number in self._numbers.known if rules.opens(number))
            return self._opened[rules], ""
        except UnseenError as error:
            if error.denied:
                self.denied = self.denied or str(error)
            return None, str(error)


def main() -> int:
    """Look once."""
    wish = msgspec.json.decode(sys.stdin.buffer.read(), type=Wish)
    with suppress(OSError):  # a hardened unit may not
        os.nice(NICE)
    for line in look(wish):
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    return 0


def look(wish: Wish) -> Iterator[Line]:
    """Yield all that there is to see."""
    numbers = Numbers(wish.majors, wish.numbers)
    rules = _Rules(numbers)
    found, unseen = found_containers(wish.states, Path(wish.root))
    for each in found:
        opens, fault = rules.opens(each)
        if fault and _is_gone(each.bundle.pid):
            continue
        if seen := seen_container(each, opens, fault, numbers):
            yield seen
    yield from unseen
    if rules.denied:
        yield Unseen(RULES, f"the kernel's device rules of containers: {rules.denied}; {_NEEDS}")
    if wish.processes:
        yield from scan(wish.owner, numbers.majors)


def _is_gone(pid: int) -> bool:
    """Return whether a process of the host has ended. /proc hides some where it is mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return has_hosts_pids()
    except PermissionError:
        pass
    return False


if __name__ == "__main__":
    name_process("look")
    sys.exit(main())
