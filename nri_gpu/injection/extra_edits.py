"""Extras: the things that a container asked for beside its GPUs, given completely or not at all.

One function checks and makes the edits, so that a refused request gets none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from posixpath import normpath
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import (
    NO_EDITS,
    UNLIMITED,
    Channels,
    DeviceNode,
    Edits,
    Extra,
    Extras,
    NodeExtra,
    Rlimit,
)
from nri_gpu.domain.gpu import MigPart, Unit, whole
from nri_gpu.domain.node import Node
from nri_gpu.injection.device_nodes import draws, drm_nodes

CHANNELS_FOLDER: Final = "/dev/nvidia-caps-imex-channels"
# A container with the node may open the channel; the driver's own nodes are open to everyone (nv-caps-imex.c).
CHANNEL_MODE: Final = 0o666
MEMLOCK: Final = Rlimit("RLIMIT_MEMLOCK", UNLIMITED, UNLIMITED)


class ExtraRequest(Struct, frozen=True):
    """A container's extras. gpus: those chosen for it."""

    extras: Extras
    gpus: tuple[Unit, ...]
    node: Node
    container: Container


def extra_edits(wish: ExtraRequest) -> Edits | Reason:
    """Return the edits of a request's extras, or why an extra cannot be given."""
    edits = NO_EDITS
    for extra in Extra:
        if extra in wish.extras.asked:
            part = _MAKERS.get(extra, _offered)(extra, wish)
            if isinstance(part, Reason):
                return part
            if reason := _hidden_volume(extra, part.mounts, wish.container.mounts):
                return reason
            edits = edits.merge(part)
    return edits


def extras_note(extras: Extras, container: Container) -> str:
    """Return what of its extras a container does not get, or empty: NRI can add limits and change none."""
    notes = [f"extra {each} no longer exists and is ignored: leave it out" for each in extras.ignored]
    if Extra.RDMA in extras.asked and MEMLOCK.type in container.rlimits:
        own = f"the container sets its own {MEMLOCK.type}, which stays"
        notes.append(f"{own}: rdma may not be able to pin enough memory")
    return "; ".join(notes)


def _offered(extra: Extra, wish: ExtraRequest) -> Edits | Reason:
    offer = _offer(extra, wish)
    return offer if isinstance(offer, Reason) else Edits.of(devices=offer.nodes, mounts=offer.mounts)


def _offer(extra: Extra, wish: ExtraRequest) -> NodeExtra | Reason:
    offer = wish.node.inventory.extras.get(extra)
    if offer is None:
        return _lacking(extra, "the node was not searched for it, or a simulated node's topology file does not list it")
    return _lacking(extra, offer.lacking) if offer.lacking else offer


def _drm(extra: Extra, wish: ExtraRequest) -> Edits | Reason:
    """Return the GPUs' own DRM nodes, without the libraries that draw, or why they cannot be given."""
    for unit in wish.gpus:
        if isinstance(unit, MigPart) and not draws(unit):
            profile = unit.device.profile
            return _lacking(extra, f"MIG device {unit.place} is a {profile}, and only profiles with +gfx can draw")
        if not whole(unit).drm:
            what = f"GPU {whole(unit).index} has no node below /dev/dri"
            return _lacking(extra, f"{what}: load kernel module nvidia-drm (`modprobe nvidia-drm`)")
    return Edits.of(devices=tuple(node for unit in wish.gpus for node in drm_nodes(whole(unit))))


def _rdma(extra: Extra, wish: ExtraRequest) -> Edits | Reason:
    """Return the adapters' nodes, and no limit on the memory that they can pin, or why they cannot be given."""
    offer = _offer(extra, wish)
    if isinstance(offer, Reason):
        return offer
    rlimits = () if MEMLOCK.type in wish.container.rlimits else (MEMLOCK,)
    return Edits.of(devices=offer.nodes, mounts=offer.mounts, rlimits=rlimits)


def _imex(extra: Extra, wish: ExtraRequest) -> Edits | Reason:
    offer = _offer(extra, wish)
    if isinstance(offer, Reason):
        return offer
    channels = offer.channels or Channels(0, 0)
    beyond = [number for number in wish.extras.channels if number >= channels.count]
    if beyond:
        return _lacking(
            extra,
            f"channel {beyond[0]} is not one of its {channels.count}, which count from 0: ask for another, or raise "
            "NVreg_ImexChannelCount of kernel module nvidia",
        )
    paths = ((number, f"{CHANNELS_FOLDER}/channel{number}") for number in wish.extras.channels)
    return Edits.of(devices=tuple(DeviceNode(path, channels.major, number, CHANNEL_MODE) for number, path in paths))


def _lacking(extra: Extra, why: str) -> Reason:
    return Reason(Code.NODE_NOT_READY, f"extra {extra} cannot be given on this node", why)


def _hidden_volume(extra: Extra, places: Iterable[str], taken: Iterable[str]) -> Reason | None:
    """Return why a mount of ours would hide a volume of the container, or None.

    A volume above our mount is fine: runtimes mount by depth.
    """
    others = [normpath(f"/{other.lstrip('/')}") for other in taken]
    for place in places:
        if any(other == place or other.startswith(f"{place}/") for other in others):
            return Reason(
                Code.BAD_REQUEST,
                f"extra {extra} is mounted at {place}, and the container has a volume there",
                cure="move the volume, or leave the extra out",
            )
    return None


_MAKERS: Final[Mapping[Extra, Callable[[Extra, ExtraRequest], Edits | Reason]]] = {
    Extra.DRM: _drm,
    Extra.RDMA: _rdma,
    Extra.IMEX: _imex,
}
