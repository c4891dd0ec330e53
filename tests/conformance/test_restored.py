"""Checkpoints that containerd restores in CreateContainer: real ones, made and restored by CRIU.

It sends no start of them, so in pods that ask for GPUs they are refused at their creation, by the guard alone, too.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conformance.conftest import launch_on
from tests.support import image, packages
from tests.support.checkpoint import checkpoint_image, registry
from tests.support.containerd import SYSTEM_PATH, Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import UUIDS, NriGpu
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = pytest.mark.containerd(packages.Version.V2_1, packages.Version.V2_3)

CHECKPOINT = "localhost/nri-gpu/checkpoint:1"
RAN = ("/bin/sleep", "54321")  # when the checkpoint was made
# 2.3.4 and newer restore only where this is set; 2.1 does not know it, and restores.
SETTINGS = "enable_cdi = true\n  enable_experimental_restore_via_create = true\n"


@pytest.fixture
def node(runtime: packages.Runtime, tmp_path: Path) -> Iterator[Containerd]:
    """A containerd with CRIU in its PATH, and an image that is a checkpoint."""
    programs, archive = tmp_path / "bin", tmp_path / "checkpoint.tar"
    programs.mkdir()
    packages.criu(programs)
    # It leaves a mount in its folder for temporary files when a restore fails.
    environment = {"PATH": f"{programs}:{runtime.folder}:{SYSTEM_PATH}", "TMPDIR": str(tmp_path)}
    node = Containerd(runtime, environment=environment)
    node.layout.config.write_text(node.layout.config.read_text().replace("enable_cdi = true\n", SETTINGS))
    below = image.build(tmp_path / "below.tar", packages.busybox())
    with node, registry(below) as reference:
        pod = node.cri.run_pod()
        node.cri.checkpoint(node.cri.run(pod, ContainerSpec(command=RAN)), archive)
        node.cri.remove_pod(pod.id)
        node.import_tar(checkpoint_image(tmp_path / "image.tar", archive, reference, CHECKPOINT), CHECKPOINT)
        yield node


def create(node: Containerd, annotations: Mapping[str, str]) -> ContainerId:
    pod = node.cri.run_pod(PodSpec(annotations=annotations))
    return node.cri.create(pod, ContainerSpec(image=CHECKPOINT, command=("/bin/false",)))


def check_refused(node: Containerd) -> None:
    """Whatever the pod asks for, and whichever of its containers."""
    for key, claim in (("gpu.nri.io", "device=0"), ("gpu.nri.io/container.main", "1"), ("gpu.nri.io/pod", "none")):
        with pytest.raises(CriError, match=rf"nri-gpu \[restored\]: its pod asks for GPUs by {key}, and its image is"):
            create(node, {key: claim})


def test_a_checkpoint_is_restored_only_in_a_pod_that_asks_for_nothing(node: Containerd, tmp_path: Path) -> None:
    launch = launch_on(node, tmp_path)
    with NriGpu(launch) as daemon, NriGuard(launch) as guard:
        daemon.wait_staged()
        guard.wait_ready()
        check_refused(node)
        assert "code=restored" in daemon.wait_logged("container refused")
        node.cri.run_asking("device=0", "next")
        daemon.wait_held({"next/main": [UUIDS[0]]})

        daemon.kill()
        check_refused(node)
        assert "code=restored" in guard.wait_logged(
            "container rejected" if node.runtime.validates else "container refused"
        )

        restored = create(node, {})
        node.cri.start(restored)
        status = node.cri.status(restored)
        assert status.annotations["restored"] == "true"
        assert Path(f"/proc/{status.pid}/cmdline").read_text().rstrip("\0").split("\0") == [*RAN]
