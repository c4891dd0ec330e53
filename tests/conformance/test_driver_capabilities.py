"""NVIDIA_DRIVER_CAPABILITIES of an image or a pod, on real containerds: what comes by it, and what the log says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import Launch, staged
from tests.support.driver_root import make_driver_root
from tests.support.image import ImageSpec
from tests.support.loading import LIBRARIES

pytestmark = pytest.mark.containerd

VARIABLE: Final = "NVIDIA_DRIVER_CAPABILITIES"
ALL_IMAGE: Final = ImageSpec("localhost/nri-gpu/encoder:1", env={VARIABLE: "all", "SECRET": "hunter2"})
ASK: Final = '[environment]\ndriver_capabilities = "ask"\n[capabilities]\nallowed = ["compute", "utility", "video"]\n'
OF_VIDEO, OF_GRAPHICS, OF_COMPUTE = "libnvidia-encode.so.1", "libGLX_nvidia.so.0", "libcuda.so.1"


def run(
    node: Containerd, name: str, claim: str = "1; mode=shared", env: Mapping[str, str] | None = None
) -> ContainerId:
    return node.cri.run_asking(claim, name, image=ALL_IMAGE.name, env=env or {})


def libraries(node: Containerd, container: ContainerId) -> set[str]:
    names = set(node.cri.execute(container, "/bin/ls", LIBRARIES).stdout.split())
    return names & {OF_VIDEO, OF_GRAPHICS, OF_COMPUTE}


def test_an_encoder_from_nvidias_runtime_gets_what_its_image_names(
    node: Containerd, launch: Launch, tmp_path: Path
) -> None:
    node.import_image(ALL_IMAGE)
    launch = replace(launch, driver_root=make_driver_root(tmp_path / "whole", everything=True))
    with staged(launch) as daemon:
        ignored = run(node, "ignored")
        assert libraries(node, ignored) == {OF_COMPUTE}
        line = daemon.wait_logged("GPU granted")
        assert "also names video, graphics, display, ngx, compat32: environment.driver_capabilities is" in line
    node.cri.remove_all()
    with staged(launch.with_policy(ASK)) as daemon:
        assert libraries(node, run(node, "asks")) == {OF_COMPUTE, OF_VIDEO}
        assert "also names graphics, display, ngx, compat32: capabilities graphics may" in daemon.wait_logged(
            "GPU granted"
        )
        # The pod's own stands behind the image's; the annotation goes before both.
        assert libraries(node, run(node, "less", env={VARIABLE: "utility"})) == set()
        assert libraries(node, run(node, "said", "1; mode=shared; capabilities=compute")) == {OF_COMPUTE}
        assert "hunter2" not in daemon.log()
