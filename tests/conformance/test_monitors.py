"""A container that watches takes no GPU out of service: on a real containerd, with a kubelet and the device plugin.

The exporter gets every GPU's node as in a cluster with the GPU Operator: by CRI's CDI field, or by another NRI plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Struct

from tests.conformance.conftest import injected, launch_on
from tests.support.cdi import opening
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import UUIDS, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.kubelet import Kubelet
from tests.support.marks import on_newest
from tests.support.packages import Version, available
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import nvidia_nodes
from tests.support.waiting import aside, in_a_loop, wait_for

pytestmark = pytest.mark.containerd(Version.V2_1, available()[-1])

GPU: Final = "nvidia.com/gpu"
EXPORTER: Final = "nvidia-dcgm-exporter-x2k9v"
MONITOR: Final = f"gpu-operator/{EXPORTER}"
LISTED: Final = '["gpu-operator/nvidia-dcgm-exporter-*"]'
MANAGEMENT: Final = "management.nvidia.com/gpu=all"
ALL: Final = {(195, minor) for minor in (0, 1, 2, 3, 255)}
CONFLICT: Final = "container opens GPUs that another pod has exclusively"
PATIENCE_S: Final = 10.0
NOTHING: Final[Mapping[str, str]] = {}


class Site(Struct, frozen=True):
    """A node with a device plugin. folder: the kubelet's."""

    node: Containerd
    daemon: NriGpu
    folder: Path

    def exporter(self, *cdi: str, adds: Mapping[str, str] = NOTHING, attempt: int = 0) -> ContainerId:
        """adds: what another plugin adds to it, as of `injected`."""
        spec = PodSpec(name=EXPORTER, namespace="gpu-operator", annotations=adds, attempt=attempt)
        return self.node.cri.run(self.node.cri.run_pod(spec), ContainerSpec(name="exporter", cdi_devices=cdi))

    def run(self, name: str, annotations: dict[str, str], claim: str = "") -> ContainerId:
        pod = self.node.cri.asking(claim, name)
        return self.node.cri.run(pod, ContainerSpec(annotations=annotations))

    def monitors(self, text: str) -> None:
        """The policy has these from now on."""
        policy = self.daemon.launch.policy
        assert policy
        policy.write_text(text_of(self.node, self.folder, text))
        self.daemon.reload()

    def wait_status(self, key: str, expected: object) -> None:
        """Until `status` says that of every GPU."""
        wait_for(key, lambda: self.per_gpu(key) == [expected] * 4, PATIENCE_S, lambda: str(self.per_gpu(key)))

    def per_gpu(self, key: str) -> list[Any]:
        return [each[key] for each in self.daemon.status()["gpus"]]


def text_of(node: Containerd, folder: Path, monitors: str) -> str:
    kubelet = f'[kubelet]\nenabled = true\ndir = "{folder}/device-plugins"\ncdi_dir = "{node.layout.cdi}"\n'
    socket = f'podresources = "{folder}/pod-resources/kubelet.sock"\n'
    return f'{kubelet}{socket}[stray]\nexceptions = ["gpu-operator/*"]\n[foreign]\nmonitors = {monitors}\n'


@pytest.fixture
def management(node: Containerd, tmp_path: Path) -> Iterator[str]:
    """The CDI device that opens every GPU."""
    kind, _, device = MANAGEMENT.partition("=")
    file = node.layout.cdi / "management.nvidia.com-gpu.json"
    with opening(file, tmp_path, kind, {device: [minor for _, minor in sorted(ALL)]}):
        yield MANAGEMENT


@pytest.fixture
def site(node: Containerd, tmp_path: Path, folder: Path, management: str) -> Iterator[Site]:
    with staged(launch_on(node, tmp_path).with_policy(text_of(node, folder, LISTED))) as daemon:
        yield Site(node, daemon, folder)


@in_a_loop
async def test_the_exporter_comes_first(site: Site) -> None:
    """It keeps nobody from a GPU; taken out of the list it holds them again, beside those who have some by then."""
    async with Kubelet(site.folder) as kubelet:
        await kubelet.wait_healthy(GPU, 4)
        exporter = await aside(site.exporter, MANAGEMENT)
        assert {*(await aside(nvidia_nodes, site.node.cri, exporter)).values()} == ALL
        (first, *_) = site.per_gpu("monitors")
        assert first == [MONITOR]
        assert site.per_gpu("foreign") == [[]] * 4
        assert site.per_gpu("unavailable") == [""] * 4
        assert "watches" in site.daemon.verb("status").stdout
        assert len(kubelet.healthy(GPU)) == 4

        annotations = await kubelet.admit("train", "main", {GPU: 1})
        trains = await aside(site.run, "train", annotations)
        annotated = await aside(site.run, "local", {}, "1")
        await kubelet.wait_healthy(GPU, 3)
        held = {each["uuid"] for each in site.daemon.status()["gpus"] if each["mode"] == "exclusive"}
        assert held > set(kubelet.in_use(GPU))

        # No monitor any more: these two go on, the overlap is reported, and nobody else gets a GPU.
        await aside(site.monitors, "[]")
        await aside(site.wait_status, "foreign", [MONITOR])
        said = site.daemon.status()
        assert {each["gpu_uuid"] for each in said["overlaps"]} == held
        assert site.daemon.log().count(CONFLICT) == 1
        (external,) = said["external"]
        assert (external["pod"], external["container"], external["watched"]) == (MONITOR, "exporter", [])
        assert external["gpu_uuids"] == UUIDS
        with pytest.raises(
            CriError, match=rf"\[gpu-busy\].*{MONITOR} \(not through nri-gpu\), whose container exporter "
        ):
            await aside(site.run, "thief", {}, "1")
        await kubelet.wait_healthy(GPU, 0)
        assert [site.node.cri.status(each).state for each in (trains, annotated, exporter)] == ["RUNNING"] * 3

        # A monitor again: its GPUs are free at once.
        await aside(site.monitors, LISTED)
        await aside(site.wait_status, "monitors", [MONITOR])
        assert site.daemon.status()["overlaps"] == []
        await kubelet.wait_healthy(GPU, 3)
        await aside(site.run, "next", await kubelet.admit("next", "main", {GPU: 1}))


@on_newest
@pytest.mark.usefixtures("injector")
@pytest.mark.parametrize("by", ["CDI", "nodes"])
def test_another_plugin_may_add_to_a_monitor_alone(site: Site, by: str) -> None:
    """With daemon and guard, to runtimes that validate. They are called before the plugin, and after it."""
    gpus = [{"path": f"/dev/nvidia{minor}", "type": "c", "major": 195, "minor": minor} for minor in range(4)]
    adds = injected({"CDI_devices": [{"name": MANAGEMENT}]} if by == "CDI" else {"linux": {"devices": gpus}})
    node = site.node
    with NriGuard(site.daemon.launch) as guard:
        guard.wait_ready()
        holder = site.run("first", {}, "2")
        with pytest.raises(CriError, match=r"\[ungranted-nodes\].*05-injector"):
            node.cri.run(node.cri.run_pod(PodSpec(name="quiet", annotations=adds)))
        exporter = site.exporter(adds=adds)
        opened = {*nvidia_nodes(node.cri, exporter).values()}
        assert {(195, minor) for minor in range(4)} <= opened
        second = site.run("second", {}, "1")
        site.daemon.restart()
        site.wait_status("monitors", [MONITOR])
        third = site.run("third", {}, "1")
        assert [node.cri.status(each).state for each in (holder, exporter, second, third)] == ["RUNNING"] * 4

        site.monitors("[]")
        node.cri.stop(exporter)
        with pytest.raises(CriError, match=r"\[ungranted-nodes\]"):
            site.exporter(adds=adds, attempt=1)
