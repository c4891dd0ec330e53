"""The daemon's pipes, its shared memory and the client's limits, as an MPS client gets them in its container."""

from __future__ import annotations

from posixpath import normpath
from typing import Final

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import Edits, Mount
from nri_gpu.domain.mps import CLIENT_VARIABLES, PIPE_FOLDER, PIPE_PLACE, SHM_FOLDER, SHM_PLACE, Seat

# noexec as the runtime's own /dev/shm.
_OPTIONS: Final = ("rbind", "rprivate", "nosuid", "nodev", "noexec")


def client_hindrance(container: Container) -> Reason | None:
    """Return what in the container keeps its programs from the daemon, or None.

    They would run without the daemon and not report that.
    """
    taken = {normpath(place) for place in container.mounts} & {PIPE_PLACE, SHM_PLACE}
    if taken:
        return Reason(
            Code.VOLUME_IN_THE_WAY,
            f"mode=mps mounts the daemon's own {' and '.join(sorted(taken))}, and the container has a volume there",
            cure="move the volume, or ask in another mode",
        )
    own = sorted(container.env.keys() & set(CLIENT_VARIABLES))
    if own:
        return Reason(
            Code.BAD_REQUEST,
            f"mode=mps sets {', '.join(own)}, which the image or the pod sets too",
            cure="leave it out there, and write limits as sharing=memory:10Gi,threads:50",
        )
    return None


def client_edits(seat: Seat) -> Edits:
    """Return the daemon's folders, and the environment of one client.

    A client only connects to a socket among the pipes, which a read-only mount allows; what it shares with the server
    goes through that socket or the shared memory.
    """
    return Edits.of(
        mounts=(
            Mount(PIPE_PLACE, f"{seat.folder}/{PIPE_FOLDER}", (*_OPTIONS, "ro")),
            Mount(SHM_PLACE, f"{seat.folder}/{SHM_FOLDER}", (*_OPTIONS, "rw")),
        ),
        env=seat.variables(),
    )
