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
from msgspec.structs import replace

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.errors import UnseenError
from nri_gpu.domain.fair_share import fair_share
from nri_gpu.observe.bundles import FoundContainer, found_containers
from nri_gpu.observe.container_seen import Numbers, seen_container
from nri_gpu.observe.looks import USES_MAX, Line, Unseen
from nri_gpu.stray.process_scan import NICE, scan
from nri_gpu.stray.uses import CLOSED_MAX, Extent, Use
from nri_gpu.system.cgroups import DEVICES, cgroups_of
from nri_gpu.system.proc import has_hosts_pids, name_process
from nri_gpu.verify.in_kernel import DeviceFilter, Kernel, UnmountedError

RULES: Final = "rules"  # as of `Unseen.what`
PROCESSES: Final = "processes"  # likewise
USES_BYTES_MAX: Final = 1 << 20  # of all of them as they are printed: the path of each may have a thousand
_NEEDS: Final = "`nri-gpu verify` by root on the host reads them, as a privileged pod does (chart: observe.nvml=true)"


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
    """The kernel's device rules of containers."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._opened: dict[DeviceFilter, tuple[DeviceNumber, ...]] = {}  # most containers' rules are alike
        self._faults = list[UnseenError]()
        self._kernel: Kernel | None = None
        with suppress(UnseenError):
            self._kernel, self._legacy = Kernel(), Kernel(programs=lambda _: ())

    def opens(self, found: FoundContainer) -> tuple[DeviceNumber, ...] | None:
        """Return the numbers that the kernel lets a container open, or None without a process. Raises: UnseenError."""
        if not found.bundle.pid or self._kernel is None:
            return None
        rules = self._filter(self._kernel, found.bundle.pid, found.bundle.id)
        if rules not in self._opened:
            self._opened[rules] = tuple(number for number in self._numbers.known if rules.opens(number))
        return self._opened[rules]

    def keep(self, fault: UnseenError) -> str:
        """Keep why the rules of a container are not seen, and return it."""
        self._faults.append(fault)
        return str(fault)

    def unseen(self) -> Iterator[Unseen]:
        """Yield why rules cannot be read here, once for all containers."""
        faults = [each for each in self._faults if each.denied or isinstance(each, UnmountedError)]
        for fault in faults[:1]:
            yield Unseen(RULES, f"the kernel's device rules of containers: {fault}; {_NEEDS}")

    def _filter(self, kernel: Kernel, pid: int, id_: str) -> DeviceFilter:
        """Return a container's filter: where v2's programs are denied, v1's list, if it is the container's own.

        Raises: UnseenError.
        """
        try:
            return kernel.device_filter(pid, id_)
        except UnseenError as error:
            if error.denied and id_ in cgroups_of(pid).get(DEVICES, ""):
                return self._legacy.device_filter(pid, id_)
            raise


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
        opens, fault = None, ""
        try:
            opens = rules.opens(each)
        except UnseenError as error:
            if _is_gone(each.bundle.pid):
                continue
            fault = rules.keep(error)
        if seen := seen_container(each, opens, fault, numbers):
            yield seen
    yield from unseen
    yield from rules.unseen()
    if wish.processes:
        yield from bounded(scan(wish.owner, numbers.majors))


def bounded(found: Iterator[Use | Extent]) -> Iterator[Line]:
    """Yield the processes that fit, and count the rest. What is not known of these is not known of their cgroups."""
    *uses, extent = found
    assert isinstance(extent, Extent)
    users = [use for use in uses if isinstance(use, Use)]
    kept = fair_share(users, lambda use: use.cgroups, USES_BYTES_MAX, _size)
    yield from kept
    if left := {*users}.difference(kept):
        yield Unseen(PROCESSES, f"{len(left)} more processes that have a node open")
        cut = {*extent.closed_in}.union(*(use.cgroups for use in left))
        extent = replace(extent, closed_in=tuple(sorted(cut)[:CLOSED_MAX]))
    yield extent


def _size(use: Use) -> int:
    return max(USES_BYTES_MAX // USES_MAX, len(msgspec.json.encode(use)))


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
