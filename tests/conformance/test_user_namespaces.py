"""Pods in user namespaces: mounts are mapped, and nodes are those of the host, so they have to be there."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch
from tests.support.driver_root import make_driver_root
from tests.support.image import Entry, ImageSpec
from tests.support.loading import LIBRARIES
from tests.support.pods import IDS, ContainerSpec
from tests.support.probe import Opened, device_nodes, open_paths

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.skipif(
        not int(Path("/proc/sys/user/max_user_namespaces").read_text()), reason="this kernel allows no user namespaces"
    ),
]

V: Final = "580.95.05"
NODES: Final = {"nvidia1": (195, 1), "nvidiactl": (195, 255), "nvidia-uvm": (1510, 0), "nvidia-uvm-tools": (1510, 1)}
# Answers as a plugin would that made an interface, and makes none: nobody here talks to anybody.
PLUGIN: Final = """\
#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]}' ;;
ADD) echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "'$CNI_NETNS'"}],' \\
    '"ips": [{"interface": 0, "address": "10.99.0.2/24"}]}' ;;
*) echo '{}' ;;
esac
"""
# All that runc and the test image take from /dev, in a folder that then takes its place.
OWN_DEV: Final = """\
set -e
mkdir -p {new}
mount -t tmpfs none {new}
for node in null zero full random urandom tty; do touch {new}/$node; mount --bind /dev/$node {new}/$node; done
mkdir {new}/pts {new}/shm
mount --rbind /dev/pts {new}/pts
ln -s /proc/self/fd {new}/fd
ln -s pts/ptmx {new}/ptmx
{nodes}
mount --move {new} /dev
"""


def prepare(node: Containerd) -> None:
    """Before it boots."""
    node.base.chmod(0o755)
    folder = node.base / "cni"
    folder.mkdir()
    for name in ("loopback", "silent"):
        (folder / name).write_text(PLUGIN)
        (folder / name).chmod(0o755)
    network = {"cniVersion": "1.0.0", "name": "tests", "plugins": [{"type": "silent"}]}
    (folder / "10-tests.conflist").write_text(json.dumps(network))


def make_nodes(node: Containerd, numbers: Mapping[str, tuple[int, int]]) -> None:
    """Character devices in the /dev that this containerd and its runc see: name -> major and minor."""
    lines = (f"mknod -m 666 {{new}}/{name} c {major} {minor}" for name, (major, minor) in numbers.items())
    new = node.base / "dev"
    script = OWN_DEV.format(new=new, nodes="\n".join(lines).format(new=new))
    subprocess.run(
        ["nsenter", "--mount", "--target", str(node.supervisor_pid), "sh", "-c", script], check=True, timeout=30
    )


@pytest.fixture
def node(runtime: packages.Runtime, tmp_path: Path) -> Iterator[Containerd]:
    """A containerd with a pod network and a runc that maps ids."""
    made = Containerd(runtime, runc=packages.runc_for_user_namespaces(tmp_path))
    prepare(made)
    with made as running:
        yield running


@pytest.fixture
def launch(node: Containerd) -> Launch:
    driver = make_driver_root(node.base / "driver", V, compiled=True)
    return Launch(node.base / "d", node.nri_socket, driver_root=driver)


def run(node: Containerd, request: str, image: str) -> ContainerId:
    pod = node.cri.asking(request, user_namespace=True)
    return node.cri.run(pod, ContainerSpec(image=image, user_namespace=True))


@pytest.mark.usefixtures("daemon")
@pytest.mark.short
def test_a_gpu_in_a_user_namespace(node: Containerd, probe: dict[str, Entry]) -> None:
    image = ImageSpec(extra=probe)
    node.import_image(image)

    # Nothing is asked for, so nothing is in the way.
    run(node, "", image.name)
    # A runtime binds nodes there instead of making them. Its words reach the pod's events.
    with pytest.raises(CriError, match=r"/dev/nvidia1.*no such file or directory"):
        run(node, "device=1; mode=shared", image.name)

    make_nodes(node, NODES)
    container = run(node, "device=1; mode=shared", image.name)
    shown = node.cri.execute(container, "/bin/cat", "/proc/self/uid_map").stdout.split()
    assert shown == ["0", str(IDS.host_id), str(IDS.length)]
    seen = {each.path: (each.major, each.minor) for each in device_nodes(node.cri, container) if "nvidia" in each.path}
    assert seen == {f"/dev/{name}": number for name, number in NODES.items()}
    # By the device cgroup, that is yes.
    assert set(open_paths(node.cri, container, seen).values()) == {Opened.NO_DRIVER}
    assert (
        node.cri.execute(container, "/bin/probe", "libcuda.so.1").stdout
        == f"libcuda.so.1 -> {LIBRARIES}/libcuda.so.1\n"
    )
    smi = node.cri.execute(container, "/bin/sh", "-c", "nvidia-smi")
    assert smi.stdout.startswith(f"nvidia-smi: SIMULATION of driver {V}")
