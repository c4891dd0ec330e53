"""The observer's ways to learn of the node: its children that look at containers and processes, and ask the kubelet."""

from __future__ import annotations

from collections.abc import Sequence

from nri_gpu.domain.node import Inventory
from nri_gpu.observe.kubelet_devices import given_devices
from nri_gpu.observe.looker import look_at_node
from nri_gpu.observe.looks import NodeLook
from nri_gpu.observe.observer import Senses
from nri_gpu.observe.runtime_table import watched_folders


def senses_of(podresources: str, states: Sequence[str] = ()) -> Senses:
    """Return those of this machine. podresources: the kubelet's socket. states: of more containerds than the usual."""

    async def look(inventory: Inventory, processes: bool) -> NodeLook:
        return await look_at_node(inventory, processes=processes, states=states)

    return Senses(look=look, given=lambda: given_devices(podresources), folders=lambda: watched_folders(states))
