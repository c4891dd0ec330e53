"""The name of the node that this process runs on."""

from __future__ import annotations

import os
import socket

from msgspec import Struct


class NamedNode(Struct, frozen=True):
    """The node on which a verb was run. name: in Kubernetes, else the host's."""

    name: str


def node_name() -> str:
    """Return NODE_NAME, which the chart sets, else the host's name in lower case, as the kubelet has it."""
    return os.environ.get("NODE_NAME") or socket.gethostname().lower()


def this_node() -> NamedNode:
    return NamedNode(node_name())
