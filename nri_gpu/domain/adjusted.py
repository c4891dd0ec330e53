"""What all plugins together made of a container, as the runtime shows it to those that may still reject it."""

from __future__ import annotations

from msgspec import Struct

from nri_gpu.domain.container import Container


class Added(Struct, frozen=True):
    """Something that a plugin added. owner: that plugin, as `NN-name`; empty where the runtime does not say."""

    name: str
    owner: str


class AddedNode(Struct, frozen=True):
    """A device node that a plugin added. name: its path in the container."""

    name: str
    owner: str
    major: int
    minor: int


class Adjusted(Struct, frozen=True, kw_only=True):
    """A container about to be created.

    container: as it was before any plugin. mark: the grant that was written on it, if one was.
    cdi_devices: names that plugins added, not those that the kubelet asked for.
    opened: majors of character devices that plugins opened in its device cgroup by rules of their own.
    """

    container: Container
    mark: Added | None = None
    nodes: tuple[AddedNode, ...] = ()
    cdi_devices: tuple[Added, ...] = ()
    opened: frozenset[int] = frozenset()
