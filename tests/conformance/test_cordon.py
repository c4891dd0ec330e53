"""GPUs go out of use under running pods: over every restart and a boot these keep them, and nothing new gets one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from uuid import uuid4

import pytest

from tests.conformance.test_kubelet import GPU, check_gpus, launched, run
from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import NriGpu, staged
from tests.support.kubelet import AdmissionError, Kubelet
from tests.support.pods import ContainerSpec
from tests.support.waiting import aside, in_a_loop

pytestmark = pytest.mark.containerd

REFUSED = r"\[gpu-unavailable\].*taken out of use by the node's administrator"


def said(daemon: NriGpu, *words: str) -> str:
    done = daemon.verb(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@in_a_loop
@pytest.mark.short
async def test_over_every_restart_and_a_boot(node: Containerd, tmp_path: Path, folder: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    launch = launched(node, tmp_path, folder)
    assert launch.policy
    with launch.policy.open("a") as policy:
        policy.write(f'[usage]\ndir = "{kept}"\n')
    with staged(launch) as daemon:
        async with Kubelet(folder) as kubelet:
            await kubelet.wait_healthy(GPU, 4)
            annotations = await kubelet.admit("train", "main", {GPU: 1})
            (chosen,) = kubelet.in_use(GPU)
            uid, local_uid, cdi = str(uuid4()), str(uuid4()), kubelet.cdi_devices
            pod, container = await aside(run, node, "train", annotations, uid=uid, cdi=cdi)
            others = [each for each in kubelet.healthy(GPU) if each != chosen]
            own, free, last = others
            local, at_home = await aside(run, node, "local", {}, f"device={own}", uid=local_uid)
            await kubelet.wait_healthy(GPU, 3)

            for each in (chosen, own, free):
                out = await aside(said, daemon, "cordon", each, "--why", "fan broken")
                assert f"{each} is out of use" in out
            await kubelet.wait_healthy(GPU, 2)

            async def nothing_new() -> None:
                assert kubelet.healthy(GPU) == sorted([chosen, last])
                for each in (chosen, own, free):
                    with pytest.raises(CriError, match=REFUSED):
                        await aside(run, node, "thief", {}, f"device={each}")
                with pytest.raises(AdmissionError):
                    await kubelet.admit("thief", "main", {GPU: 2})

            await nothing_new()
            assert re.search(r"GPU \d is out of use .*by .*: fan broken", daemon.verb("status").stdout)
            assert (kept / "cordoned.json").stat().st_mode & 0o777 == 0o600

            # Of the containers, of the kubelet, of the daemon, and of the runtime.
            await aside(node.cri.stop, container)
            await aside(node.cri.stop, at_home)
            await kubelet.restart()
            await kubelet.wait_healthy(GPU, 2)
            await nothing_new()
            spec = ContainerSpec(annotations=kubelet.replayed("train", "main"), attempt=1, cdi_devices=cdi)
            container = await aside(node.cri.run, pod, spec)
            at_home = await aside(node.cri.run, local, ContainerSpec(attempt=1))
            await aside(daemon.restart, kill=True)
            await kubelet.wait_healthy(GPU, 2)
            await nothing_new()
            await aside(node.restart, kill=True)
            await aside(daemon.wait_session, 3)
            await kubelet.wait_healthy(GPU, 2)
            check_gpus(node, container, [chosen])
            check_gpus(node, at_home, [own])
            await nothing_new()

            # A boot: no container, no state folder. The kubelet admits its pods again before they have one.
            await aside(node.cri.stop_pod, pod.id)
            await aside(daemon.kill)
            await aside(node.cri.remove_all)
            shutil.rmtree(daemon.folder)
            await aside(daemon.start)
            await aside(daemon.wait_staged)
            await kubelet.restart()
            await kubelet.wait_healthy(GPU, 2)
            await nothing_new()
            replayed = kubelet.replayed("train", "main")
            pod, container = await aside(run, node, "train", replayed, uid=uid, attempt=2, cdi=cdi)
            check_gpus(node, container, [chosen])
            check_gpus(node, (await aside(run, node, "local", {}, f"device={own}", uid=local_uid))[1], [own])
            await nothing_new()

            # Its pod is gone, and then it is out of use for the kubelet, too; until root takes it back.
            await aside(node.cri.stop_pod, pod.id)
            kubelet.remove("train")
            await kubelet.wait_healthy(GPU, 1)
            for each in (chosen, free):
                await aside(said, daemon, "uncordon", each)
            await kubelet.wait_healthy(GPU, 3)
