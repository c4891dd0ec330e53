"""What a client of MPS finds in its container: the daemon's pipes, its shared memory, and the limits it was given."""

from __future__ import annotations

from posixpath import normpath
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import Edits, Mount
from nri_gpu.domain.mps import CLIENT_VARIABLES, PIPE_PLACE, SHM_PLACE, Seat

# Clients write to both; noexec as the runtime's own /dev/shm.
_OPTIONS: Final = ("rbind", "rprivate", "rw", "nosuid", "nodev", "noexec")


class Client(Struct, frozen=True):
    """One container's place at a daemon. folder: the daemon's own on the host."""

    folder: str
    seat: Seat


def client_hindrance(container: Container) -> Reason | None:
    """What of the container's own would keep its programs from the daemon; they would run without it and not say so."""
    taken = {normpath(place) for place in container.mounts} & {PIPE_PLACE, SHM_PLACE}
    if taken:
        return Reason(
            Code.VOLUME_IN_THE_WAY,
            f"mode=mps mounts the daemon's own {' and '.join(sorted(taken))}, and the container has a volume there: "
            "move the volume, or ask in another mode.",
        )
    own = sorted(container.env.keys() & set(CLIENT_VARIABLES))
    if own:
        return Reason(
            Code.BAD_REQUEST,
            f"mode=mps sets {', '.join(own)}, which the image or the pod sets too: leave it out there, and write "
            "limits as sharing=memory:10Gi,threads:50.",
        )
    return None


def client_edits(client: Client) -> Edits:
    """The daemon's folders, and the environment of one seat."""
    return Edits.of(
        mounts=(
            Mount(PIPE_PLACE, f"{client.folder}/pipe", _OPTIONS),
            Mount(SHM_PLACE, f"{client.folder}/shm", _OPTIONS),
        ),
        env=client.seat.variables(),
    )
