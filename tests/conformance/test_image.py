"""The checkout's own image, as `make image` builds it, in a real containerd."""

from pathlib import Path

from deploy import image
from nri_gpu import __version__
from tests.support.containerd import Containerd
from tests.support.marks import on_newest
from tests.support.own_image import own_image
from tests.support.pods import ContainerSpec
from tests.support.waiting import wait_for

pytestmark = on_newest

READY_S = 30.0


def test_it_runs_with_a_read_only_root(node: Containerd, tmp_path: Path) -> None:
    """What it starts by itself, and beside that what the chart runs in it."""
    cri = node.cri
    node.ctr("images", "import", str(own_image()))
    wait_for("the image", lambda: cri.has_image(image.NAME), READY_S)
    folders = {"/run/nri-gpu": tmp_path / "state", "/var/lib/nri-gpu": tmp_path / "lib"}
    for folder in folders.values():
        folder.mkdir()
    mounts = {each: str(folder) for each, folder in folders.items()} | {"/var/run/nri": str(node.nri_socket.parent)}
    daemon = cri.run(cri.run_pod(), ContainerSpec(image=image.NAME, mounts=mounts, readonly_rootfs=True))
    wait_for("the daemon", lambda: cri.execute(daemon, "nri-gpu", "status", "--alive").code == 0, READY_S)
    assert cri.execute(daemon, "nri-gpu", "--version").stdout.split()[-1] == __version__
    assert cri.execute(daemon, "nri-gpu", "check").code == 0
    # Of the chart's init container.
    assert cri.execute(daemon, "sh", "-c", "mountpoint -q / && command -v mount mkdir").code == 0
