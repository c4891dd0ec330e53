"""What the daemon answers the driver process: views that wait for changes, claims that outlive it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.allocation import AllocatedDevice, ContainerDevices, DynamicDevice, PodDevices
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.health import Health, HealthState
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid, PreparedClaim
from nri_gpu.dra.claims_file import FILE_NAME, ClaimsFile
from nri_gpu.dra.daemon_client import DaemonAwayError, DaemonClient
from nri_gpu.dra.dra_controller import NOT_CONNECTED, DraController
from nri_gpu.dra.markers import Marker, read_marker
from nri_gpu.dra.questions import (
    AskPrepare,
    AskUnprepare,
    AskView,
    ClaimFault,
    DriverReport,
    NodeView,
    Prepared,
    PreparedName,
    Question,
    Unprepared,
)
from nri_gpu.ledger.events import ClaimsInQuestion, DevicesAllocated
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.health_settings import OnBad
from nri_gpu.policy.kubelet_settings import FailClosed, KubeletSettings
from nri_gpu.policy.model import Policy
from tests.support import builders as make
from tests.support.kubelet_nodes import PluginNode, until
from tests.support.ledgers import after
from tests.support.log import Log
from tests.support.plugin import KEY
from tests.support.podresources import PodResourcesServer
from tests.support.running import running

UID: Final = ClaimUid("8c5e6c5a-7d4f-4a53-8d7a-3f1c9f1f1e01")
OTHER: Final = ClaimUid("8c5e6c5a-7d4f-4a53-8d7a-3f1c9f1f1e02")
NEW_RUNTIME: Final = Configured("containerd", "2.1.9", "0.10.0", 2000, "")


def claim(*devices: str, uid: ClaimUid = UID, **fields: Any) -> AllocatedClaim:  # noqa: ANN401 - any other field
    results = tuple(AllocatedResult(request=f"r{at}", pool="node", device=each) for at, each in enumerate(devices))
    default = {"uid": uid, "namespace": "ml", "name": "train", "pods": {PodUid("p"): "a"}, "results": results}
    return AllocatedClaim(**{**default, **fields})


class Setting(Struct):
    """A daemon's controller on a node of four GPUs, and its client."""

    folder: Path
    node: PluginNode
    controller: DraController
    client: DaemonClient

    async def view(self, after: int = 0) -> NodeView:
        answer = await self.client.ask(AskView(after))
        assert isinstance(answer, NodeView)
        return answer

    async def prepare(self, of: AllocatedClaim) -> Prepared | ClaimFault:
        answer = await self.client.ask(AskPrepare(of))
        assert isinstance(answer, (Prepared, ClaimFault))
        return answer

    @property
    def claims(self) -> dict[ClaimUid, list[str]]:
        claims = self.node.node_state.ledger.claims
        return {uid: [each.device for each in found.devices] for uid, found in claims.items()}

    def recorded(self) -> dict[ClaimUid, PreparedClaim]:
        return dict(ClaimsFile(self.folder).read())


def policy(**fields: Any) -> Policy:  # noqa: ANN401 - of a policy
    return replace(Policy.default(), **{"dra": DraSettings(enabled=True), **fields})


@asynccontextmanager
async def serving(
    folder: Path, using: Policy | None = None, *, connected: bool = True, lasting_s: float = 60.0, wait_s: float = 0.1
) -> AsyncIterator[Setting]:
    using = using or policy()
    node = PluginNode(using)
    controller = DraController(folder, node.node_state, node.plugin, using, lasting_s=lasting_s, wait_s=wait_s)
    controller.configured(NEW_RUNTIME)
    controller.connected(connected)
    async with running(controller.run()):
        await asyncio.sleep(0)
        yield Setting(folder, node, controller, DaemonClient(folder))


async def test_a_runtime_that_may_drop_cdi_devices_gets_no_claims_until_policy_says_that_it_does_not(
    tmp_path: Path,
) -> None:
    old = Configured("containerd", "v1.7.24~ds1", "", 0, "")
    async with serving(tmp_path, lasting_s=0.0) as at:
        at.controller.configured(old)
        refused = await at.prepare(claim("gpu-4"))
        assert isinstance(refused, ClaimFault)
        assert "enable_cdi = true" in refused.sentence
        assert not at.claims
        assert {taint.value for each in (await at.view()).devices for taint in each.taints} == {"cdi-off"}
        at.controller.configured(NEW_RUNTIME)
        assert isinstance(await at.prepare(claim("gpu-4")), Prepared)
    told = policy(dra=DraSettings(enabled=True, cdi_enabled=True))
    (tmp_path / "told").mkdir()
    async with serving(tmp_path / "told", told) as at:
        at.controller.configured(old)
        assert isinstance(await at.prepare(claim("gpu-4")), Prepared)


async def test_a_view_names_the_folders_and_devices(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        view = await at.view()
        assert view.known
        assert [each.name for each in view.devices] == ["gpu-7", "gpu-6", "gpu-5", "gpu-4"]
        expected = ("gpu.nri.io", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/var/run/cdi")
        assert (view.driver, view.dir, view.registry_dir, view.cdi_dir) == expected
        assert not any(each.taints for each in view.devices)


async def test_a_view_is_kept_while_nothing_changes(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        first = await at.view()
        assert await at.view(first.number) == first
        at.node.node_state.put_module("580.95.05")  # it is another node, and the same view
        assert await at.view(first.number) == first


async def test_a_change_is_told_at_once_and_once(tmp_path: Path) -> None:
    async with serving(tmp_path, wait_s=20.0) as at:
        first = await at.view()
        waiting = asyncio.create_task(at.view(first.number))
        state = at.node.node_state
        for index in range(4):
            await asyncio.sleep(0)
            device = AllocatedDevice("nvidia.com/gpu", make.uuid(index))
            state.commit(after(state.ledger, DevicesAllocated(1.0, (device,))))
        second = await waiting
        assert second.number == first.number + 1
        assert [len(each.taints) for each in second.devices] == [1, 1, 1, 1]


async def test_health_policy_and_claims_change_the_view(tmp_path: Path) -> None:
    async with serving(tmp_path, wait_s=20.0) as at:
        state, seen = at.node.node_state, await at.view()
        bad = make.gpu(0, health=Health(HealthState.BAD, 1.0, "XID 79"), unavailable="XID 79")
        state.put_inventory(make.inventory([bad, *make.gpus()[1:]], simulated=True))
        seen = await at.view(seen.number)
        assert [each.effect for each in seen.devices[0].taints] == ["NoSchedule"]
        stopping = replace(state.policy, health=replace(state.policy.health, containers=OnBad.STOP))
        state.use(stopping)
        seen = await at.view(seen.number)
        assert [each.effect for each in seen.devices[0].taints] == ["NoExecute"]
        assert isinstance(await at.prepare(claim("gpu-6")), Prepared)
        seen = await at.view(seen.number)
        assert seen.claims == (PreparedName(UID, "ml", "train"),)
        uids = at.node.plugin.claims.in_question([make.pod("another")], state.ledger)
        at.node.plugin.apply(ClaimsInQuestion(0.0, uids))
        assert (await at.view(seen.number)).claims == (PreparedName(UID, "ml", "train", reread=True),)


async def test_a_view_has_the_gpus_and_the_driver_as_nvml_told_them_last(tmp_path: Path) -> None:
    async with serving(tmp_path, wait_s=20.0) as at:
        state, first = at.node.node_state, await at.view()
        known = replace(state.node.inventory, driver_version="580.95.05")
        state.put_inventory(Inventory(taken_at=0, fault="the driver does not answer"))
        assert (first.gpus, len(first.gpus or ())) == ((await at.view()).gpus, 4)
        state.put_inventory(known)
        seen = await at.view(first.number)
        assert (seen.gpus, seen.driver_version) == (first.gpus, "580.95.05")


async def test_a_view_has_no_gpus_before_nvml_has_answered(tmp_path: Path) -> None:
    node = PluginNode(policy())
    node.node_state.put_inventory(Inventory(taken_at=0, fault="nri-gpu has just started"))
    controller = DraController(tmp_path, node.node_state, node.plugin, policy(), lasting_s=0.0)
    view = controller.view()
    assert (view.known, view.gpus) == (True, None)


async def test_a_claim_in_question_again_is_told_at_once(tmp_path: Path) -> None:
    """Though the view that was given last says the same: the claim was read since."""
    async with serving(tmp_path, wait_s=20.0) as at:
        plugin = at.node.plugin
        questioned = ClaimsInQuestion(0.0, frozenset({UID}))
        assert isinstance(await at.prepare(claim("gpu-6")), Prepared)
        plugin.apply(questioned)
        seen = await at.view()
        assert isinstance(await at.prepare(claim("gpu-6")), Prepared)
        plugin.apply(questioned)
        async with asyncio.timeout(5.0):
            assert (await at.view(seen.number)).claims == (PreparedName(UID, "ml", "train", reread=True),)


async def test_a_daemon_s_numbers_are_not_those_of_the_one_before(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        first = await at.view()
    async with serving(tmp_path) as at:
        assert (await at.view(first.number)).number != first.number


async def test_a_runtime_that_is_restarted_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        first = await at.view()
        at.controller.connected(False)
        assert await at.view(first.number) == first
        assert await at.prepare(claim("gpu-7")) == NOT_CONNECTED


async def test_a_node_that_cannot_grant_for_long_is_tainted(tmp_path: Path) -> None:
    async with serving(tmp_path, lasting_s=0.0) as at:
        first = await at.view()
        at.controller.connected(False)
        second = await at.view(first.number)
        assert [each.value for device in second.devices for each in device.taints] == ["no-runtime"] * 4
        at.controller.connected(True)
        assert (await at.view(second.number)).devices == first.devices


@pytest.mark.parametrize(("lasting_s", "known"), [(60.0, False), (0.0, True)])
async def test_nothing_is_known_before_the_node_could_grant(tmp_path: Path, lasting_s: float, known: bool) -> None:
    async with serving(tmp_path, connected=False, lasting_s=lasting_s) as at:
        assert (await at.view()).known is known


async def test_what_the_driver_process_says_of_itself_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        assert (at.controller.asked_s, at.controller.silent_s()) == (None, None)
        report = DriverReport(4, ("DRADeviceTaints",), "the API server is away")
        await at.client.ask(AskView(0, report))
        await at.client.ask(AskView())  # who asks for a view alone says nothing of itself
        assert at.controller.asked_s
        assert 0 < (at.controller.silent_s() or 0) < 60
        assert at.controller.report == report


async def test_what_nvidias_driver_prepared_on_this_node_keeps_our_claims_away(tmp_path: Path) -> None:
    """By a taint that evicts nobody; a claim that the scheduler had allocated before is refused."""
    of = make.pod("theirs")
    async with serving(tmp_path) as at:
        await at.client.ask(AskView(0, DriverReport(node="node-1")))
        for pool, there in {"node-2": [], "node-1": [make.uuid(1)]}.items():
            prepared = (ContainerDevices("main", prepared=(DynamicDevice(pool, "gpu-6"),)),)
            at.node.plugin.kubelet_told(of, PodDevices("ml", "theirs", prepared))
            assert [*at.node.taken()] == there
        (tainted,) = [each for each in (await at.view()).devices if each.taints]
        assert (tainted.name, [each.effect for each in tainted.taints]) == ("gpu-6", ["NoSchedule"])
        refused = await at.prepare(claim("gpu-6"))
        assert isinstance(refused, ClaimFault)
        assert "ml/theirs (by a claim of gpu.nvidia.com, gpu-6)" in refused.sentence
        assert isinstance(await at.prepare(claim("gpu-4")), Prepared)


@pytest.mark.parametrize("step_s", [-86400, 86400])
async def test_the_next_daemons_view_has_a_higher_number_when_the_time_of_day_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    async with serving(tmp_path) as at:
        before = (await at.view()).number
    there = time.time() + step_s
    monkeypatch.setattr(time, "time_ns", lambda: int(there * 1e9))
    async with serving(tmp_path) as at:
        assert before < (await at.view()).number < before + 600_000_000


async def test_a_claim_is_prepared_once_and_released_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        for _ in range(2):
            answer = await at.prepare(claim("gpu-7", "gpu-5"))
            assert isinstance(answer, Prepared)
            name = "NRI_GPU_CLAIM_8C5E6C5A_7D4F_4A53_8D7A_3F1C9F1F1E01"
            assert [each for each, _ in answer.markers] == [f"{name}_0", f"{name}_1"]
            assert [read_marker(*each, KEY) for each in answer.markers] == [Marker(UID, 0), Marker(UID, 1)]
            assert at.claims == {UID: ["gpu-7", "gpu-5"]}
            assert at.recorded().keys() == {UID}
        for _ in range(2):
            assert await at.client.ask(AskUnprepare(UID)) == Unprepared()
            assert not at.claims
            assert not at.recorded()


async def test_its_pods_are_those_of_now(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        await at.prepare(claim("gpu-7"))
        await at.prepare(claim("gpu-7", pods={PodUid("p"): "a", PodUid("q"): "b"}))
        assert at.recorded()[UID].pods == {PodUid("p"): "a", PodUid("q"): "b"}


@pytest.mark.parametrize(
    ("device", "sentence", "of"),
    [
        (
            "gpu-7",
            "claim ml/train, and asked for here in exclusive mode: wait until it is free, or delete the pods",
            ("gpu-busy", make.uuid(0)),
        ),
        ("gpu-9", "no such device", ("no-such-gpu", "")),
    ],
)
async def test_a_claim_that_cannot_be_prepared_is_told_so(
    tmp_path: Path, device: str, sentence: str, of: tuple[str, str]
) -> None:
    async with serving(tmp_path) as at:
        await at.prepare(claim("gpu-7"))
        answer = await at.prepare(claim(device, uid=OTHER))
        assert isinstance(answer, ClaimFault)
        assert sentence in answer.sentence
        holders = (PreparedName(UID, "ml", "train"),) if device == "gpu-7" else ()
        assert (answer.passing, answer.holders) == (False, holders)
        assert (answer.code, answer.uuid) == of
        assert at.claims == {UID: ["gpu-7"]}
        assert at.recorded().keys() == {UID}


async def test_claims_at_once_get_no_gpu_twice(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        uids = [ClaimUid(f"claim-{number}") for number in range(8)]
        wanted = [claim(f"gpu-{7 - number % 4}", uid=uid) for number, uid in enumerate(uids)]
        answers = await asyncio.gather(*map(at.prepare, wanted))
        assert sum(isinstance(each, Prepared) for each in answers) == 4
        assert sorted(device for found in at.claims.values() for device in found) == [
            "gpu-4",
            "gpu-5",
            "gpu-6",
            "gpu-7",
        ]
        assert at.recorded().keys() == at.claims.keys()


async def test_the_kubelet_says_which_pods_of_a_group_have_its_claim(tmp_path: Path) -> None:
    async with PodResourcesServer(tmp_path) as kubelet:
        using = policy(kubelet=KubeletSettings(podresources=str(kubelet.socket)))
        async with serving(tmp_path, using) as at:
            await at.prepare(claim("gpu-7", pods={}, groups={"g-1": "gang"}))
            for name in ("a", "thief"):
                kubelet.give(name, {"main": {}}, "ml")
                kubelet.claimed["ml", name] = {"main": [f"gpu.nri.io/claim={UID}-0"] if name == "a" else []}
                came = pb.StateChangeEvent(event=pb.RUN_POD_SANDBOX, pod=make.pod_message(make.pod(name)))
                at.node.plugin.lifecycle(came.SerializeToString())
            pods = at.node.plugin.claims.pods
            assert pods
            await until(lambda: bool(at.recorded()[UID].pods) and not pods.questions)
            assert at.recorded()[UID].pods == {PodUid("uid-a"): "a"}
            assert at.node.node_state.ledger.claims == at.recorded()
        # What it said is known to the next daemon, and nobody is asked where no group has a claim.
        asked = len(kubelet.asked)
        async with serving(tmp_path, using) as at:
            assert at.controller.recalled()[UID].pods == {PodUid("uid-a"): "a"}
            await at.prepare(claim("gpu-6", uid=OTHER))
        assert len(kubelet.asked) == asked


async def test_a_group_s_claim_is_refused_where_the_kubelet_is_not_asked(tmp_path: Path) -> None:
    async with serving(tmp_path, policy(kubelet=KubeletSettings(podresources=""))) as at:
        answer = await at.prepare(claim("gpu-7", groups={"g-1": "gang"}))
        assert isinstance(answer, ClaimFault)
        assert "kubelet.podresources" in answer.sentence
        assert not at.claims


async def test_what_cannot_be_written_is_not_reserved(tmp_path: Path, log: Log) -> None:
    async with serving(tmp_path) as at:
        (tmp_path / f".{FILE_NAME}.new").mkdir()
        question: Question
        for question in (AskPrepare(claim("gpu-7")), AskPrepare(claim("gpu-7"))):
            answer = await at.client.ask(question)
            assert isinstance(answer, ClaimFault)
            assert "cannot write its state folder" in answer.sentence
            assert at.claims == {}
        (tmp_path / f".{FILE_NAME}.new").rmdir()
        assert isinstance(await at.prepare(claim("gpu-7")), Prepared)
        (tmp_path / f".{FILE_NAME}.new").mkdir()
        assert isinstance(await at.client.ask(AskUnprepare(UID)), ClaimFault)
        assert at.claims == {UID: ["gpu-7"]}
    assert len(log.said("prepared claims not written; the claim is not changed")) == 3


REQUIRED = {
    "a new runtime": (NEW_RUNTIME, FailClosed.AUTO, True),
    "an old one": (replace(NEW_RUNTIME, nri_version="", request_timeout_ms=0), FailClosed.AUTO, False),
    "policy": (NEW_RUNTIME, FailClosed.GUARD, False),
}


@pytest.mark.parametrize(("runtime", "fail_closed", "required"), REQUIRED.values(), ids=REQUIRED)
async def test_the_mount_is_for_runtimes_that_remove_it(
    tmp_path: Path, runtime: Configured, fail_closed: FailClosed, required: bool
) -> None:
    async with serving(tmp_path, policy(kubelet=KubeletSettings(fail_closed=fail_closed))) as at:
        at.controller.configured(runtime)
        answer = await at.prepare(claim("gpu-7"))
        assert isinstance(answer, Prepared)
        assert answer.required is required


async def test_the_settings_of_the_start_hold(tmp_path: Path) -> None:
    async with serving(tmp_path, policy(dra=DraSettings(enabled=True, replicas=2))) as at:
        at.node.node_state.use(policy())
        await at.prepare(claim("gpu-7"))
        assert isinstance(await at.prepare(claim("gpu-7", uid=OTHER)), Prepared)
        assert all(each.shared for each in (await at.view()).devices)


async def test_a_claim_is_released_although_the_runtime_is_away(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        await at.prepare(claim("gpu-7"))
        at.controller.connected(False)
        assert await at.client.ask(AskUnprepare(UID)) == Unprepared()
        assert not at.recorded()


async def test_a_claim_that_is_released_before_its_containers_end_is_logged(tmp_path: Path, log: Log) -> None:
    async with serving(tmp_path) as at:
        pods = {PodUid("uid-train"): "train"}
        answer = await at.prepare(claim("gpu-7", pods=pods))
        assert isinstance(answer, Prepared)
        main = make.container(markers=dict(answer.markers))
        assert at.node.create(main) == (make.uuid(0),)
        await at.prepare(claim("gpu-6", uid=OTHER, pods=pods))
        for uid in (OTHER, UID, UID):
            await at.client.ask(AskUnprepare(uid))
        line = log.one("claim released while containers have its GPUs")
        assert (line.fields["name"], line.fields["container_name"]) == ("train", "train/main")
        at.node.stop(main)
        await at.prepare(claim("gpu-7", pods=pods))
        await at.client.ask(AskUnprepare(UID))
    assert len(log.said("claim released while containers have its GPUs")) == 1


async def test_prepared_claims_are_recalled(tmp_path: Path) -> None:
    async with serving(tmp_path) as at:
        await at.prepare(claim("gpu-7"))
        prepared = at.node.node_state.ledger.claims
    async with serving(tmp_path) as at:
        assert at.controller.recalled() == prepared
    async with serving(tmp_path, policy(dra=DraSettings())) as at:
        assert at.controller.recalled() == {}


async def test_nothing_is_served_where_policy_does_not_enable_it(tmp_path: Path, log: Log) -> None:
    async with serving(tmp_path, policy(dra=DraSettings())) as at:
        with pytest.raises(DaemonAwayError):
            await at.view()
    both = policy(kubelet=KubeletSettings(enabled=True))
    async with serving(tmp_path, both) as at:
        with pytest.raises(DaemonAwayError):
            await at.view()
        assert at.controller.fault.startswith("dra.pool: ")
    assert log.one("DRA driver process not served").fields["fault"].startswith("dra.pool: ")
    async with serving(tmp_path / "gone") as at:
        assert "no such file" in at.controller.fault
