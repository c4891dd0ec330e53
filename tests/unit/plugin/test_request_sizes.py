"""Too large to be listed: refused on the wire, counted over the life of a connection, and waited out after it."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.convert import ENTRIES_MAX
from nri_gpu.nri.session import Step
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.nri_service import PLUGIN, PluginService
from nri_gpu.plugin.request_sizes import ADJUSTMENT_BYTES, Sizes
from nri_gpu.plugin.transport import ConnectionLimits
from nri_gpu.policy.plugin_settings import REQUEST_BYTES, PluginSettings
from nri_gpu.ttrpc import RequestReceived, Status, StatusCode
from nri_gpu.ttrpc.frames import RECEIVE_MAX, StreamId
from tests.support import hostile
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.nri_messages import FLAVOURS, NRI_0_6, NRI_0_8, Flavour
from tests.support.plugin import Bench, ServedPlugin
from tests.support.scripted_runtime import ScriptedRuntime
from tests.unit.plugin.raw import cut_off

each_version = pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
PLAIN: Final = nri.pod("plain")


def filled(size_bytes: int, of: pb.PodSandbox = PLAIN, name: str = "main") -> pb.Container:
    return nri.container(of, name=name, id=f"{of.id}.{name}", env=["FILLER=" + "x" * size_bytes])


async def refused(runtime: ScriptedRuntime, of: pb.PodSandbox, made: pb.Container) -> str:
    answer = await runtime.create(of, made)
    assert isinstance(answer, Status), answer
    assert answer.code is StatusCode.FAILED_PRECONDITION
    return answer.message


@each_version
async def test_a_container_over_the_limit_is_refused_asked_or_not(folder: Path, log: Log, flavour: Flavour) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(flavour)
        for of in (PLAIN, nri.asking("1")):
            sentence = await refused(runtime, of, filled(REQUEST_BYTES, of))
            assert sentence.startswith("nri-gpu [request-too-large]: the runtime describes it in ")
            assert f"plugin.request_bytes allows {REQUEST_BYTES}" in sentence
            assert "enableServiceLinks: false" in sentence
        assert not isinstance(await runtime.create(PLAIN, filled(REQUEST_BYTES - 2_000)), Status)
        served.request_bytes = 0  # the policy's; none
        assert not isinstance(await runtime.create(PLAIN, filled(2 * REQUEST_BYTES)), Status)
    assert [line.fields["code"] for line in log.said("container refused")] == ["request-too-large"] * 2
    assert log.said("container refused")[0].fields["pod_name"] == PLAIN.name


@each_version
async def test_pods_over_the_limit_and_starts_of_what_was_never_measured(folder: Path, flavour: Flavour) -> None:
    pod = nri.pod("large", annotations={"filler": "x" * REQUEST_BYTES})
    container = filled(REQUEST_BYTES + ADJUSTMENT_BYTES)
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(flavour)
        for event, of, made in ((Event.RUN_POD_SANDBOX, pod, None), (Event.START_CONTAINER, PLAIN, container)):
            assert (await runtime.event(event, of, made)).code is StatusCode.FAILED_PRECONDITION
        assert (await runtime.event(Event.RUN_POD_SANDBOX, PLAIN)).ok
        assert (await runtime.event(Event.START_CONTAINER, PLAIN, filled(REQUEST_BYTES))).ok


async def fill(
    runtime: ScriptedRuntime, size_bytes: int, most: int, of: pb.PodSandbox = PLAIN, prefix: str = "c"
) -> tuple[int, str]:
    """Create containers of one pod until one is refused: how many there are, and the sentence."""
    for number in range(most):
        answer = await runtime.create(of, filled(size_bytes, of, f"{prefix}{number}"))
        if isinstance(answer, Status):
            return number, answer.message
    return most, ""


@pytest.mark.parametrize("size_bytes", [400_000, 57_000, 20_000, 4_000])
async def test_a_pod_that_alone_could_not_be_listed_is_refused(folder: Path, size_bytes: int) -> None:
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(NRI_0_8)
        made, sentence = await fill(runtime, size_bytes, 2_000)
        assert (4 << 20) // (size_bytes + 4_000) <= made <= (4 << 20) // size_bytes
        assert sentence.startswith("nri-gpu [list-too-large]: its pod comes to 4")
        assert "share of 38127 bytes (plugin.max_pods = 110" in sentence
        # One that is gone makes room.
        gone = filled(size_bytes, name="c0")
        assert (await runtime.event(Event.REMOVE_CONTAINER, PLAIN, gone)).ok
        assert (await fill(runtime, size_bytes, 1))[0]
        # It keeps no other pod from its share.
        others = [nri.pod(f"other-{number}") for number in range(20)]
        assert [await fill(runtime, 16_000, 2, of) for of in others] == [(2, "")] * 20


async def test_a_list_that_others_left_unsendable_is_told_and_kept_from_growing(folder: Path, log: Log) -> None:
    """Two pods of one part each can be listed beside twelve others, and not beside four."""
    large, others = [nri.pod(f"large-{n}") for n in range(2)], [nri.pod(f"other-{n}") for n in range(12)]
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(NRI_0_8)
        assert [await fill(runtime, 20_000, 1, of) for of in others] == [(1, "")] * 12
        assert [await fill(runtime, 57_000, 69, of) for of in large] == [(69, "")] * 2
        assert served.sizes.fault == ""
        for of in others[4:]:
            assert (await runtime.event(Event.STOP_CONTAINER, of, filled(20_000, of, "c0"))).ok
            assert (await runtime.event(Event.REMOVE_POD_SANDBOX, of)).ok
        await asyncio.sleep(0)
        said = log.one("the list of containers is too large for the runtime")
        assert said.level == "ERROR"
        assert "remove ml/large-" in said.fields["fault"]
        assert served.sizes.fault.count("bytes)") == 1  # one of the two is enough
        # Until it can be sent again, a pod above its share may have nothing more, and others their share.
        made, sentence = await fill(runtime, 20_000, 9, others[0], "more")
        assert made == 0
        assert "the largest pods are ml/large-" in sentence
        assert await fill(runtime, 10_000, 1, others[1], "more") == (1, "")
        for number in range(69):
            assert (await runtime.event(Event.STOP_CONTAINER, large[0], filled(57_000, large[0], f"c{number}"))).ok
        assert (await runtime.event(Event.REMOVE_POD_SANDBOX, large[0])).ok
        await asyncio.sleep(0)
        assert served.sizes.fault == ""
        assert await fill(runtime, 20_000, 2, others[0], "more") == (2, "")


async def test_a_pod_above_its_share_is_refused_even_what_would_make_the_list_sendable(folder: Path) -> None:
    """Of one container none is left by the runtime's count; of two, one."""
    large = [nri.pod(f"large-{number}", annotations={"filler": "x" * 62_000}) for number in range(70)]
    async with ServedPlugin(folder) as served:
        runtime = await served.listener.accept()
        await runtime.register(NRI_0_8)
        await runtime.synchronize(large, [filled(500, large[0])], parts=2)
        assert "rounds down to 0" in await refused(runtime, large[0], filled(500, large[0], "more"))
        assert not isinstance(await runtime.create(PLAIN, filled(500)), Status)
        assert not isinstance(await runtime.create(large[0], filled(500, large[0], "more")), Status)


async def test_a_list_without_its_pods_names_them_by_their_labels(folder: Path) -> None:
    """A lone pod is never listed: the runtime's count of pods rounds down to 0."""
    labels = {"io.kubernetes.pod.name": "many", "io.kubernetes.pod.namespace": "ml"}
    there = [filled(60_000, name=f"c{number}") for number in range(90)]
    for each in there:
        each.labels.update(labels)
    part = pb.SynchronizeRequest(containers=there[:69], more=True).SerializeToString()
    async with ServedPlugin(folder, limits=ConnectionLimits(cut_short_waits_s=(0.01,))) as served:
        for _ in range(2):
            runtime = await served.listener.accept()
            await runtime.register(NRI_0_8)
            assert (await runtime.call("Synchronize", part)).status.ok
            rest = pb.SynchronizeRequest(containers=there[69:], more=True).SerializeToString()
            assert (await runtime.call("Synchronize", rest)).status.ok
            runtime.close()
        await served.connected()
        assert "environments and annotations: ml/many (5" in served.away[-1]


async def test_the_list_is_known_from_synchronize(folder: Path, log: Log) -> None:
    there = [filled(390_000, name=f"c{number}") for number in range(10)]
    async with ServedPlugin(folder, request_bytes=300_000) as served:
        runtime = await served.listener.accept()
        await runtime.register(NRI_0_8)
        await runtime.synchronize([PLAIN], there)
        assert "[list-too-large]" in await refused(runtime, PLAIN, filled(290_000, name="more"))
        # Its pod is new, and counts as well.
        assert (await runtime.event(Event.STOP_CONTAINER, PLAIN, there[0])).ok
        assert not isinstance(await runtime.create(PLAIN, filled(290_000, name="more")), Status)
    said = log.said("container is too large to be created again")
    assert len(said) == 10
    assert "ml/plain/c" in said[0].fields["fault"]


async def test_a_pod_without_containers_counts_until_it_is_removed(folder: Path) -> None:
    """An old runtime takes 16 MiB."""
    pods = [nri.pod("annotated", id=f"sandbox-{n}", annotations={"filler": "x" * 250_000}) for n in range(65)]
    other = filled(REQUEST_BYTES - 2_000, name="other")
    async with ServedPlugin(folder) as served:
        runtime = await served.connected(NRI_0_6)
        for pod in pods:
            assert (await runtime.event(Event.RUN_POD_SANDBOX, pod)).ok
        assert not isinstance(await runtime.create(PLAIN, filled(REQUEST_BYTES - 2_000)), Status)
        sentence = await refused(runtime, PLAIN, other)
        assert "[list-too-large]" in sentence
        assert "NRI before 0.7" in sentence
        for pod in pods[:4]:
            assert (await runtime.event(Event.REMOVE_POD_SANDBOX, pod)).ok
        assert not isinstance(await runtime.create(PLAIN, other), Status)


async def test_a_pod_that_is_removed_takes_its_containers_along(folder: Path) -> None:
    """Whether or not the runtime told of their own ends."""
    other = nri.pod("other")
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        before, _ = await fill(runtime, 200_000, 30, other)
        assert before < 30
        assert (await runtime.event(Event.REMOVE_POD_SANDBOX, other)).ok
        assert (await fill(runtime, 200_000, 30))[0] == before


async def test_connections_that_end_inside_synchronize_are_waited_out(folder: Path, log: Log) -> None:
    async with ServedPlugin(folder, limits=ConnectionLimits(cut_short_waits_s=(0.2, 0.4))) as served:
        found = []
        for _ in range(4):
            runtime = await served.listener.accept()
            began = time.monotonic()
            await runtime.register()
            runtime.close()
            found.append(began)
        apart = [later - earlier for earlier, later in pairwise(found)]
        assert apart[0] < 0.2 <= apart[1] < 0.4 <= apart[2]
        runtime = await served.connected()  # and all is forgotten
        assert "does not finish listing" in served.away[-1]
        runtime.close()
        again = await served.listener.accept()
        await again.register()
        again.close()
        await served.listener.accept()
        assert served.away[-1] == "the runtime closed the connection"
    assert log.one("no connection survives Synchronize").level == "ERROR"


async def test_an_end_at_another_moment_is_not_waited_out(folder: Path) -> None:
    async with ServedPlugin(folder, limits=ConnectionLimits(cut_short_waits_s=(60.0,))) as served:
        for _ in range(5):
            runtime = await served.connected()
            runtime.close()
        for _ in range(5):
            (await served.listener.accept()).close()
        await served.connected()


async def test_a_list_whose_rest_cannot_come_is_told_with_its_size(folder: Path, log: Log) -> None:
    length = RECEIVE_MAX + 5_000_000
    async with ServedPlugin(folder, limits=ConnectionLimits(cut_short_waits_s=(0.01,))) as served:
        for _ in range(2):
            runtime = await served.listener.accept()
            await runtime.register(NRI_0_6)
            await runtime.write(cut_off(length))
            await runtime.ended()
        await served.connected(NRI_0_6)
        assert f"the list has {length} bytes" in served.away[-1]
    assert f"{length}" in log.one("no connection survives Synchronize").fields["fault"]


PRIVILEGED: Final = pb.LinuxDeviceCgroup(allow=True, access="rwm")
LOOKS_SO: Final = {
    "as containerd writes it": (PRIVILEGED, True),
    "as OCI may": (pb.LinuxDeviceCgroup(allow=True, type="a"), True),
    "of any number": (
        pb.LinuxDeviceCgroup(allow=True, major=pb.OptionalInt64(value=-1), minor=pb.OptionalInt64(value=-1)),
        True,
    ),
    "one device": (
        pb.LinuxDeviceCgroup(allow=True, type="c", major=pb.OptionalInt64(value=1), minor=pb.OptionalInt64(value=3)),
        False,
    ),
}


@pytest.mark.parametrize(("rule", "privileged"), LOOKS_SO.values(), ids=LOOKS_SO.keys())
async def test_every_live_container_is_known_by_name(
    folder: Path, rule: pb.LinuxDeviceCgroup, privileged: bool
) -> None:
    """Whether it asked or not, from Synchronize and from its creation; what only looks privileged is not."""
    pods = [nri.pod(name) for name in ("there", "made")]
    there, made = (nri.container(of, id=f"{of.id}.main") for of in pods)
    for each in (there, made):
        each.linux.resources.devices.append(rule)
    named = nri.container(pods[1], id="named", env=[f"A={PRIVILEGED.SerializeToString().decode()}"])
    async with ServedPlugin(folder) as served:
        runtime = await served.listener.accept()
        await runtime.handshake(pods=[pods[0]], containers=[there])
        for each in (made, named):
            await runtime.create(pods[1], each)
        await asyncio.sleep(0)
        known = served.sizes.containers()
        assert {id_: (each.pod, each.privileged) for id_, each in known.items()} == {
            there.id: ("there", privileged),
            made.id: ("made", privileged),
            "named": ("made", False),
        }
        assert (await runtime.event(Event.STOP_CONTAINER, pods[1], made)).ok
        await asyncio.sleep(0)
        assert made.id not in served.sizes.containers()


async def test_more_entries_than_are_read(folder: Path) -> None:
    of = nri.asking("1")
    async with ServedPlugin(folder) as served:
        runtime = await served.connected()
        made = nri.container(of)
        made.env.extend(["A"] * (ENTRIES_MAX + 1 - len(made.env)))
        sentence = await refused(runtime, of, made)
        assert f"[request-too-large]: this container has {ENTRIES_MAX + 1} variables" in sentence
        assert (await runtime.call("Shutdown")).status.ok
        assert served.phases() == {}


@pytest.mark.parametrize("field", hostile.FIELDS)
def test_a_field_as_large_as_the_limit_allows_is_answered_in_time(field: str) -> None:
    """`make bench` holds it to 50 ms; here it may take longer, and still no time that a runtime notices."""
    bench = Bench()
    table = PluginService(bench.plugin, lambda _: None, lambda: None, Sizes(PluginSettings, bench.later))
    table.session.step(Step.CONFIGURE)
    payload = hostile.request(field, REQUEST_BYTES)
    began = time.thread_time()
    answer = table.answer(RequestReceived(StreamId(1), PLUGIN, "CreateContainer", payload))
    assert time.thread_time() - began < 0.5
    assert answer.status.code in (StatusCode.OK, StatusCode.FAILED_PRECONDITION)


def test_the_size_of_an_ordinary_container_needs_no_look_at_the_policy() -> None:
    """The guard reads the limit off files, and every container of the node starts through it."""
    asked: list[int] = []

    def settings() -> PluginSettings:
        asked.append(REQUEST_BYTES)
        return PluginSettings()

    sizes = Sizes(settings, lambda action: action(), counts=False)
    assert sizes.start_refusal(nri.create(PLAIN, nri.container(PLAIN))) is None
    assert asked == []
    assert sizes.start_refusal(nri.create(PLAIN, filled(REQUEST_BYTES + ADJUSTMENT_BYTES))) is not None
    assert len(asked) == 1
