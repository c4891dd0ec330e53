"""`systemctl daemon-reload` beneath containers whose cgroups systemd makes: it writes their device rules anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.packages.test_systemd import DROP_IN, OPTIONS, SERVES_S
from tests.support import config, image, packages, runc_devices_only
from tests.support.booted_root import BootedRoot
from tests.support.cache import cache_folder
from tests.support.config import Layout
from tests.support.cri import ContainerId, Cri
from tests.support.driver_root import make_driver_root
from tests.support.waiting import wait_for

INSIDE: Final = Layout(Path("/node"))  # where the system has containerd's files
CONTAINERD: Final = """
[Service]
Type=notify
Environment=PATH={folder}:/usr/sbin:/usr/bin
ExecStart={folder}/containerd --config {config}
Delegate=yes
KillMode=process
"""
OURS: Final = f"""
[Unit]
Wants=containerd.service
[Service]
ExecStart=
ExecStart=/usr/bin/nri-gpu run {OPTIONS}
"""


class Node:
    """A system with containerd and the package as units of its systemd."""

    def __init__(self, root: BootedRoot, files: Layout) -> None:
        self.root = root
        self.cri = Cri(files.cri_socket, cgroup_parent="kubepods.slice")
        # Containers get copies of these, and the system has none.
        root.run("sh", "-c", "echo 127.0.0.1 localhost >/etc/hosts; touch /etc/resolv.conf")
        image.build(files.base / "image.tar", packages.busybox(), image.ImageSpec())
        client = f"{packages.fetch(packages.Version.V2_1).ctr} --address {INSIDE.cri_socket} --namespace k8s.io"
        root.run(*client.split(), "images", "import", str(INSIDE.base / "image.tar"))
        wait_for("the image", lambda: self.cri.has_image(image.NAME), SERVES_S)

    def run(self, gpu: int) -> ContainerId:
        """A container with that GPU, and a node of its own making of GPU 3."""
        container = self.cri.run_asking(f"device={gpu}", f"pod-{gpu}")
        assert self.cri.execute(container, "/bin/mknod", "/dev/nvidia3", "c", "195", "3").code == 0
        return container

    def opens(self, container: ContainerId, gpu: int) -> bool:
        """Whether the container's device rules let it open that node. There is no driver to answer then."""
        said = self.cri.execute(container, "/bin/cat", f"/dev/nvidia{gpu}").stderr
        assert said.endswith(("No such device or address\n", "Operation not permitted\n")), said
        return said.endswith("address\n")


@contextmanager
def node(with_package: Path, folder: Path, runc: Callable[[Path], Path]) -> Iterator[Node]:
    """runc: makes the program in a folder."""
    files = Layout(folder / "n")
    for each in (files.base, files.nri_socket.parent, units := folder / "units"):
        each.mkdir()
    files.make()
    script = Path(shutil.copy(runc_devices_only.__file__, files.base))
    program = Path(shutil.copy(runc(folder), files.base / "real-runc"))
    inside = [INSIDE.base / each.name for each in (program, script)]
    runc_devices_only.write_wrapper(files.runc_wrapper, inside[0], Path("/usr/bin/python3"), inside[1])
    files.config.write_text(
        config.render(INSIDE, v3=True, runc=INSIDE.runc_wrapper, nri=True, request_timeout_s=2.0, systemd_cgroup=True)
    )
    containerd = packages.fetch(packages.Version.V2_1).folder
    (units / "containerd.service").write_text(CONTAINERD.format(folder=containerd, config=INSIDE.config))
    drop_in = units / Path(DROP_IN).name / "test.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(OURS)
    seen = {
        files.base: str(INSIDE.base),
        files.nri_socket.parent: "/run/nri",
        units: str(Path(DROP_IN).parent),
        cache_folder(): str(cache_folder()),
        make_driver_root(folder / "driver"): "/driver",
    }
    with BootedRoot("bookworm", seen, over=with_package) as root:
        yield Node(root, files)


def test_a_container_keeps_its_gpu(with_package: Path, tmp_path: Path) -> None:
    with node(with_package, tmp_path, packages.later_runc) as on:
        container = on.run(1)
        for change in ("daemon-reload", "daemon-reexec"):
            on.root.run("systemctl", change)
            assert (on.opens(container, 1), on.opens(container, 3)) == (True, False)


def test_with_an_old_runc_it_needs_the_links_of_prepare(with_package: Path, tmp_path: Path) -> None:
    """Without them it loses the GPU: docs/host.md, "Links"."""
    with node(with_package, tmp_path, lambda _: packages.runc_of_bookworm()) as on:
        lost = on.run(1)
        assert on.opens(lost, 1)
        # As prepare makes them of what a driver says.
        links = "mkdir /dev/char; for n in 2 255; do mknod /dev/n$n c 195 $n; ln -s ../n$n /dev/char/195:$n; done"
        on.root.run("sh", "-c", links)
        kept = on.run(2)
        on.root.run("systemctl", "daemon-reload")
        assert [on.opens(lost, 1), on.opens(kept, 2), on.opens(kept, 3)] == [False, True, False]
