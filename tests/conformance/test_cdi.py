"""The CDI specification in containerd's own hands: a container by CDI is a container by NRI, seen from inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from nri_gpu.verify.in_kernel import DeviceRule
from tests.support import cdi
from tests.support.cgroup import Cgroup, device_rules
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch, NriGpu
from tests.support.image import NAME
from tests.support.loading import LIBRARIES
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Number, Opened, nvidia_nodes, open_path

pytestmark = pytest.mark.containerd

CTL, UVM, UVM_TOOLS = (195, 255), (1510, 0), (1510, 1)  # of config/topologies/four-gpus.toml
HASHES: Final = """
find -L "$0" -type f | sort | xargs sha256sum
for link in $(find "$0" -type l | sort); do echo $link $(readlink $link); done
"""


class Seen(Struct, frozen=True):
    """What a container is, as far as GPUs go.

    mounts: destination -> (source below the stage folder, options, what is in there).
    """

    nodes: Mapping[str, Number]
    rules: frozenset[DeviceRule]
    mounts: Mapping[str, tuple[str, str, str]]


@pytest.fixture
def specification(node: Containerd, launch: Launch) -> Iterator[Path]:
    """For the shared node, staged in a folder of its own: the daemon's is the daemon's."""
    assert launch.driver_root
    with cdi.specification(node.layout.cdi, launch.driver_root, launch.base / "cdi") as file:
        yield file


def by_cdi(node: Containerd, *names: str, user: int | None = None, image: str = NAME) -> ContainerId:
    devices = tuple(f"nvidia.com/gpu={name}" for name in names)
    pod = node.cri.run_pod(PodSpec(name="by-cdi"))
    return node.cri.run(pod, ContainerSpec(cdi_devices=devices, user=user, image=image))


def see(node: Containerd, container: ContainerId, stage_dir: Path) -> Seen:
    rows = node.cri.execute(container, "/bin/cat", "/proc/self/mountinfo").stdout.splitlines()
    found = [row.split() for row in rows if str(stage_dir) in row]
    return Seen(
        nodes=nvidia_nodes(node.cri, container),
        rules=device_rules(node.container_cgroup(container)) if node.cgroup is Cgroup.V1 else frozenset(),
        mounts={
            row[4]: (row[3].rpartition(str(stage_dir))[2], row[5], _content(node, container, row[4])) for row in found
        },
    )


def _content(node: Containerd, container: ContainerId, place: str) -> str:
    done = node.cri.execute(container, "/bin/sh", "-c", HASHES, place)
    assert done.code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("gpus", ["0", "1,3"])
@pytest.mark.short
def test_by_cdi_as_by_nri(node: Containerd, daemon: NriGpu, specification: Path, gpus: str) -> None:
    base = daemon.launch.base
    for user in (None, 1000):
        nri = node.cri.run_asking(f"device={gpus}; mode=shared", "by-nri", user=user)
        container = by_cdi(node, *gpus.split(","), user=user)

        seen = see(node, container, base / "cdi")
        assert seen == see(node, nri, base / "drivers")
        assert {*seen.nodes.values()} == {CTL, UVM, UVM_TOOLS, *((195, int(gpu)) for gpu in gpus.split(","))}
        assert LIBRARIES in seen.mounts
        for each in (nri, container):
            assert not node.cri.status(each).oci.get("hooks")
            assert open_path(node.cri, each, "/dev/nvidiactl") is Opened.NO_DRIVER
        assert node.cri.status(container).env["NVIDIA_VISIBLE_DEVICES"] == "void"
