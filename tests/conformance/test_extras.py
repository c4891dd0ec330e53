"""Extras in real containers: their nodes and no others, their files, sockets that answer; never half of a request."""

from __future__ import annotations

import resource
import socket
import threading
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.domain.edits import UNLIMITED
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.driver_root import STUBS, compile_stub
from tests.support.image import File, ImageSpec
from tests.support.marks import on_newest
from tests.support.probe import DeviceNode, Opened, check_opens, device_nodes, open_paths

pytestmark = on_newest

FS, GDR, VERBS, SWITCH, CHANNELS, CAPS, DRM = 1520, 1521, 1522, 1523, 1524, 1525, 1226
EXTRAS: Final = """
[[node.extra]]
name = "gds"
nodes = [
    {{ path = "/dev/nvidia-fs0", major = 1520, minor = 0 }},
    {{ path = "/dev/nvidia-fs1", major = 1520, minor = 1 }},
]
mounts = [{{ destination = "/etc/cufile.json", source = "{base}/cufile.json" }}]

[[node.extra]]
name = "gdrcopy"
nodes = [{{ path = "/dev/gdrdrv", major = 1521, minor = 0 }}]

[[node.extra]]
name = "rdma"
nodes = [{{ path = "/dev/infiniband/uverbs0", major = 1522, minor = 192 }}]

[[node.extra]]
name = "nvswitch"
nodes = [
    {{ path = "/dev/nvidia-nvswitchctl", major = 1523, minor = 255 }},
    {{ path = "/dev/nvidia-nvswitch0", major = 1523, minor = 0 }},
]

[[node.extra]]
name = "imex"
major = 1524
channels = 8

[[node.extra]]
name = "mig-config"
nodes = [{{ path = "/dev/nvidia-caps/nvidia-cap1", major = 1525, minor = 1, mode = "0400" }}]

[[node.extra]]
name = "mig-monitor"
nodes = [{{ path = "/dev/nvidia-caps/nvidia-cap2", major = 1525, minor = 2, mode = "0444" }}]

[[node.extra]]
name = "persistenced"
mounts = [{{ destination = "/run/nvidia-persistenced/socket", source = "{base}/persistenced" }}]
"""
EVERYTHING: Final = """
[extras]
allowed = ["drm", "gds", "gdrcopy", "rdma", "nvswitch", "imex", "persistenced", "fabricmanager", "profile", "firmware",
    "mig-config", "mig-monitor"]
"""
GPU_NODES: Final = {
    "/dev/nvidia1": (195, 1, 0o666),
    "/dev/nvidiactl": (195, 255, 0o666),
    "/dev/nvidia-uvm": (1510, 0, 0o666),
    "/dev/nvidia-uvm-tools": (1510, 1, 0o666),
}
BY_PATH: Final = "/dev/dri/by-path/pci-0000:41:00.0"
CHANNEL: Final = "/dev/nvidia-caps-imex-channels/channel"
# extras -> path, number and mode of the nodes they bring to a container with GPU 1.
NODES: Final[dict[str, dict[str, tuple[int, int, int]]]] = {
    "drm": {
        "/dev/dri/card1": (DRM, 1, 0o666),
        f"{BY_PATH}-card": (DRM, 1, 0o666),
        "/dev/dri/renderD129": (DRM, 129, 0o666),
        f"{BY_PATH}-render": (DRM, 129, 0o666),
    },
    "gds": {f"/dev/nvidia-fs{minor}": (FS, minor, 0o666) for minor in (0, 1)},
    "gdrcopy": {"/dev/gdrdrv": (GDR, 0, 0o666)},
    "nvswitch": {"/dev/nvidia-nvswitchctl": (SWITCH, 255, 0o666), "/dev/nvidia-nvswitch0": (SWITCH, 0, 0o666)},
    "imex:0,imex:7": {f"{CHANNEL}{channel}": (CHANNELS, channel, 0o666) for channel in (0, 7)},
    "mig-config": {"/dev/nvidia-caps/nvidia-cap1": (CAPS, 1, 0o400)},
    "mig-monitor": {"/dev/nvidia-caps/nvidia-cap2": (CAPS, 2, 0o444)},
}
OURS: Final = {195, 1510, DRM, *range(FS, CAPS + 1)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extras")
    (folder / "cufile.json").write_text('{"logging": {}}')
    (folder / "node.toml").write_text(FOUR_GPUS.read_text() + EXTRAS.format(base=folder))
    return folder


@pytest.fixture(scope="module")
def module_node(module_cgroup_node: Containerd) -> Containerd:
    """Once on each cgroup generation."""
    return module_cgroup_node


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch, base: Path) -> Launch:
    return replace(module_launch, topology=base / "node.toml").with_policy(EVERYTHING)


@pytest.fixture(autouse=True)
def serving(shared_daemon: NriGpu) -> None:
    shared_daemon.wait_staged()


def claim(extras: str) -> str:
    return f"device=1; mode=shared; extras={extras}"


def nodes_of(node: Containerd, container: ContainerId) -> dict[str, DeviceNode]:
    return {each.path: each for each in device_nodes(node.cri, container) if each.major in OURS}


def said(node: Containerd, container: ContainerId, *command: str) -> str:
    done = node.cri.execute(container, *command)
    assert done.code == 0, done.stderr
    return done.stdout


def test_each_brings_its_nodes_and_no_others(node: Containerd) -> None:
    every = {number[:2] for nodes in NODES.values() for number in nodes.values()}
    for extras, wanted in NODES.items():
        container = node.cri.run_asking(claim(extras))
        found = nodes_of(node, container)
        expected = GPU_NODES | wanted
        assert {path: (each.major, each.minor, each.mode) for path, each in found.items()} == expected
        assert all((each.uid, each.gid) == (0, 0) for each in found.values())
        numbers = {number[:2] for number in expected.values()}
        check_opens(node, container, numbers, {*every, (CHANNELS, 1), (FS, 2)})


@pytest.mark.short
def test_all_at_once(node: Containerd) -> None:
    container = node.cri.run_asking(claim(",".join(NODES)))
    found = nodes_of(node, container)
    assert set(found) == set(GPU_NODES).union(*NODES.values())
    assert set(open_paths(node.cri, container, found).values()) == {Opened.NO_DRIVER}
    assert said(node, container, "/bin/cat", "/etc/cufile.json") == '{"logging": {}}'
    assert node.cri.execute(container, "/bin/sh", "-c", ": > /etc/cufile.json").code != 0
    assert not node.cri.status(container).oci.get("hooks")


def _greet(listening: socket.socket) -> None:
    while True:
        try:
            caller, _ = listening.accept()
        except OSError:
            return
        with caller:
            caller.sendall(b"hello from the host")


def test_a_socket_answers_and_cannot_be_changed(node: Containerd, base: Path) -> None:
    probe = compile_stub(STUBS / "connect.c", base / "connect", "", "-static")
    image = ImageSpec("localhost/nri-gpu/connect:1", extra={"/bin/connect": File(probe.read_bytes(), 0o755)})
    node.import_image(image)
    place, ours = "/run/nvidia-persistenced/socket", base / "persistenced"
    ours.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(ours))
        listening.listen()
        answering = threading.Thread(target=_greet, args=(listening,), daemon=True)
        answering.start()
        mode = ours.stat().st_mode
        container = node.cri.run_asking(claim("persistenced"), image=image.name)
        assert said(node, container, "/bin/connect", place) == "hello from the host"
        for change in (f"chmod 0 {place}", f"chown 1 {place}", f"rm -f {place}", f"mv {place} /tmp/other"):
            assert node.cri.execute(container, "/bin/sh", "-c", change).code != 0, change
        assert said(node, container, "/bin/ls", "/run/nvidia-persistenced").split() == ["socket"]
        assert ours.stat().st_mode == mode
        listening.shutdown(socket.SHUT_RDWR)
        answering.join(10)


def _may_raise_limits() -> bool:
    """Whether whoever starts containers here may give them more than it has itself (CAP_SYS_RESOURCE)."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError:
        return False
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    return True


def test_rdma_may_pin_memory(node: Containerd) -> None:
    container = node.cri.create(node.cri.asking(claim("rdma")))
    limits = [each for each in node.cri.status(container).oci["process"]["rlimits"] if "MEMLOCK" in each["type"]]
    assert limits == [{"type": "RLIMIT_MEMLOCK", "hard": UNLIMITED, "soft": UNLIMITED}]
    if not _may_raise_limits():
        # The kernel refuses it to the runtime of such a machine, and says so: a container never runs with less.
        with pytest.raises(CriError, match="rlimit"):
            node.cri.start(container)
        return
    node.cri.start(container)
    assert "/dev/infiniband/uverbs0" in nodes_of(node, container)
    assert said(node, container, "/bin/sh", "-c", "ulimit -l").strip() == "unlimited"
