"""The drop-in for the kubelet: with it the device plugin is served from within the unit's sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import pytest

from tests.support.daemon import Launch
from tests.support.kubelet import Kubelet
from tests.support.unit_file import OURS
from tests.system.sandboxed import Sandboxed

DROP_IN: Final = OURS.parent / "nri-gpu.service.d" / "kubelet.conf"
GPU: Final = "nvidia.com/gpu"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a sandbox of namespaces needs root")


def test_the_daemon_serves_a_kubelet_in_the_units_sandbox() -> None:
    with tempfile.TemporaryDirectory(prefix="nri-gpu-test-") as made:
        asyncio.run(_serves(Path(made)))


async def _serves(folder: Path) -> None:
    (folder / "d").mkdir()
    policy = folder / "d" / "policy.toml"
    policy.write_text(f'[kubelet]\ndir = "{folder}/kubelet/device-plugins"\ncdi_dir = "{folder}/kubelet/cdi"\n')
    async with asyncio.timeout(60), Kubelet(folder / "kubelet") as kubelet:
        launch = Launch(folder / "d", folder / "d" / "nri.sock", policy=policy)
        with Sandboxed(launch, DROP_IN.read_text(), "--kubelet", rw=(folder / "kubelet",)):
            await kubelet.wait("a registration", lambda: kubelet.capacity(GPU) == 4)
            # No runtime is there, so none is offered yet.
            assert kubelet.healthy(GPU) == []
            # Made anew below the folder that the unit may write to.
            await kubelet.stop()
            shutil.rmtree(kubelet.dir, ignore_errors=True)  # the daemon removes its sockets meanwhile
            await kubelet.start()
            await kubelet.wait("a registration", lambda: kubelet.capacity(GPU) == 4)
