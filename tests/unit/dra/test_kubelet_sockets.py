"""The sockets that a kubelet dials: registration and what undoes it, and the calls of both versions."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.dra.kubelet_sockets import KubeletSockets
from nri_gpu.dra.questions import ClaimFault
from tests.support.dra_kubelet import ClaimFaultError, DraKubelet
from tests.support.dra_node import QUICK, DraNode
from tests.support.kubelet_nodes import until
from tests.support.log import Log
from tests.support.resource_claims import CONFIG, DRIVER, UID, opaque, resource_claim, result
from tests.support.running import running

BOTH = pytest.mark.parametrize("version", ["v1.DRAPlugin", "v1beta1.DRAPlugin"])
NOT_REGISTERED = "DRA driver not registered, trying again"


@asynccontextmanager
async def opened(sockets: KubeletSockets) -> AsyncIterator[None]:
    """As a process serves it, from beginning to end."""
    await sockets.hold()
    async with running(sockets.run()):
        yield
    sockets.release()


@asynccontextmanager
async def served(folder: Path, *versions: str) -> AsyncIterator[tuple[DraKubelet, DraNode]]:
    node, kubelet = DraNode(folder), DraKubelet(folder, versions or ("v1.DRAPlugin",))
    async with kubelet, opened(node.sockets()):
        await kubelet.wait_for_driver(DRIVER)
        yield kubelet, node


@BOTH
async def test_a_claim_is_prepared_and_unprepared_in_both_versions(folder: Path, version: str) -> None:
    async with served(folder, version) as (kubelet, node):
        claim = node.api_server.put(resource_claim(result("gpu-2", "gpus/large", shareID="s-1")))
        (device,) = (await kubelet.prepare(DRIVER, claim))[UID]
        assert (list(device.request_names), device.pool_name, device.device_name) == (["gpus"], "node-1", "gpu-2")
        assert list(device.cdi_device_ids) == [f"gpu.nri.io/claim={UID}-0"]
        assert device.share_id == "s-1"
        await kubelet.unprepare(DRIVER, claim)
        assert node.files() == []
        assert kubelet.driver(DRIVER).version == version.partition(".")[0]


async def test_the_newest_version_that_both_know_is_used(folder: Path) -> None:
    async with served(folder, "v1beta1.DRAPlugin", "v1.DRAPlugin") as (kubelet, _):
        assert kubelet.driver(DRIVER).version == "v1"


async def test_an_empty_call_succeeds_as_a_liveness_probe_needs(folder: Path) -> None:
    async with served(folder) as (kubelet, node):
        node.daemon.away = node.api_server.silent = True
        assert await kubelet.prepare(DRIVER) == {}
        await kubelet.unprepare(DRIVER)


async def test_each_bad_claim_has_an_error_of_its_own_and_the_good_ones_are_prepared(folder: Path) -> None:
    async with served(folder) as (kubelet, node):
        put = node.api_server.put
        good = put(resource_claim())
        foreign = put(resource_claim({**result(), "driver": "dra.net"}, uid="uid-foreign", name="foreign"))
        config = [opaque({**CONFIG, "mode": "shar"})]
        malformed = put(resource_claim(uid="uid-malformed", name="malformed", config=config))
        gone = ("ml", "gone", "uid-gone")
        made_anew = (*put(resource_claim(uid="uid-new", name="anew"))[:2], "uid-old")
        odd = (*put(resource_claim(uid="../x", name="odd"))[:2], "../x")
        answers = await kubelet.answers(DRIVER, good, foreign, malformed, gone, made_anew, odd, good)
        errors = {uid: answer.error.removeprefix("nri-gpu: ResourceClaim ml/") for uid, answer in answers.items()}
        assert errors == {
            UID: "",
            "uid-foreign": "foreign: status.allocation.devices.results: none is of the driver gpu.nri.io on node-1",
            "uid-malformed": "malformed: status.allocation.devices.config[0] (FromClaim): mode: unknown mode "
            '"shar", known: exclusive, shared, mps (did you mean "shared"?)',
            "uid-gone": "gone: the API server has none of this name: it was deleted",
            "uid-old": "anew: metadata.uid: it was deleted, and another claim was created with its name",
            "../x": "odd: its UID is not of letters, digits and dashes",
        }
        assert set(node.daemon.prepared) == {UID}
        assert node.files() == [f"nri-gpu-claim-{UID}.json"]


async def test_what_the_daemon_refuses_is_told_and_not_kept(folder: Path, log: Log) -> None:
    async with served(folder) as (kubelet, node):
        claim = node.api_server.put(resource_claim())
        node.daemon.faults = [ClaimFault("gpu-0 is held by pod ml/other [gpu-busy]" + "x" * 2000)]
        with pytest.raises(ClaimFaultError, match="gpu-0 is held by pod ml/other") as caught:
            await kubelet.prepare(DRIVER, claim)
        assert len(str(caught.value)) < 1024
        await kubelet.prepare(DRIVER, claim)
    assert log.one("ResourceClaim not prepared").fields["name"] == "train"
    assert log.one("ResourceClaim prepared").fields["gpus"] == 1


async def test_a_bug_is_an_error_of_that_claim_with_a_traceback_in_the_log(folder: Path, log: Log) -> None:
    async with served(folder) as (kubelet, node):
        node.api_server.claims["ml", "train"] = {"metadata": {1, 2}}  # no JSON can be made of it
        answers = await kubelet.answers(DRIVER, ("ml", "train", UID))
        assert answers[UID].error == "nri-gpu: a bug (TypeError): report it with the log of `nri-gpu dra`"
    assert isinstance(log.one("bug: request for a ResourceClaim failed").exception, TypeError)


async def test_unprepare_without_the_daemon_fails_for_the_kubelet_to_try_again(folder: Path) -> None:
    async with served(folder) as (kubelet, node):
        claim = node.api_server.put(resource_claim())
        await kubelet.prepare(DRIVER, claim)
        node.daemon.away = True
        with pytest.raises(ClaimFaultError, match="nobody listens"):
            await kubelet.unprepare(DRIVER, claim)
        assert node.files() == [f"nri-gpu-claim-{UID}.json"]
        node.daemon.away = False
        await kubelet.unprepare(DRIVER, claim, ("ml", "odd", "../x"))
        assert not node.daemon.prepared


async def test_a_refusal_is_said_once_and_answered_by_a_new_socket(folder: Path, log: Log) -> None:
    kubelet = DraKubelet(folder)
    kubelet.refuse = "not yet"
    async with kubelet, opened(DraNode(folder).sockets()):
        await kubelet.wait("a second refusal", lambda: kubelet.refused >= 2)
        kubelet.refuse = ""
        await kubelet.wait_for_driver(DRIVER)
    (line,) = log.warnings()
    assert (line.text, line.fields["fault"]) == (NOT_REGISTERED, "the kubelet did not register it: not yet")


@pytest.mark.parametrize("which", ["plugins", "plugins_registry"])
async def test_a_folder_that_is_removed_and_made_anew_is_served_again(folder: Path, which: str) -> None:
    async with served(folder) as (kubelet, node):
        await kubelet.stop()
        shutil.rmtree(folder / which)
        await kubelet.start()
        claim = node.api_server.put(resource_claim())
        while not node.daemon.prepared:  # the kubelet tries again
            with contextlib.suppress(ClaimFaultError):
                await kubelet.prepare(DRIVER, claim)
            await asyncio.sleep(0.01)


async def test_a_kubelet_that_comes_late_or_has_other_folders_is_waited_for(folder: Path, log: Log) -> None:
    node, kubelet = DraNode(folder), DraKubelet(folder)
    (folder / "plugins").mkdir()
    async with opened(node.sockets(replace(QUICK, watched_within=0.0))):
        await until(lambda: len(log.warnings()) == 1)
        (folder / "plugins_registry").mkdir()
        await until(lambda: len(log.warnings()) == 2)
        async with kubelet:
            await kubelet.wait_for_driver(DRIVER)
    first, second = log.warnings()
    assert first.fields["fault"].startswith("there is no folder")
    assert "is kubelet.registry_dir the folder it looks in?" in second.fields["fault"]


async def test_the_sockets_of_a_killed_process_are_replaced_and_ours_removed(folder: Path) -> None:
    sockets = [folder / "plugins" / DRIVER / "dra.sock", folder / "plugins_registry" / f"{DRIVER}-reg.sock"]
    for path in sockets:
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    async with served(folder):
        pass
    assert not any(path.exists() for path in sockets)


async def test_the_next_process_takes_over_when_the_one_before_ends(folder: Path, log: Log) -> None:
    async with DraKubelet(folder) as kubelet:
        older, newer = DraNode(folder), DraNode(folder)
        sockets = newer.sockets()
        async with opened(older.sockets()):
            await kubelet.wait_for_driver(DRIVER)
            waiting = asyncio.create_task(sockets.hold())
            await until(lambda: bool(log.said("waiting for another nri-gpu dra to exit")))
            claim = older.api_server.put(resource_claim())
            await kubelet.prepare(DRIVER, claim)
            assert not waiting.done()
        await waiting
        newer.api_server.put(resource_claim())
        async with opened(sockets):
            await kubelet.wait("the newer one", lambda: kubelet.registered == 2)
            await kubelet.prepare(DRIVER, claim)
            assert newer.daemon.prepared


async def test_a_path_too_long_for_a_socket_is_explained(folder: Path, log: Log) -> None:
    node = DraNode(folder)
    node.daemon.view = replace(node.daemon.view, dir=str(folder / ("x" * 90)))
    (folder / ("x" * 90)).mkdir()
    async with opened(node.sockets()):
        await until(lambda: bool(log.warnings()))
    assert "shorten dra.driver or dra.dir in the policy" in log.warnings()[0].fields["fault"]
