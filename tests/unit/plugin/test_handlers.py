"""The plugin on its own: what each request does to the ledger, what is answered, what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.grant import SignedGrant, verify_grant
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri import convert
from nri_gpu.nri.events import Event
from nri_gpu.nri.session import Parts
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import (
    Disarm,
    EnvironmentSettings,
    InventorySettings,
    NamespaceRules,
    Otherwise,
    Policy,
    PrivilegedAction,
    PrivilegedSettings,
    Stale,
)
from nri_gpu.ttrpc import Status, StatusCode
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import KEY, Bench

GRACE_S: Final = 60.0


def create(bench: Bench, of: pb.PodSandbox, made: pb.Container) -> pb.CreateContainerResponse:
    reply = bench.plugin.create_container(nri.create(of, made))
    bench.settle()
    assert isinstance(reply, bytes), reply
    return pb.CreateContainerResponse.FromString(reply)


def refused(bench: Bench, of: pb.PodSandbox, made: pb.Container) -> Status:
    reply = bench.plugin.create_container(nri.create(of, made))
    bench.settle()
    assert isinstance(reply, Status)
    return reply


def tell(bench: Bench, kind: Event, of: pb.PodSandbox, made: pb.Container | None = None) -> bytes | Status:
    """An event by both ways; both must be answered alike."""
    method, payload = nri.event(kind, of, made, own_rpc=True)
    del method
    reply = bench.plugin.lifecycle(payload, kind)
    if kind not in nri.ALWAYS_OWN:
        again = bench.plugin.lifecycle(nri.event(kind, of, made)[1])
        assert again == reply
    bench.settle()
    return reply


def synchronize(bench: Bench, pods: list[pb.PodSandbox], containers: list[pb.Container]) -> None:
    parts = Parts()
    (payload,) = nri.synchronize(pods, containers)
    parts.add(payload)
    bench.plugin.synchronized(parts.listed())


def granted(bench: Bench, claim: str = "1", name: str = "train") -> tuple[pb.PodSandbox, pb.Container]:
    """A container as later requests show it, mark and nodes included."""
    of = nri.asking(claim, name)
    made = nri.container(of)
    return of, nri.adjusted(made, create(bench, of, made))


def test_a_container_that_asks_for_nothing_is_not_even_read(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "request_from_pb", None)
    bench = Bench()
    of = nri.pod()
    assert bench.plugin.create_container(nri.create(of, nri.container(of))) == b""
    assert bench.ledgers == []
    assert log.lines == []


def test_a_grant_is_answered_committed_and_said_in_this_order(log: Log) -> None:
    bench = Bench()
    of = nri.asking("device=0,1")
    payload = nri.create(of, nri.container(of))
    reply = bench.plugin.create_container(payload)
    assert isinstance(reply, bytes)
    assert len(bench.ledgers) == 1
    assert log.lines == []
    bench.settle()
    line = log.one("gpu granted")
    assert line.level == "INFO"
    uuids = [gpu.uuid for gpu in bench.node.gpus[:2]]
    assert line.fields["gpu_uuid"] == ",".join(uuids)
    assert (line.fields["decision"], line.fields["mode"]) == ("inject", "exclusive")
    assert (line.fields["namespace"], line.fields["pod_name"], line.fields["container_name"]) == ("ml", "train", "main")


def test_the_reply_names_nodes_mark_and_uuids() -> None:
    bench = Bench()
    of = nri.asking("device=2")
    reply = create(bench, of, nri.container(of))
    assert [(d.path, d.type, d.major, d.minor) for d in reply.adjust.linux.devices] == [
        ("/dev/nvidia2", "c", 195, 2),
        ("/dev/nvidiactl", "c", 195, 255),
        ("/dev/nvidia-uvm", "c", 1510, 0),
        ("/dev/nvidia-uvm-tools", "c", 1510, 1),
    ]
    assert all(d.HasField("file_mode") and d.HasField("uid") and d.HasField("gid") for d in reply.adjust.linux.devices)
    assert {pair.key: pair.value for pair in reply.adjust.env}["NVIDIA_VISIBLE_DEVICES"] == bench.node.gpus[2].uuid
    assert reply.adjust.annotations[GRANT_KEY].startswith("v1;mode=exclusive;uuid=GPU-")
    assert not reply.adjust.HasField("hooks")


def test_asking_twice_gives_the_same() -> None:
    bench = Bench()
    of = nri.asking("2")
    assert create(bench, of, nri.container(of)) == create(bench, of, nri.container(of))
    assert len(bench.plugin.ledger.entries) == 1


def test_containers_of_one_kind_get_the_same_reply_but_for_their_macs() -> None:
    bench = Bench()
    replies = []
    for name in ("a", "b"):
        of = nri.asking("device=0;mode=shared", name)
        reply = create(bench, of, made := nri.container(of))
        mark = verify_grant(reply.adjust.annotations.pop(GRANT_KEY), PodUid(of.uid), ContainerId(made.id), KEY)
        assert mark == SignedGrant((bench.node.gpus[0].uuid,), Mode.SHARED, bench.node.generation)
        replies.append(reply)
    assert replies[0] == replies[1]


def test_events_of_containers_that_are_nothing_to_us_are_read_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    granted(bench)
    monkeypatch.setattr(convert, "container_from_pb", None)
    of = nri.pod("other")
    for kind in (Event.START_CONTAINER, Event.STOP_CONTAINER, Event.REMOVE_CONTAINER):
        assert tell(bench, kind, of, nri.container(of)) == b""
    assert len(bench.plugin.ledger.entries) == 1


def test_none_is_marked_too() -> None:
    bench = Bench()
    of = nri.asking("none")
    reply = create(bench, of, nri.container(of))
    assert list(reply.adjust.annotations) == [GRANT_KEY]
    assert "mode=none" in reply.adjust.annotations[GRANT_KEY]
    assert not reply.adjust.linux.devices


@pytest.mark.parametrize(
    ("policy", "claim", "code", "words"),
    [
        (Policy.default(), "device=99", StatusCode.FAILED_PRECONDITION, "[no-such-gpu]"),
        (Policy.default(), "5", StatusCode.FAILED_PRECONDITION, "nri-gpu ["),
        (Policy.default(), "many", StatusCode.FAILED_PRECONDITION, "[bad-request]"),
        (
            Policy(namespaces=NamespaceRules(allow=Globs(("other",)))),
            "1",
            StatusCode.PERMISSION_DENIED,
            "[not-allowed]",
        ),
        (Policy.broken("policy.toml:3: plugin.index: bad"), "1", StatusCode.FAILED_PRECONDITION, "plugin.index: bad"),
    ],
)
def test_refusals(log: Log, policy: Policy, claim: str, code: StatusCode, words: str) -> None:
    bench = Bench(policy)
    of = nri.asking(claim)
    status = refused(bench, of, nri.container(of))
    assert status.code is code
    assert words in status.message
    assert status.message.isascii()
    assert len(status.message) <= 700
    assert bench.plugin.ledger.entries == {}
    line = log.one("container refused")
    assert line.fields["decision"] == "refuse"
    assert f"[{line.fields['code']}]" in status.message


def test_ignored_by_policy_passes(log: Log) -> None:
    rules = NamespaceRules(allow=Globs(("other",)), otherwise=Otherwise.IGNORE)
    bench = Bench(Policy(namespaces=rules))
    of = nri.asking("1")
    assert create(bench, of, nri.container(of)) == pb.CreateContainerResponse()
    assert tell(bench, Event.START_CONTAINER, of, nri.container(of)) == b""


def test_disarming_overrides_an_image_that_asks_by_environment() -> None:
    bench = Bench(Policy(environment=EnvironmentSettings(disarm=Disarm.ALL)))
    of = nri.pod()
    reply = create(bench, of, nri.container(of, env=["NVIDIA_VISIBLE_DEVICES=all"]))
    assert [(pair.key, pair.value) for pair in reply.adjust.env] == [("NVIDIA_VISIBLE_DEVICES", "void")]
    assert create(Bench(), of, nri.container(of, env=["NVIDIA_VISIBLE_DEVICES=all"])) == pb.CreateContainerResponse()


def test_a_changed_policy_holds_at_once() -> None:
    bench = Bench()
    of = nri.pod()
    armed = nri.container(of, env=["NVIDIA_VISIBLE_DEVICES=all"])
    assert create(bench, of, armed) == pb.CreateContainerResponse()
    bench.plugin.state.policy = Policy(environment=EnvironmentSettings(disarm=Disarm.ALL))
    assert len(create(bench, of, armed).adjust.env) == 1


def test_a_bug_after_the_decision_leaks_no_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    of = nri.asking("1")

    def broken(_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(convert, "reply_to_pb", broken)
    with pytest.raises(ZeroDivisionError):
        bench.plugin.create_container(nri.create(of, nri.container(of)))
    assert bench.plugin.ledger.entries == {}
    assert bench.ledgers == []


def test_a_failed_start_without_any_event_lapses() -> None:
    bench = Bench()
    of, made = granted(bench, "4")
    other = nri.asking("4", "other")
    assert "[gpu-busy]" in refused(bench, other, nri.container(other)).message
    bench.clock.now += GRACE_S + 1
    create(bench, other, nri.container(other))
    assert bench.phases() == {made.id: "lapsed", nri.container(other).id: "created"}
    late = tell(bench, Event.START_CONTAINER, of, made)
    assert isinstance(late, Status)
    assert late.code is StatusCode.FAILED_PRECONDITION
    assert "[gpu-busy]" in late.message
    assert "create it again" in late.message


def test_a_late_start_whose_gpus_are_still_free_runs() -> None:
    bench = Bench()
    of, made = granted(bench)
    bench.clock.now += GRACE_S + 1
    other = nri.asking("device=3", "other")
    create(bench, other, nri.container(other))
    assert tell(bench, Event.START_CONTAINER, of, made) == b""
    assert bench.phases()[made.id] == "running"


def test_stop_frees_what_ran_and_lapses_what_never_did() -> None:
    bench = Bench()
    of, made = granted(bench)
    assert tell(bench, Event.STOP_CONTAINER, of, made) == b""
    assert bench.phases() == {made.id: "lapsed"}
    assert tell(bench, Event.START_CONTAINER, of, made) == b""
    assert tell(bench, Event.STOP_CONTAINER, of, made) == b""
    assert bench.phases() == {}


def test_a_container_created_while_we_were_away_does_not_start(log: Log) -> None:
    bench = Bench()
    of = nri.asking("1")
    reply = tell(bench, Event.START_CONTAINER, of, nri.container(of))
    assert isinstance(reply, Status)
    assert reply.code is StatusCode.FAILED_PRECONDITION
    assert "[not-granted]" in reply.message
    assert "gpu.nri.io asks for GPUs" in reply.message
    assert {line.text for line in log.lines} == {"start refused"}
    assert log.lines[0].fields["pod_name"] == "train"


@pytest.mark.parametrize("claim", ["none", ""])
def test_one_that_asked_for_no_gpu_starts_unmarked(claim: str) -> None:
    bench = Bench()
    of = nri.asking(claim) if claim else nri.pod()
    assert tell(bench, Event.START_CONTAINER, of, nri.container(of)) == b""


def test_a_mark_of_ours_is_adopted_at_start() -> None:
    """Old runtimes list a container that is being created during Synchronize nowhere (containerd 1.7.24)."""
    first = Bench()
    of, made = granted(first, "2")
    bench = Bench()
    assert tell(bench, Event.START_CONTAINER, of, made) == b""
    assert bench.phases() == {made.id: "running"}
    assert bench.plugin.ledger.usage() == first.plugin.ledger.usage()


def test_an_adopted_container_whose_gpus_are_taken_does_not_start() -> None:
    of, made = granted(Bench(), "device=0")
    bench = Bench()
    granted(bench, "device=0", "other")
    reply = tell(bench, Event.START_CONTAINER, of, made)
    assert isinstance(reply, Status)
    assert "[gpu-busy]" in reply.message
    assert made.id not in bench.plugin.ledger.entries


def forged(made: pb.Container) -> None:
    made.annotations[GRANT_KEY] = made.annotations[GRANT_KEY].replace("exclusive", "shared")


def copied(made: pb.Container) -> None:
    made.id = "another-container"


def nonsense(made: pb.Container) -> None:
    made.annotations[GRANT_KEY] = "v1;mode=\u00e9;mac=zz"


@pytest.mark.parametrize("tamper", [forged, copied, nonsense])
def test_a_mark_that_is_not_ours_counts_for_nothing(log: Log, tamper: Callable[[pb.Container], None]) -> None:
    of, made = granted(Bench())
    tamper(made)
    bench = Bench()
    reply = tell(bench, Event.START_CONTAINER, of, made)
    assert isinstance(reply, Status)
    assert "[not-granted]" in reply.message
    synchronize(bench, [of], [nri.running(made)])
    line = log.one("signed grant ignored")
    assert line.level == "WARNING"
    assert line.fields["fault"]
    assert "v1;" not in str(line)
    assert bench.plugin.ledger.entries == {}
    (foreign,) = bench.plugin.ledger.external.values()
    assert foreign.uuids == {bench.node.gpus[0].uuid}


def test_the_ledger_of_synchronize_is_the_one_that_lived() -> None:
    bench = Bench()
    listed = []
    pods = []
    for name, claim in (
        ("a", "device=0,1;mode=shared"),
        ("b", "device=1;mode=shared"),
        ("c", "none"),
        ("d", "device=3"),
    ):
        of, made = granted(bench, claim, name)
        pods.append(of)
        if name == "a":
            tell(bench, Event.START_CONTAINER, of, made)
            listed.append(nri.running(made))
        else:
            listed.append(nri.created(made))
    lived = bench.plugin.ledger
    synchronize(bench, pods, listed)
    assert bench.plugin.ledger.entries == lived.entries
    synchronize(bench, [], [])
    assert bench.plugin.ledger.entries == {}


def test_what_got_away_without_a_decision_is_reported(log: Log) -> None:
    bench = Bench()
    of = nri.asking("1")
    synchronize(
        bench, [of, nri.pod("plain")], [nri.running(nri.container(of)), nri.running(nri.container(nri.pod("plain")))]
    )
    (line,) = log.warnings()
    assert "created without nri-gpu" in line.text
    assert line.fields["pod_name"] == "train"


def test_nodes_by_other_hands_block_exclusive_grants() -> None:
    bench = Bench()
    of = nri.pod("kubelet-served")
    held = nri.container(of)
    held.linux.devices.add(path="/dev/nvidia0", type="c", major=195, minor=0)
    assert create(bench, of, held) == pb.CreateContainerResponse()
    asks = nri.asking("device=0", "other")
    assert "[gpu-busy]" in refused(bench, asks, nri.container(asks)).message
    assert tell(bench, Event.REMOVE_CONTAINER, of, held) == b""
    create(bench, asks, nri.container(asks))


def test_privileged_containers_hold_nothing_in_particular() -> None:
    bench = Bench()
    of = nri.pod("exporter")
    held = nri.container(of)
    for minor in range(4):
        held.linux.devices.add(path=f"/dev/nvidia{minor}", type="c", major=195, minor=minor)
    held.linux.resources.devices.add(allow=True, access="rwm")
    create(bench, of, held)
    assert bench.plugin.ledger.external == {}


def test_a_container_held_by_others_cannot_ask_as_well() -> None:
    bench = Bench()
    of = nri.asking("1")
    held = nri.container(of)
    held.linux.devices.add(path="/dev/nvidia1", type="c", major=195, minor=1)
    assert "[held-by-others]" in refused(bench, of, held).message


def allow(made: pb.Container, minor: int | None, major: int = 195) -> pb.Container:
    """With a rule of its device cgroup, and no node."""
    number = None if minor is None else pb.OptionalInt64(value=minor)
    made.linux.resources.devices.add(
        allow=True, type="c", access="rwm", major=pb.OptionalInt64(value=major), minor=number
    )
    return made


def test_what_a_rule_of_the_cgroup_opens_is_held_as_by_a_node() -> None:
    bench = Bench()
    of = nri.pod("kubelet-served")
    assert create(bench, of, allow(nri.container(of), 0)) == pb.CreateContainerResponse()
    asks = nri.asking("device=0", "other")
    assert "held by ml/kubelet-served (not through nri-gpu)" in refused(bench, asks, nri.container(asks)).message
    assert "[held-by-others]" in refused(bench, asks, allow(nri.container(asks), 3)).message


@pytest.mark.parametrize("shared", [(195, 254), (195, 255), (1510, 0), (1511, 1), (1511, 2), (10, 229)])
def test_what_opens_no_gpu_is_in_nobodys_way(shared: tuple[int, int]) -> None:
    bench = Bench()
    of = nri.pod("monitor")
    held = allow(nri.container(of), shared[1], shared[0])
    held.linux.devices.add(path="/dev/nvidia-something", type="c", major=shared[0], minor=shared[1])
    create(bench, of, held)
    granted(bench, "4")


def test_a_wildcard_is_told_of_and_blocks_nothing(log: Log) -> None:
    bench = Bench(Policy(privileged=PrivilegedSettings(action=PrivilegedAction.AUDIT)))
    of = nri.pod("debugger")
    create(bench, of, allow(nri.container(of), None))
    (line,) = log.warnings()
    assert "it opens devices by a wildcard rule of its cgroup: it can use every GPU" in str(line)
    granted(bench, "4")


def renumbered(bench: Bench) -> None:
    """The driver was loaded again, and gives the first two GPUs each other's minors."""
    one, two, *rest = bench.node.gpus
    swapped = (replace(one, minor_number=two.minor_number), replace(two, minor_number=one.minor_number), *rest)
    bench.node = replace(bench.node, inventory=replace(bench.node.inventory, gpus=swapped))


def test_a_granted_containers_number_that_became_another_gpus() -> None:
    bench = Bench()
    of, made = granted(bench, "device=1", "old")
    tell(bench, Event.START_CONTAINER, of, made)
    assert bench.plugin.ledger.external == {}
    renumbered(bench)
    late = nri.asking("device=0", "late")
    words = "GPU 0 (GPU-0a100004-0000-4000-8000-000000000000) is held by ml/old (container main still opens its device"
    for _ in range(2):
        assert words in refused(bench, late, nri.container(late)).message
        synchronize(bench, [of], [nri.running(made)])  # and so says a daemon that only has the runtime's list
    granted(bench, "device=0;mode=shared", "sharing")
    assert "[gpu-busy]" in refused(bench, late, nri.container(late)).message
    tell(bench, Event.STOP_CONTAINER, of, made)
    assert bench.plugin.ledger.external == {}
    assert bench.plugin.ledger.live.keys() == {"container-sharing-main"}


def test_the_kubelet_is_not_offered_it_either() -> None:
    bench = Bench()
    granted(bench, "device=1", "old")
    renumbered(bench)
    bench.plugin.observe()
    first, second, *_ = bench.node.gpus
    assert bench.plugin.taken(shared=True) == {first.uuid, second.uuid}


def test_a_container_adopted_at_its_start_has_its_numbers_too() -> None:
    of, made = granted(Bench(), "device=1", "old")
    bench = Bench()
    tell(bench, Event.START_CONTAINER, of, made)
    renumbered(bench)
    late = nri.asking("device=0", "late")
    assert "is held by ml/old (container main" in refused(bench, late, nri.container(late)).message


def test_driver_files_stay_for_whoever_mounts_them_whatever_its_mark_says() -> None:
    bench = Bench(stage_dir="/staged")
    of, made = granted(bench, "device=1")
    assert bench.plugin.ledger.live[ContainerId(made.id)].staged == {"compute+utility"}
    made.annotations[GRANT_KEY] = "v1;mode=exclusive;mac=00"
    plain = nri.pod("plain")
    other = nri.container(plain)
    other.mounts.add(destination="/opt", type="bind", source="/staged/570.1-0a1b2c3d/compute/lib64")
    create(bench, plain, other)
    for _ in range(2):
        assert {"compute+utility", "570.1-0a1b2c3d"} <= bench.plugin.ledger.generations()
        parts = Parts(bench.plugin.stage_dir)
        parts.add(*nri.synchronize([of, plain], [nri.running(made), nri.running(other)]))
        bench.plugin.synchronized(parts.listed())
    assert bench.plugin.ledger.entries == {}
    tell(bench, Event.STOP_CONTAINER, of, made)
    assert bench.plugin.ledger.generations() == {"570.1-0a1b2c3d"}


def test_nvidias_hooks_are_warned_of_once_a_kind(log: Log) -> None:
    bench = Bench()
    for name, program in (("a", "nvidia-cdi-hook"), ("b", "nvidia-cdi-hook"), ("c", "nvidia-ctk")):
        of = nri.asking("none", name)
        held = nri.container(of)
        held.hooks.create_container.add(path=f"/usr/bin/{program}")
        create(bench, of, held)
        synchronize(bench, [of], [nri.running(held)])
    warned = [line for line in log.lines if "a container has NVIDIA's hooks" in str(line)]
    assert len(warned) == 2
    assert "nri-gpu check" in str(warned[0])


def test_the_snapshot_is_asked_for_at_each_request() -> None:
    bench = Bench()
    bench.lose_gpu(0)
    of = nri.asking("device=0")
    assert "[no-such-gpu]" in refused(bench, of, nri.container(of)).message


def test_foreign_nodes_seen_before_the_inventory_was(log: Log) -> None:
    """Synchronize comes within milliseconds of the start; NVML takes longer."""
    bench = Bench()
    known = bench.node
    bench.node = replace(known, inventory=replace(known.inventory, gpus=(), fault="just started"))
    of = nri.pod("kubelet-served")
    held = nri.running(nri.container(of))
    held.linux.devices.add(path="/dev/nvidia0", type="c", major=195, minor=0)
    synchronize(bench, [of], [held])
    bench.node = known
    asks = nri.asking("device=0", "other")
    assert "[gpu-busy]" in refused(bench, asks, nri.container(asks)).message


def test_nothing_of_the_environment_is_ever_said(log: Log) -> None:
    bench = Bench()
    of, made = granted(bench)
    tell(bench, Event.START_CONTAINER, of, made)
    other = nri.asking("device=0", "other")
    refused(bench, other, nri.container(other))
    tell(bench, Event.START_CONTAINER, other, nri.container(other))
    synchronize(bench, [of, other], [nri.running(made), nri.running(nri.container(other))])
    assert len(log.lines) >= 5
    assert "hunter2" not in " ".join(map(str, log.lines))
    assert "SECRET" not in " ".join(map(str, log.lines))


BY_ENVIRONMENT: Final = Policy(environment=EnvironmentSettings(may_ask=Globs(("ml",))))


def test_where_the_environment_may_ask_it_is_read_in_requests_and_at_starts(log: Log) -> None:
    bench = Bench(BY_ENVIRONMENT)
    of = nri.pod()
    made = nri.container(of, env=["NVIDIA_VISIBLE_DEVICES=1"])
    reply = create(bench, of, made)
    assert [each.path for each in reply.adjust.linux.devices if each.path == "/dev/nvidia1"]
    assert "gpu granted" in [line.text for line in log.lines]
    missed = nri.container(of, "missed", env=["NVIDIA_VISIBLE_DEVICES=2"])
    status = tell(Bench(BY_ENVIRONMENT), Event.START_CONTAINER, of, missed)
    assert isinstance(status, Status)
    assert "NVIDIA_VISIBLE_DEVICES asks for GPUs, but this container was created while" in status.message
    assert tell(Bench(), Event.START_CONTAINER, of, missed) == b""


@pytest.mark.parametrize(("stale", "asked"), [(Stale.SERVE, False), (Stale.REFUSE, True)])
def test_the_inventory_s_age_is_asked_for_only_where_policy_judges_by_it(stale: Stale, asked: bool) -> None:
    bench = Bench(Policy(inventory=InventorySettings(stale=stale)))
    bench.inventory_age_s = 301.0
    of = nri.asking("1")
    if asked:
        assert "last answered 301 s ago" in refused(bench, of, nri.container(of)).message
        bench.inventory_age_s = None
    assert create(bench, of, nri.container(of)).adjust.linux.devices


def test_a_privileged_container_that_asks_for_nothing_is_warned_of(log: Log) -> None:
    bench = Bench(Policy(privileged=PrivilegedSettings(action=PrivilegedAction.AUDIT)))
    of = nri.pod()
    made = nri.container(of)
    made.linux.resources.devices.add(allow=True, access="rwm")
    made.linux.devices.add(path="/dev/nvidia0", type="c", major=195, minor=0)
    assert bench.plugin.create_container(nri.create(of, made)) == b""
    bench.settle()
    (line,) = [line for line in log.lines if line.text == "container passed that can use GPUs"]
    assert line.level == "WARNING"
