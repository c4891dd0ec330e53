"""Registration and what undoes it: each trap of the reference, with a kubelet that has it."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.kubelet.registered_socket import RIVALS_AFTER
from nri_gpu.kubelet.required_device import KEY_FILE
from nri_gpu.policy.kubelet_settings import KubeletSettings, Registration
from tests.support.builders import gpus, uuid
from tests.support.kubelet import Kubelet, Rival
from tests.support.kubelet_nodes import GPU, QUICK, KubeletNode, said, until
from tests.support.log import Line, Log

WATCHER = KubeletSettings(registration=Registration.WATCHER)
both = pytest.mark.parametrize("settings", [KubeletSettings(), WATCHER], ids=["register", "watcher"])


def ours(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("nri-gpu-*.sock"))


async def test_options_are_answered_while_register_waits(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, KubeletNode(folder):
        await kubelet.wait_healthy(GPU, 4)
        assert kubelet.clients[GPU].options.get_preferred_allocation_available
        assert not kubelet.clients[GPU].options.pre_start_required
        assert kubelet.registered == 1
        assert not log.warnings()


async def test_no_kubelet_for_minutes_is_an_error_once(folder: Path, log: Log) -> None:
    phrase = "not registered with the kubelet, trying again"
    kubelet = Kubelet(folder)
    kubelet.refuse = "not yet"
    async with KubeletNode(folder, times=replace(QUICK, stuck=0.05)), kubelet:
        await until(lambda: any(line.level == "ERROR" for line in log.said(phrase)))
        refused = kubelet.refused
        await kubelet.wait("more tries", lambda: kubelet.refused > refused + 2)
        kubelet.refuse = ""
        await kubelet.wait_healthy(GPU, 4)
    [error] = [line for line in log.said(phrase) if line.level == "ERROR"]
    assert error.fields["resource"] == GPU
    assert "Start the kubelet" in error.fields["fix"]


async def test_a_kubelet_that_comes_is_not_made_to_wait_for_an_old_back_off(folder: Path) -> None:
    """After a reboot it admits the node's pods within a second, and not all of its first answers are good."""
    kubelet = Kubelet(folder)
    kubelet.refuse = "not yet"
    async with KubeletNode(folder, times=replace(QUICK, longest_wait=60.0)):
        await asyncio.sleep(2)  # the wait grows
        async with kubelet:
            await kubelet.wait("a try", lambda: kubelet.refused > 0)
            kubelet.refuse = ""
            async with asyncio.timeout(0.5):
                await kubelet.wait_healthy(GPU, 4)


@pytest.mark.parametrize("keyed_by_resource", [True, False], ids=["before 135437", "after 135437"])
async def test_restarts_and_broken_streams_are_mended(folder: Path, keyed_by_resource: bool) -> None:
    async with Kubelet(folder, keyed_by_resource=keyed_by_resource) as kubelet, KubeletNode(folder):
        await kubelet.wait_healthy(GPU, 4)
        names = {kubelet.clients[GPU].path.name}
        for undo in (kubelet.restart, lambda: kubelet.end_stream(GPU), kubelet.restart):
            await undo()
            await kubelet.wait_healthy(GPU, 4)
            names.add(kubelet.clients[GPU].path.name)
        assert len(names) == 4  # a fresh name each time
        assert ours(kubelet.dir) == [kubelet.clients[GPU].path.name]
    assert ours(kubelet.dir) == []


@both
async def test_the_folder_is_made_anew(folder: Path, settings: KubeletSettings) -> None:
    async with Kubelet(folder) as kubelet, KubeletNode(folder, settings=settings):
        await kubelet.wait_healthy(GPU, 4)
        made_anew = kubelet.registry if settings is WATCHER else kubelet.dir
        await kubelet.stop()
        shutil.rmtree(made_anew, ignore_errors=True)  # beside us, who remove our own socket
        await kubelet.start()
        await kubelet.wait_healthy(GPU, 4)
        assert ours(made_anew) == [kubelet.clients[GPU].path.name]


async def test_a_refusal_is_said_once_and_tried_again(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, KubeletNode(folder):
        kubelet.refuse = "requested API version is not supported"
        await kubelet.restart()
        await kubelet.wait("second refusal", lambda: kubelet.refused >= 2)
        kubelet.refuse = ""
        await kubelet.wait_healthy(GPU, 4)
    (line,) = (line for line in log.warnings() if "version" in line.fields["fault"])
    assert line.fields["fault"].endswith("UNKNOWN: requested API version is not supported")


def known(log: Log) -> list[Line]:
    return [line for line in log.warnings() if line.fields["fault"].endswith("known, and not asked again")]


async def test_the_plugin_watcher_finds_us(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, KubeletNode(folder, settings=WATCHER):
        await kubelet.wait_healthy(GPU, 4)
        first = kubelet.clients[GPU].path
        assert first.parent == kubelet.registry
        await until(lambda: len(log.said("registered with the kubelet")) == 1)
        await kubelet.restart()
        await kubelet.wait_healthy(GPU, 4)
        for times in (1, 2):  # the same fault twice, with success between: it is news each time
            seen = kubelet.refused
            kubelet.refuse = "a refused plugin is known, and not asked again"
            await kubelet.restart()
            await kubelet.wait("second refusal", lambda seen=seen: kubelet.refused >= seen + 2)  # by a socket made anew
            await kubelet.wait("warning", lambda times=times: len(known(log)) >= times)  # said after the answer
            assert len(known(log)) == times
            kubelet.refuse = ""
            await kubelet.wait_healthy(GPU, 4)
            await until(lambda: len(log.said("registered with the kubelet")) == 2 + times)  # noqa: B023


async def test_a_watcher_that_looks_elsewhere_is_told_of(folder: Path, log: Log) -> None:
    (folder / "plugins_registry").mkdir()
    async with KubeletNode(folder, settings=WATCHER, times=replace(QUICK, watched_within=0.1)):
        await said(log, "kubelet.registry_dir")
        async with Kubelet(folder) as kubelet:  # and our socket is there all the while
            await kubelet.wait_healthy(GPU, 4)


async def test_a_kubelet_that_never_asks_for_devices(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet:
        kubelet.deaf = True
        async with KubeletNode(folder, times=replace(QUICK, watched_within=0.1)):
            await said(log, "never asked for its devices")
            kubelet.deaf = False
            await kubelet.wait_healthy(GPU, 4)


@both
async def test_names_that_a_kubelet_refuses(folder: Path, log: Log, settings: KubeletSettings) -> None:
    resource = "gpus.kubernetes.io/gpu"
    async with Kubelet(folder) as kubelet, KubeletNode(folder, settings=replace(settings, resource=resource)) as node:
        await said(log, f"the ResourceName '{resource}' is invalid")
        assert kubelet.registered == 0
        assert "is invalid" in node.statuses()[0].fault


@both
async def test_a_kubelet_of_another_version(folder: Path, log: Log, settings: KubeletSettings) -> None:
    kubelet = Kubelet(folder)
    kubelet.version = "v1"
    async with kubelet, KubeletNode(folder, settings=settings):
        await said(log, "requested API version 'v1beta1' is not supported")
        assert kubelet.registered == 0
        kubelet.version = "v1beta1"
        await kubelet.wait_healthy(GPU, 4)


@both
async def test_a_path_too_long_is_said_in_a_sentence(folder: Path, log: Log, settings: KubeletSettings) -> None:
    deep = folder / ("d" * 90)
    for name in ("device-plugins", "plugins_registry"):
        (deep / name).mkdir(parents=True)
    async with KubeletNode(deep, settings=settings) as node:
        await said(log, "longer than the 107 bytes")
        assert node.plugin.kubelet.key == (deep / "device-plugins" / KEY_FILE).read_bytes()  # NRI needs it all the same


@both
async def test_nvidias_plugin_is_not_fought(folder: Path, log: Log, settings: KubeletSettings) -> None:
    async with Kubelet(folder) as kubelet:
        rival = socket.socket(socket.AF_UNIX)
        rival.bind(str(kubelet.dir / "nvidia-gpu.sock"))
        rival.listen()
        async with KubeletNode(folder, settings=settings) as node:
            await said(log, "NVIDIA's device plugin")
            assert kubelet.registered == 0
            assert ours(kubelet.registry) == []  # nothing for the watcher to find
            assert [(each.since_s, "NVIDIA's" in each.fault) for each in node.statuses()] == [(None, True)]
            rival.close()  # what it left behind is of nobody
            await kubelet.wait_healthy(GPU, 4)
            # The kubelet may have the list before its answer to the registration is read.
            await until(lambda: node.statuses()[0].registered)
            assert [each.fault for each in node.statuses()] == [""]


@both
@pytest.mark.parametrize("keyed_by_resource", [True, False], ids=["before 135437", "after 135437"])
async def test_nvidias_plugin_that_comes_later_is_not_fought(
    folder: Path, log: Log, keyed_by_resource: bool, settings: KubeletSettings
) -> None:
    """The kubelet keeps our stream open, and its end could take theirs along: so we stay, and say nothing more."""
    async with Kubelet(folder, keyed_by_resource=keyed_by_resource) as kubelet:
        async with KubeletNode(folder, settings=settings) as node:
            await kubelet.wait_healthy(GPU, 4)
            old = kubelet.clients[GPU]
            async with Rival(kubelet.dir, GPU, ["GPU-theirs"]) as rival:
                await rival.register()
                await said(log, "NVIDIA's device plugin")
                assert [each.since_s for each in node.statuses()] == [None]
                messages = old.messages
                node.put_gpus(gpus(2))
                await asyncio.sleep(10 * QUICK.look_every)  # that nothing comes has no event
                assert kubelet.healthy(GPU) == ["GPU-theirs"]
                assert (old.messages, old.ended) == (messages, False)
            await kubelet.wait("ours again", lambda: kubelet.healthy(GPU) == [uuid(0), uuid(1)])
            assert old.ended
        assert len(log.said("not registered with the kubelet, trying again")) == 1


async def test_stale_sockets_of_ours_go_and_those_of_others_stay(folder: Path) -> None:
    async with Kubelet(folder) as kubelet:
        for name in ("nri-gpu-gpu-dead.sock", "other.sock"):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(kubelet.dir / name))
        async with KubeletNode(folder):
            await kubelet.wait_healthy(GPU, 4)
            assert ours(kubelet.dir) == [kubelet.clients[GPU].path.name]
            assert (kubelet.dir / "other.sock").exists()


async def test_a_rival_of_the_same_name_is_suspected(folder: Path, log: Log) -> None:
    async with Kubelet(folder) as kubelet, KubeletNode(folder):
        for _ in range(RIVALS_AFTER):
            await kubelet.wait_healthy(GPU, 4)
            await kubelet.end_stream(GPU)
        await kubelet.wait_healthy(GPU, 4)
        assert any("another device plugin" in line.fields["fault"] for line in log.warnings())
