"""The look at this node as the observer asks for it: of a child, within a time, and whatever is on the node."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.errors import NriGpuError, fault_of
from nri_gpu.domain.node import Inventory
from nri_gpu.injection.device_numbers import device_numbers
from nri_gpu.observe.looks import Line, NodeLook, SeenContainer, Unseen
from nri_gpu.observe.runtime_table import DOCKER, PODMAN
from nri_gpu.stray.uses import Extent, Use
from nri_gpu.system.child import python, run

LOOK_LIMIT_S: Final = 20.0
PROCESSES: Final = "processes"  # as of `Unseen.what`
ALL: Final = "look"  # likewise: nothing was seen
HIDDEN: Final = (
    "the processes of the whole host: they are hidden from the observer. A pod needs hostPID, and /proc must be "
    "mounted without hidepid"
)
_NEEDS: Final = (
    "the observer needs the capabilities SYS_PTRACE and DAC_READ_SEARCH, and no AppArmor profile that forbids it"
)
_WHAT: Final = {True: "which processes have a node open", False: "containers and their devices"}  # by `processes`
_ROOTLESS: Final = "it is rootless: its processes alone tell of it"
# The scope of a rootless container, below the service of the user who runs it.
_OF_USER: Final = re.compile(r"/user@(\d+)\.service/(?:[^/]+/)*(libpod|docker)-([0-9a-f]{64})\.scope(?:/|$)")
_OR: Final = " or "
_RUNTIMES: Final = {"libpod": PODMAN, "docker": DOCKER}
_decoder: Final = msgspec.json.Decoder(Line)


class _LookError(NriGpuError):
    """A child that looks has failed. Says why, as a clause."""


async def look_at_node(
    inventory: Inventory,
    *,
    processes: bool = True,
    states: Iterable[str] = (),
    root: Path = Path("/"),
    limit_s: float = LOOK_LIMIT_S,
) -> NodeLook:
    """Look at containers, and at the processes that have NVIDIA's nodes open. What cannot be seen is said in the look.

    processes: without them a look costs little. states: state folders of containerds beside the usual ones. root: the
    host's /, for its folders.
    """
    at, majors = time.monotonic(), inventory.majors
    wish = {
        "owner": os.getpid(),
        "majors": [each for each in (majors.nvidia, majors.nvidia_uvm, majors.nvidia_caps) if each is not None],
        "numbers": [*device_numbers(inventory)],
        "states": [*states],
        "root": str(root),
    }
    unseen = list[Unseen]()
    for with_processes in (True, False) if processes else (False,):
        try:
            lines = await _lines({**wish, "processes": with_processes}, limit_s)
        except _LookError as error:  # a process that hangs in the kernel may hold a look back; bundles do not
            unseen.append(Unseen(PROCESSES if with_processes else ALL, f"{_WHAT[with_processes]}: {error}"))
        else:
            return look_of(at, lines, unseen)
    return NodeLook(at=at, unseen=tuple(unseen))


async def _lines(wish: dict[str, object], limit_s: float) -> list[Line]:
    """Return what a child sees. Raises: _LookError."""
    command = [python(), "-I", "-m", "nri_gpu.observe.look"]
    try:
        child = await run(command, limit_s, text=msgspec.json.encode(wish).decode())
    except TimeoutError as error:
        why = str(error) or f"a look took longer than {limit_s:.0f} s, and was stopped"
        raise _LookError(why) from None
    except OSError as error:
        raise _LookError(f"the process that looks cannot be started: {fault_of(error)}") from error
    if child.status:
        raise _LookError(f"the process that looks failed: {child.complaint or f'status {child.status}'}")
    return [_decoder.decode(line) for line in child.output.splitlines()]


def look_of(at: float, lines: Iterable[Line], before: Iterable[Unseen] = ()) -> NodeLook:
    """Return the look that a child's lines make. before: what could not be seen up to then."""
    found = tuple(lines)
    containers = [each for each in found if isinstance(each, SeenContainer)]
    uses = [each for each in found if isinstance(each, Use)]
    extent = next((each for each in found if isinstance(each, Extent)), None)
    unseen = [*before, *(each for each in found if isinstance(each, Unseen))]
    if extent and not extent.whole:
        unseen.append(Unseen(PROCESSES, HIDDEN))
    if extent and extent.closed:
        what = f"what {extent.closed} of {extent.processes} processes have open"
        unseen.append(Unseen(PROCESSES, f"{what}: {_NEEDS}"))
    if extent and extent.late:
        unseen.append(Unseen(PROCESSES, extent.unread))
    containers += rootless(uses, {each.id for each in containers})
    return NodeLook(at=at, containers=tuple(containers), uses=tuple(uses), extent=extent, unseen=tuple(unseen))


def rootless(uses: Iterable[Use], known: Set[ContainerId]) -> Iterator[SeenContainer]:
    """Yield users' own containers whose processes have a node open. known: containers that are no user's."""
    met = dict[ContainerId, SeenContainer]()
    for use in uses:
        for match in filter(None, map(_OF_USER.search, use.cgroups)):
            user, word, text = match.groups()
            id_ = ContainerId(text)
            first = met.get(id_)
            if first and user not in first.user.split(_OR):  # a user may give his cgroup the name of another's
                met[id_] = replace(first, user=f"{first.user}{_OR}{user}")
            elif not first and id_ not in known:
                met[id_] = SeenContainer(
                    id=id_, runtime=_RUNTIMES[word], name=id_[:12], user=user, pid=use.pid, fault=_ROOTLESS
                )
    yield from met.values()
