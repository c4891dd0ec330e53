"""A claim from the API server to the CDI specification and back, and the sentence of each way that this can fail."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.domain.allocation import REQUIRED_DESTINATION, REQUIRED_SOURCE
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.resource_claim import ClaimUid
from nri_gpu.dra.questions import AskPrepare, AskUnprepare, ClaimFault, PreparedName
from nri_gpu.system.storage import boot_id
from tests.support.dra_node import TIMES, DraNode
from tests.support.log import Log
from tests.support.resource_claims import POD, UID, consumer, resource_claim, result

ASKED = PreparedName(ClaimUid(UID), "ml", "train")
FILE = f"nri-gpu-claim-{UID}.json"


@pytest.fixture
def node(folder: Path) -> DraNode:
    return DraNode(folder)


async def prepared(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    await node.claims.prepare(ASKED)


async def sentence(node: DraNode, asked: PreparedName = ASKED) -> str:
    with pytest.raises(NriGpuError) as caught:
        await node.claims.prepare(asked)
    return str(caught.value)


async def test_the_specification_has_a_marker_a_device_and_the_mount_that_keeps_it_from_starting(node: DraNode) -> None:
    node.api_server.put(resource_claim(result("gpu-0"), result("gpu-1")))
    devices = await node.claims.prepare(ASKED)
    # Not by the driver's name: one below nvidia.com would pass for a device of another component.
    assert [each.cdi for each in devices] == [f"gpu.nri.io/claim={UID}-0", f"gpu.nri.io/claim={UID}-1"]
    assert node.files() == [FILE]
    assert (node.cdi / FILE).stat().st_mode & 0o777 == 0o600
    written = json.loads((node.cdi / FILE).read_text())
    assert (written["kind"], written["cdiVersion"]) == ("gpu.nri.io/claim", "0.6.0")
    assert [each["name"] for each in written["devices"]] == [f"{UID}-0", f"{UID}-1"]
    stem = "NRI_GPU_CLAIM_" + UID.upper().replace("-", "_")
    assert written["devices"][1]["containerEdits"] == {"env": [f"{stem}_1=v1;claim={UID};device=1;mac=ab"]}
    (mount,) = written["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == (REQUIRED_SOURCE, REQUIRED_DESTINATION)


async def test_without_the_mount_where_the_daemon_does_not_want_it(node: DraNode) -> None:
    node.daemon.required = False
    await prepared(node)
    assert "containerEdits" not in json.loads((node.cdi / FILE).read_text())


async def test_the_same_claim_again_gets_the_same_answer_and_pods_of_now(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    first = await node.claims.prepare(ASKED)
    inode = (node.cdi / FILE).stat().st_ino
    node.api_server.put(resource_claim(pods={POD: "web", "pod-2": "api"}))
    assert await node.claims.prepare(ASKED) == first
    assert (node.cdi / FILE).stat().st_ino == inode  # the runtime has nothing to read again
    last = node.daemon.asked[-1]
    assert isinstance(last, AskPrepare)
    assert set(last.claim.pods.values()) == {"web", "api"}


async def test_a_claim_that_is_reserved_for_another_kind_holds_nothing_and_keeps_what_it_had(node: DraNode) -> None:
    jobs = resource_claim()
    jobs["status"]["reservedFor"].append(consumer("jobs", "batch", uid="j-1"))
    node.api_server.put(jobs)
    assert "status.reservedFor: it is reserved for jobs.batch" in await sentence(node)
    assert not node.daemon.asked
    await prepared(node)
    node.api_server.put(jobs)
    await node.claims.refresh(ASKED)
    assert list(node.daemon.prepared) == [UID]
    assert node.files() == [FILE]


async def test_one_claim_is_worked_on_by_one_caller_at_a_time_and_several_at_once(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    await asyncio.gather(*(node.claims.prepare(ASKED) for _ in range(4)))
    assert node.daemon.busy == 1
    others = [PreparedName(ClaimUid(f"uid-{at}"), "ml", f"claim-{at}") for at in range(4)]
    for each in others:
        node.api_server.put(resource_claim(uid=each.uid, name=each.name))
    await asyncio.gather(*map(node.claims.prepare, others))
    assert node.daemon.busy == 4
    assert len(node.files()) == 5


async def test_a_fault_that_passes_is_waited_for_and_one_that_stays_is_told_in_time(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    node.daemon.faults = [ClaimFault("GPU 0 is being released", passing=True)] * 2
    await node.claims.prepare(ASKED)
    node.daemon.faults = [ClaimFault("GPU 0 is being released", passing=True)] * 50
    assert await sentence(node) == "GPU 0 is being released"
    assert node.daemon.faults, "the kubelet would wait for all of them"


HOLDER = PreparedName(ClaimUid("uid-holder"), "ml", "holder")
HELD = ClaimFault("gpu-0: it is held exclusively by claim ml/holder", holders=(HOLDER,))


ENDING: dict[str, dict[str, Any] | None] = {
    "gone": None,
    "made anew": resource_claim(uid="another", name="holder"),
    "being deleted": {
        **(running := resource_claim(uid=HOLDER.uid, name="holder")),
        "metadata": {**running["metadata"], "deletionTimestamp": "2026-11-25T00:00:00Z"},
    },
    "reserved for nobody": resource_claim(uid=HOLDER.uid, name="holder", pods={}),
}


@pytest.mark.parametrize("holder", ENDING.values(), ids=ENDING)
async def test_a_gpu_whose_holder_is_ending_is_waited_for(node: DraNode, holder: dict[str, Any] | None) -> None:
    node.api_server.put(resource_claim())
    if holder:
        node.api_server.put(holder)
    node.daemon.faults = [HELD] * 2
    await node.claims.prepare(ASKED)
    assert node.api_server.reads == 2  # the claim, and its holder once
    node.daemon.faults = [HELD] * 50
    assert await sentence(node) == HELD.sentence
    assert node.daemon.faults, "the kubelet would wait for all of them"


async def held(node: DraNode) -> None:
    """The holder is prepared, and the claim that wants its GPU is allocated."""
    node.api_server.put(resource_claim(uid=HOLDER.uid, name=HOLDER.name))
    await node.claims.prepare(HOLDER)
    node.daemon.holder = HOLDER
    node.api_server.put(resource_claim())


@pytest.mark.parametrize("now", [None, ENDING["made anew"]], ids=["gone", "made anew"])
async def test_a_holder_that_the_api_server_has_no_more_is_released_at_once(
    node: DraNode, log: Log, now: dict[str, Any] | None
) -> None:
    """A kubelet that lost its state never unprepares it."""
    await held(node)
    del node.api_server.claims["ml", HOLDER.name]
    if now:
        node.api_server.put(now)
    await node.claims.prepare(ASKED)
    assert list(node.daemon.prepared) == [UID]
    assert node.files() == [FILE]
    assert log.one("ResourceClaim released although the kubelet did not unprepare it").fields["name"] == HOLDER.name


async def test_a_container_of_a_holder_that_was_released_is_waited_for(node: DraNode) -> None:
    """Its pod was deleted by force, and the kubelet ends it."""
    await held(node)
    del node.api_server.claims["ml", HOLDER.name]
    node.daemon.lingers = 2
    await node.claims.prepare(ASKED)
    node.daemon.lingers = 50
    with pytest.raises(NriGpuError, match="held by ml/web"):
        await node.claims.prepare(
            PreparedName(ClaimUid("uid-late"), *node.api_server.put(resource_claim(uid="uid-late"))[:2])
        )
    assert node.daemon.lingers == 49, "no claim ends"


async def test_a_holder_that_another_caller_works_on_is_released_after_that(node: DraNode) -> None:
    await held(node)
    del node.api_server.claims["ml", HOLDER.name]
    first, *_ = await asyncio.gather(node.claims.prepare(ASKED), node.claims.unprepare(HOLDER.uid))
    assert first
    assert list(node.daemon.prepared) == [UID]


UNSURE = {
    "being deleted": ENDING["being deleted"],
    "reserved for nobody": {**(freed := resource_claim(uid=HOLDER.uid, name="holder")), "status": {}},
    "not a claim": {**freed, "metadata": {"name": "holder", "namespace": "ml"}},
    "of no UID": {**freed, "metadata": {**freed["metadata"], "uid": ""}},
    "403": "forbidden: no relationship found between node 'a' and this object",
    "no answer": None,
}


@pytest.mark.parametrize("answer", UNSURE.values(), ids=UNSURE)
async def test_a_holder_is_released_on_no_other_word(folder: Path, answer: dict[str, Any] | str | None) -> None:
    node = DraNode(folder, replace(TIMES, daemon=0.2))
    await held(node)
    match answer:
        case dict():
            node.api_server.claims["ml", HOLDER.name] = answer
        case str():
            node.api_server.refused["ml", HOLDER.name] = answer
        case None:
            node.api_server.mute.add(("ml", HOLDER.name))
    assert await sentence(node) == "gpu-0 is held by claim holder"
    assert list(node.daemon.prepared) == [HOLDER.uid]


async def test_a_gpu_whose_holder_goes_on_is_not_waited_for(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    node.api_server.put(resource_claim(uid=HOLDER.uid, name="holder"))
    node.api_server.put(resource_claim(uid="uid-ending", name="ending", pods={}))
    node.daemon.faults = [
        HELD,
        replace(HELD, holders=(PreparedName(ClaimUid("uid-ending"), "ml", "ending"), HOLDER)),
        replace(HELD, holders=()),
    ]
    for _ in range(3):
        assert await sentence(node) == HELD.sentence
    assert node.daemon.faults == []


@pytest.mark.parametrize(
    ("says", "waits"), [("no relationship found between node 'a' and this object", True), ("", False)]
)
async def test_the_kubelet_s_credentials_read_only_claims_of_its_pods(node: DraNode, says: str, waits: bool) -> None:
    node.api_server.put(resource_claim())
    node.api_server.refused["ml", "holder"] = f"forbidden: {says}"
    node.daemon.faults = [HELD] * 2
    if waits:
        await node.claims.prepare(ASKED)
    else:
        assert await sentence(node) == HELD.sentence
    assert len(node.daemon.faults) == (0 if waits else 1)


async def test_what_lasts_is_asked_for_more_and_more_rarely(folder: Path) -> None:
    node = DraNode(folder, replace(TIMES, passing=1.0))
    node.api_server.put(resource_claim())
    node.daemon.faults = [ClaimFault("this node's GPUs are not known yet", passing=True)] * 50
    await sentence(node)
    assert 3 < len(node.daemon.asked) < 15


async def test_a_daemon_that_is_restarted_meanwhile_is_waited_for(folder: Path) -> None:
    node = DraNode(folder, replace(TIMES, passing=20.0))
    node.api_server.put(resource_claim())
    node.daemon.away = True
    preparing = asyncio.create_task(node.claims.prepare(ASKED))
    await asyncio.sleep(0.05)
    assert not preparing.done()
    node.daemon.away = False
    assert await preparing
    node.daemon.away = True
    releasing = asyncio.create_task(node.claims.unprepare(ASKED.uid))
    await asyncio.sleep(0.05)
    node.daemon.away = False
    await releasing
    assert node.files() == []


async def test_a_daemon_that_is_busy_is_asked_again(folder: Path) -> None:
    node = DraNode(folder, replace(TIMES, daemon=0.05, passing=20.0))
    node.api_server.put(resource_claim())
    node.daemon.silent = True
    preparing = asyncio.create_task(node.claims.prepare(ASKED))
    await asyncio.sleep(0.2)
    node.daemon.silent = False
    assert await preparing


async def test_a_fault_that_does_not_pass_is_told_at_once_and_leaves_nothing(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    node.daemon.faults = [ClaimFault("gpu-9 is not a device of this node")]
    assert await sentence(node) == "gpu-9 is not a device of this node"
    assert node.files() == []
    assert len(node.daemon.asked) == 1


async def test_an_api_server_that_restarts_is_asked_again(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    node.api_server.busy = 3
    await node.claims.prepare(ASKED)
    assert node.api_server.reads == 4
    node.api_server.busy = 1_000_000
    assert await sentence(node) == "ResourceClaim ml/train: the API server answered 503"


async def test_who_did_not_answer_is_named(node: DraNode) -> None:
    node.api_server.put(resource_claim())
    node.api_server.silent = True
    assert await sentence(node) == "ResourceClaim ml/train: the API server did not answer within 1 s"
    node.api_server.silent, node.daemon.silent = False, True
    assert "the daemon (`nri-gpu run`) did not answer within 2 s" in await sentence(node)
    node.daemon.silent, node.daemon.away = False, True
    assert await sentence(node) == "nobody listens on dra.sock"
    assert node.files() == []


async def test_a_claim_that_is_gone_or_another_one_now_is_not_prepared(node: DraNode) -> None:
    assert await sentence(node) == "ResourceClaim ml/train: the API server has none of this name: it was deleted"
    node.api_server.put(resource_claim(uid="another"))
    assert "another claim was created with its name" in await sentence(node)
    assert not node.daemon.asked


async def test_a_folder_that_cannot_be_written_is_named(node: DraNode) -> None:
    node.cdi.write_text("in the way")
    node.api_server.put(resource_claim())
    assert await sentence(node) == f"{node.cdi / FILE} cannot be written: File exists"


async def test_unprepare_leaves_nothing_also_of_a_claim_that_is_gone_or_unknown(node: DraNode) -> None:
    await prepared(node)
    node.api_server.claims.clear()
    for _ in range(2):
        await node.claims.unprepare(ASKED.uid)
    await node.claims.unprepare(ClaimUid("never-prepared"))
    assert node.files() == []
    assert not node.daemon.prepared


async def test_a_refresh_takes_new_pods_and_mends_a_lost_specification(node: DraNode) -> None:
    await prepared(node)
    (node.cdi / FILE).unlink()
    node.api_server.put(resource_claim(pods={"pod-2": "api"}))
    await node.claims.refresh(ASKED)
    last = node.daemon.asked[-1]
    assert isinstance(last, AskPrepare)
    assert list(last.claim.pods.values()) == ["api"]
    assert node.files() == [FILE]


async def test_a_refresh_releases_what_the_api_server_has_no_more(node: DraNode, log: Log) -> None:
    freed = resource_claim()
    freed["status"] = {}
    for now in (None, resource_claim(uid="another"), freed, resource_claim(result(pool="node-2"))):
        await prepared(node)
        node.api_server.claims.clear()
        if now:
            node.api_server.put(now)
        await node.claims.refresh(ASKED)
        assert node.files() == []
        assert not node.daemon.prepared
    assert len(log.said("ResourceClaim released although the kubelet did not unprepare it")) == 4


async def test_a_refresh_releases_nothing_while_the_api_server_does_not_tell(node: DraNode) -> None:
    await prepared(node)
    node.api_server.put({**resource_claim(), "status": "of another version"})
    with pytest.raises(NriGpuError, match="cannot be read"):
        await node.claims.refresh(ASKED)
    node.api_server.silent = True
    with pytest.raises(NriGpuError, match="did not answer"):
        await node.claims.refresh(ASKED)
    assert node.files() == [FILE]
    assert AskUnprepare(ASKED.uid) not in node.daemon.asked


async def test_a_refresh_does_not_prepare_what_was_unprepared_meanwhile(node: DraNode) -> None:
    await prepared(node)
    refreshing = asyncio.create_task(node.claims.unprepare(ASKED.uid))
    await asyncio.gather(refreshing, node.claims.refresh(ASKED))
    assert not node.daemon.prepared
    assert node.files() == []


@pytest.mark.parametrize("step_s", [-86400, 86400])
async def test_a_sweep_removes_only_our_specifications_from_before_this_boot(
    node: DraNode, log: Log, step_s: float
) -> None:
    """What the daemon of this boot lost stays, so that its containers are refused with our sentence.

    step_s: by which the time of day was set since the files were written.
    """
    await prepared(node)
    whole = (node.cdi / FILE).read_text()
    before = whole.replace(boot_id(), "before")
    (node.cdi / FILE).write_text(before)
    (node.cdi / "nri-gpu-claim-left.json").write_text(before)
    (node.cdi / "nri-gpu-claim-others.json").write_text(before.replace("gpu.nri.io/claim", "gpu.example.com/claim"))
    (node.cdi / "nri-gpu.json").write_text(before)
    (node.cdi / "nri-gpu-claim-lost.json").write_text(whole)
    (node.cdi / "nri-gpu-claim-odd.json").write_text('{"annotations": 5}')
    there = time.time() - step_s
    for each in node.cdi.iterdir():
        os.utime(each, (there, there))
    await node.claims.sweep()
    stay = [FILE, *(f"nri-gpu-claim-{name}.json" for name in ("lost", "odd", "others")), "nri-gpu.json"]
    assert node.files() == stay
    node.daemon.away = True
    with pytest.raises(NriGpuError):
        await node.claims.sweep()
    assert FILE in node.files()
