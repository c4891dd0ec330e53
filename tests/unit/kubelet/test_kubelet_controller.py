"""The daemon's device plugin: off unless wanted, and never the end of the NRI plugin."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.app import Daemon
from nri_gpu.kubelet.advertised import NOT_CONNECTED, OFFERED_TWICE
from nri_gpu.kubelet.kubelet_controller import KubeletController
from nri_gpu.kubelet.required_device import KEY_FILE, TokenKey
from nri_gpu.policy.kubelet_settings import KubeletSettings, Registration
from nri_gpu.policy.read import parse_policy
from nri_gpu.records.policy_file import PolicyFile
from nri_gpu.records.state_folder import StateFolder
from tests.support.builders import container, gpu, mig_gpu, uuid
from tests.support.daemon import FOUR_GPUS
from tests.support.kubelet import Kubelet
from tests.support.kubelet_nodes import GPU, INJECTING, ExternalNode, KubeletNode, PluginNode, said, until
from tests.support.log import Log
from tests.support.podresources import PodResourcesServer
from tests.support.running import running


async def test_an_installation_without_grpcio_serves_on(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nri_gpu.kubelet.registered_socket", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    node = PluginNode()
    async with running(KubeletController(node.node_state, node.plugin, KubeletSettings(enabled=True)).run()) as task:
        await said(log, "import of grpc")
        assert not task.done()
    assert "grpc" in log.one("device plugin cannot be served").fields["fault"]


async def test_a_bug_of_ours_ends_one_session_and_not_the_daemon(folder: Path, log: Log) -> None:
    node, bugs = KubeletNode(folder), [ZeroDivisionError()]

    def keyed(key: bytes) -> None:
        raise bugs.pop()

    node.plugin.keyed = keyed  # type: ignore[method-assign] # that is the bug
    async with Kubelet(folder) as kubelet, node:
        await kubelet.wait_healthy(GPU, 4)
    assert isinstance(log.one("bug: kubelet session ended").exception, ZeroDivisionError)


async def test_mig_devices_without_a_resource_are_an_error_of_the_log(folder: Path, log: Log) -> None:
    """Said once for each layout; no two plugins of ours ever have one name."""
    raw = {
        "pool": [{"name": "kind", "device": ["1"]}],
        "kubelet": {"mig_strategy": "mixed", "resources": {"nvidia.com/kind": "kind"}},
    }
    policy = parse_policy(raw, "p.toml")
    async with Kubelet(folder) as kubelet, KubeletNode(folder, policy.kubelet, tick_s=0.02) as node:
        node.node_state.use(replace(policy, kubelet=node.settings))
        node.put_gpus([mig_gpu(0, ["1g.5gb"]), mig_gpu(1, ["1g.5gb"]), gpu(2)])
        await kubelet.wait_healthy("nvidia.com/mig-1g.5gb", 1)
        await until(lambda: bool(log.warnings()))
        await asyncio.sleep(0.2)  # ten more looks
        assert [each.resource for each in node.statuses()] == [GPU, "nvidia.com/mig-1g.5gb", "nvidia.com/kind"]
        node.put_gpus([mig_gpu(0, ["1g.5gb"]), gpu(1), gpu(2)])
        await kubelet.wait_healthy("nvidia.com/kind", 1)
    line = log.one("MIG devices are not offered to the kubelet")
    assert "not offered 1 MIG device of nvidia.com/kind" in line.fields["fault"]
    assert line.level == "ERROR"


async def test_a_bug_of_ours_outside_a_session_ends_no_daemon_either(
    folder: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said once, however often it is met; what was served before is served on."""
    bugs: list[Exception] = []

    def lapse() -> None:
        if bugs:
            raise bugs[0]

    async with Kubelet(folder) as kubelet, KubeletNode(folder, tick_s=0.02) as node:
        monkeypatch.setattr(node.plugin, "lapse", lapse)
        await kubelet.wait_healthy(GPU, 4)
        bugs.append(ZeroDivisionError("ours"))
        await until(lambda: bool(log.warnings()))
        await asyncio.sleep(0.2)  # ten more looks
        assert await kubelet.allocate(GPU, kubelet.healthy(GPU)[:1])
        bugs.clear()
        node.connected(False)
        await kubelet.wait_healthy(GPU, 0)
    assert isinstance(log.one("bug: device plugin not up to date").exception, ZeroDivisionError)


def controller_on(folder: Path, node: PluginNode, **fields: object) -> KubeletController:
    places = {"dir": "device-plugins", "registry_dir": "plugins_registry", "cdi_dir": "cdi"}
    made = {key: str(folder / name) for key, name in places.items()} | fields
    return KubeletController(node.node_state, node.plugin, KubeletSettings(enabled=True, **made))  # type: ignore[arg-type]  # **


def keyless(folder: Path) -> tuple[PluginNode, Path]:
    node = PluginNode()
    node.plugin.kubelet.key = None
    return node, folder / "device-plugins" / KEY_FILE


def test_the_key_is_read_before_the_runtime_is_asked(folder: Path) -> None:
    """Synchronize tells whose containers there are, and comes once."""
    node, file = keyless(folder)
    controller_on(folder, node).begin()
    assert node.plugin.kubelet.key is None
    assert node.plugin.kubelet.awaited
    file.parent.mkdir()
    controller_on(folder, node).begin()
    assert node.plugin.kubelet.key == file.read_bytes()


async def test_the_key_is_read_where_no_endpoint_can_be(folder: Path) -> None:
    """A missing registry_dir, say."""
    node, file = keyless(folder)
    controller = controller_on(folder, node, registration=Registration.WATCHER)
    controller.begin()
    async with running(controller.run()):
        file.parent.mkdir()
        controller.changed()
        await until(lambda: node.plugin.kubelet.key is not None)
        assert not (folder / "plugins_registry").exists()


def test_a_key_that_cannot_be_had_is_said_once(folder: Path, log: Log) -> None:
    _, file = keyless(folder)
    file.parent.mkdir()
    file.symlink_to("/dev/zero")
    key = TokenKey(file.parent)
    assert [key.look() for _ in range(3)] == [None] * 3
    assert "cannot be signed without it" in log.one("device plugin not started yet").fields["fault"]
    file.unlink()
    assert key.look() == file.read_bytes()
    assert key.look() is None


def test_an_off_one_touches_nothing(folder: Path) -> None:
    node, file = keyless(folder)
    file.parent.mkdir()
    KubeletController(node.node_state, node.plugin, KubeletSettings(dir=str(file.parent))).begin()
    assert not file.exists()
    assert not node.plugin.kubelet.awaited


async def test_nothing_is_healthy_from_the_moment_that_we_are_asked_to_stop(folder: Path) -> None:
    """What is in flight is answered for seconds yet; a pod admitted meanwhile would meet nobody."""
    state = StateFolder(folder)
    state.open()
    with contextlib.closing(state):
        daemon = Daemon(state, state.key(), PolicyFile(None, {"kubelet.enabled": True}, state.path), FOUR_GPUS)
        devices = daemon._kubelet.devices
        daemon._ready()
        assert devices.hindrance() != NOT_CONNECTED
        daemon._asked_to_stop(signal.SIGTERM)
        assert devices.hindrance() == NOT_CONNECTED
        daemon._ready()  # a connection that was being made
        assert devices.hindrance() == NOT_CONNECTED


@pytest.mark.parametrize("text", [None, "[kubelet]\n[[", "[dra]\nenabled = true\n"], ids=["none", "broken", "one way"])
async def test_a_start_without_a_usable_policy_opens_neither_of_two_ways(folder: Path, text: str | None) -> None:
    """Nor does a reload, which only mends what decisions are by: pools of either way are read at the start."""
    state, policy = StateFolder(folder / "state"), folder / "policy.toml"
    state.open()
    policy.write_text(text or "")
    ways: dict[str, str | bool] = {"kubelet.enabled": True, "dra.enabled": True, "kubelet.registration": "register"}
    with contextlib.closing(state):
        daemon = Daemon(state, state.key(), PolicyFile(str(policy), ways, state.path), FOUR_GPUS)
        daemon._ready()
        daemon._plugin.kubelet.key = bytes(32)
        assert daemon._kubelet.devices.hindrance().startswith("the policy is broken: ")
        policy.write_text(
            '[kubelet]\npool = "a"\n[dra]\npool = "b"\n'
            '[[pool]]\nname = "a"\ndevice = ["0"]\n[[pool]]\nname = "b"\ndevice = ["1"]\n'
        )
        await daemon._read_again()
        assert daemon._state.policy.fault == ""
        assert daemon._kubelet.devices.hindrance() == OFFERED_TWICE
        assert daemon._dra._listener() is None
        assert daemon._dra.fault.endswith("; then restart nri-gpu")
        daemon = Daemon(state, state.key(), PolicyFile(str(policy), ways, state.path), FOUR_GPUS)
        assert OFFERED_TWICE not in (daemon._kubelet.devices.hindrance(), daemon._dra.fault)


async def test_without_a_kubelet_annotations_do_not_wait_for_one(folder: Path) -> None:
    node = ExternalNode()
    settings = replace(INJECTING, enabled=False, podresources=str(folder / "none.sock"))
    async with running(KubeletController(node.node_state, node.plugin, settings).run()):
        await until(lambda: node.create(container("device=2", of="local")) == (uuid(2),))


@pytest.mark.parametrize(
    "settings",
    [
        KubeletSettings(),
        replace(INJECTING, enabled=False, podresources=""),
        KubeletSettings(enabled=True, podresources=""),
    ],
    ids=["off", "no socket named", "no socket named for our own"],
)
async def test_where_it_is_not_wanted_nobody_asks(settings: KubeletSettings) -> None:
    node = ExternalNode()
    node.plugin.external.pods = None
    KubeletController(node.node_state, node.plugin, settings)
    assert node.plugin.external.pods is None


async def test_with_claims_the_kubelet_is_asked_what_nvidias_driver_prepared(folder: Path, log: Log) -> None:
    """Of a new sandbox at once. A kubelet that hangs lets go of nothing."""
    node, theirs = PluginNode(), container(of="theirs")
    async with PodResourcesServer(folder) as kubelet:
        settings = KubeletSettings(podresources=str(kubelet.socket))
        controller = KubeletController(node.node_state, node.plugin, settings, claims=True)
        async with running(controller.run()):
            await until(lambda: node.plugin.external.pods and node.plugin.external.pods.settled)
            kubelet.give("theirs", {"main": {}}, namespace="ml")
            kubelet.prepared["ml", "theirs"] = {"main": [("node1", "gpu-6")]}
            node.sandbox_created(theirs)
            await until(lambda: node.taken() == {uuid(1)})
            assert kubelet.asked == ["List", "Get ml/theirs"]

            kubelet.delay_s = 60.0
            node.sandbox_created(container(of="next"))
            await said(log, "DEADLINE_EXCEEDED")
            node.end_pod(theirs)
            assert node.taken() == {uuid(1)}
