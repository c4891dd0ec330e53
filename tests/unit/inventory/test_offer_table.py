"""`[[node.extra]]` of a topology file."""

from __future__ import annotations

import pytest

from nri_gpu.domain.edits import Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.simulation.topology import TopologyError, parse_topology

NODE = "schema = 1\n[node]\n"
GOOD = """
[node.majors]
nvidia = 195
modeset = false

[[node.extra]]
name = "gds"
nodes = [{ path = "/dev/nvidia-fs0", major = 1520, minor = 0, mode = "0600" }]
mounts = [{ destination = "/run/udev", source = "/srv/udev" }]

[[node.extra]]
name = "imex"
major = 1524
channels = 1048576

[[node.extra]]
name = "persistenced"
mounts = [{ destination = "/run/nvidia-persistenced/socket", source = "/srv/socket" }]
"""


def test_a_node_brings_its_own() -> None:
    inventory = parse_topology(NODE + GOOD, "f", 1.0)
    socket = Mount(
        "/run/nvidia-persistenced/socket", "/srv/socket", ("rbind", "rprivate", "ro", "nosuid", "nodev", "noexec")
    )
    assert inventory.extras == {
        Extra.GDS: NodeExtra((DeviceNode("/dev/nvidia-fs0", 1520, 0, 0o600),), (Mount("/run/udev", "/srv/udev"),)),
        Extra.IMEX: NodeExtra(channels=Channels(1524, 2**20)),
        Extra.PERSISTENCED: NodeExtra(mounts=(socket,)),
    }
    assert inventory.majors.modeset is False
    assert parse_topology(NODE, "f", 1.0).extras == {}
    assert parse_topology(NODE, "f", 1.0).majors.modeset is None


FS = '[[node.extra]]\nname = "gds"\nnodes = [{ path = "/dev/nvidia-fs0", major = 1520, minor = 0 }]\n'
FAULTS = {
    "unknown": ('[[node.extra]]\nname = "frob"\n', "node.extra[0].name: 'frob' is none of gds, gdrcopy"),
    "made of the GPUs": ('[[node.extra]]\nname = "drm"\n', "node.extra[0].name: 'drm' is none of gds"),
    "twice": (FS + FS, "node.extra[1].name: the same as node.extra[0].name"),
    "nothing of it": ('[[node.extra]]\nname = "gds"\n', "node.extra[0]: gds has neither nodes nor mounts"),
    "no device": (FS.replace("/dev/n", "/etc/n"), "nodes[0].path: '/etc/nvidia-fs0' is not below /dev"),
    "way out of /dev": (FS.replace("/dev/n", "/dev/../n"), "is not an absolute path without"),
    "mode as a number": (FS.replace("minor = 0", "minor = 0, mode = 438"), "nodes[0].mode: must be text"),
    "odd mode": (FS.replace("minor = 0", 'minor = 0, mode = "666"'), "'666' is not a mode"),
    "major": (FS.replace("1520", "4096"), "nodes[0].major: 4096 is not from 1 to 4095"),
    "no channels": ('[[node.extra]]\nname = "imex"\nmajor = 1524\n', "node.extra[0].channels: missing"),
    "relative source": (
        '[[node.extra]]\nname = "gds"\nmounts = [{ destination = "/a", source = "b" }]\n',
        "mounts[0].source: 'b' is not an absolute path",
    ),
    "unknown key": (FS + "colour = 1\n", "node.extra[0].colour: unknown key"),
}


@pytest.mark.parametrize(("text", "words"), FAULTS.values(), ids=FAULTS)
def test_fault(text: str, words: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(NODE + text, "f", 1.0)
    assert any(words in str(fault) for fault in caught.value.faults), caught.value.faults
