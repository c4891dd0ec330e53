"""Settings of MPS: whether it may be asked for, what a container gets by default, and the most it may get."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.mps import WHOLE_PERCENT, MpsLimits, Seat
from nri_gpu.policy.forms import about

_CLIENTS_MAX: Final = 48  # of one GPU, by its hardware from Volta on
_MEMORY_MAX: Final = 2**30  # MiB
_PERCENT: Final = Meta(ge=1, le=WHOLE_PERCENT)


class MpsSettings(Struct, frozen=True, kw_only=True):
    """Sharing a GPU through NVIDIA's Multi-Process Service, a daemon for each GPU (docs/mps.md)."""

    enabled: Annotated[
        bool,
        about(
            "Whether mode=mps may be asked for. The systemd unit needs its drop-in mps.conf for the daemons, and a "
            "mount for what their clients write; the chart, mps.enabled."
        ),
    ] = False
    containers_per_gpu: Annotated[
        int,
        Meta(ge=1, le=_CLIENTS_MAX),
        about(
            "Most containers of one daemon; on GPUs before Volta never more than 16. Each process of a container is a "
            "client."
        ),
    ] = _CLIENTS_MAX
    default_memory_mib: Annotated[
        int,
        Meta(ge=0, le=_MEMORY_MAX),
        about("Share of memory where a request does not say, MiB; 0: as much as there is."),
    ] = 0
    default_threads_percent: Annotated[
        int, _PERCENT, about("Share of the GPU's multiprocessors where a request does not say, percent.")
    ] = WHOLE_PERCENT
    most_memory_mib: Annotated[
        int,
        Meta(ge=0, le=_MEMORY_MAX),
        about(
            "The most that any process may allocate, MiB: set in the daemon, so that no container can lift it; 0: no "
            "such limit."
        ),
    ] = 0
    most_threads_percent: Annotated[
        int, _PERCENT, about("The same for multiprocessors, percent; counts for processes of new servers.")
    ] = WHOLE_PERCENT
    linger_s: Annotated[
        int,
        Meta(ge=0, le=3600),
        about(
            "Seconds an idle MPS daemon waits for the next container. It ends at once if its GPU is granted in "
            "another mode."
        ),
    ] = 60

    def seat(self, asked: MpsLimits, uid: int | None) -> Seat:
        """Return the share a request gets: the policy's defaults for what it leaves out, at most the policy's most."""
        memory = asked.memory_mib or self.default_memory_mib
        if self.most_memory_mib:
            memory = min(memory or self.most_memory_mib, self.most_memory_mib)
        threads = min(asked.threads_percent or self.default_threads_percent, self.most_threads_percent)
        return Seat(memory, threads, uid)

    def denied(self, asked: MpsLimits, source: str) -> Reason | None:
        """Return why a container may not have this mode, or so much, or None. source: the policy's file."""
        if not self.enabled:
            return Reason(
                Code.NOT_ALLOWED,
                "mode mps is switched off on this node",
                cure=f"set mps.enabled = true in {source} and install what it needs (docs/mps.md), or ask with "
                "mode=shared",
            )
        if self.most_memory_mib and asked.memory_mib > self.most_memory_mib:
            return _above(f"{asked.memory_mib} Mi", "memory", f"{self.most_memory_mib} Mi", "memory_mib", source)
        if asked.threads_percent > self.most_threads_percent:
            most = f"{self.most_threads_percent} percent"
            return _above(f"{asked.threads_percent} percent", "threads", most, "threads_percent", source)
        return None


def _above(asked: str, what: str, most: str, key: str, source: str) -> Reason:
    return Reason(
        Code.NOT_ALLOWED,
        f"sharing={what} of {asked} is more than the {most} of mps.most_{key} in {source}",
        cure="ask for less, or raise that limit",
    )
