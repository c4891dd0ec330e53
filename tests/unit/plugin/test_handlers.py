"""The plugin on its own: what each request does to the ledger, what is answered, what is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri import convert
from nri_gpu.nri.subscription import Event
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import (
    CapabilityRules,
    Complete,
    Disarm,
    DriverCapabilities,
    EnvironmentSettings,
    ForeignSettings,
    InventorySettings,
    NamespaceRules,
    Policy,
    PrivilegedAction,
    PrivilegedSettings,
    Stale,
)
from nri_gpu.ttrpc import Status, StatusCode
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import Bench

AUDITING: Final = Policy(privileged=PrivilegedSettings(action=PrivilegedAction.AUDIT))
BY_ENVIRONMENT: Final = Policy(environment=EnvironmentSettings(may_ask=Globs(("ml",))))
DISARMING: Final = Policy(environment=EnvironmentSettings(disarm=Disarm.ALL))
ELSEWHERE: Final = NamespaceRules(allow=Globs(("other",)))
COMPLETING: Final = Policy(foreign=ForeignSettings(complete=Complete.ALL))
COMPLETING_ASKED: Final = Policy(foreign=ForeignSettings(complete=Complete.ASKED))


def with_node(of: pb.PodSandbox, minor: int = 0, path: str = "/dev/nvidia{}", major: int = 195) -> pb.Container:
    """With a device node that something else injected."""
    made = nri.container(of)
    made.linux.devices.add(path=path.format(minor), type="c", major=major, minor=minor)
    return made


def allow(made: pb.Container, minor: int | None, major: int = 195) -> pb.Container:
    """With a rule of its device cgroup, and no node."""
    number = None if minor is None else pb.OptionalInt64(value=minor)
    made.linux.resources.devices.add(
        allow=True, type="c", access="rwm", major=pb.OptionalInt64(value=major), minor=number
    )
    return made


def privileged(of: pb.PodSandbox) -> pb.Container:
    made = with_node(of)
    made.linux.resources.devices.add(allow=True, access="rwm")
    return made


# ---- CreateContainer


def test_a_grant_is_answered_and_committed_then_logged(log: Log) -> None:
    bench = Bench()
    of = nri.asking("device=0,1")
    assert bench.plugin.create_container(nri.create(of, nri.container(of)))
    assert (len(bench.ledgers), log.lines) == (1, [])
    bench.settle()
    line = log.one("GPU granted")
    assert line.level == "INFO"
    assert line.fields["gpu_uuid"] == ",".join(gpu.uuid for gpu in bench.node.gpus[:2])
    assert (line.fields["decision"], line.fields["mode"]) == ("inject", "exclusive")
    assert (line.fields["namespace"], line.fields["pod_name"], line.fields["container_name"]) == ("ml", "train", "main")


ASKING: Final = Policy(environment=EnvironmentSettings(driver_capabilities=DriverCapabilities.ASK))
NAMED: Final = 'NVIDIA_DRIVER_CAPABILITIES="all" also names '
LEFT_OUT: Final = {
    "ignored": (Policy(), "all", f"{NAMED}video, graphics, display, ngx, compat32: environment.driver_capabilities is"),
    "not allowed": (
        replace(ASKING, capabilities=CapabilityRules(allowed=DEFAULT_CAPABILITIES)),
        "all",
        f"{NAMED}video, graphics, display, ngx, compat32: capabilities video may not be asked for: capabilities.",
    ),
    "all of it came": (ASKING, "all", ""),
    "what comes anyway": (Policy(), "compute,utility", ""),
    "cut": (Policy(), f"all,{'x' * 100_000}", f'{NAMED[:31]},{"x" * 44}..." also names video'),
}


@pytest.mark.parametrize(("policy", "value", "words"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_the_grants_line_says_which_parts_of_the_driver_were_asked_for_in_vain(
    log: Log, policy: Policy, value: str, words: str
) -> None:
    bench, of = Bench(policy), nri.asking("1")
    bench.create(of, nri.container(of, env=["SECRET=hunter2", f"NVIDIA_DRIVER_CAPABILITIES={value}", "NVIDIA_X=all"]))
    said = log.one("GPU granted").fields["left_out"]
    assert said.startswith(words)
    assert bool(said) is bool(words)
    assert len(said) < 700
    assert not log.warnings()
    assert "hunter2" not in str(log.lines)


BROKEN: Final = Policy.broken("policy.toml:3: plugin.index: bad")
REFUSED: Final = {
    "no such GPU": (Policy.default(), "device=99", StatusCode.FAILED_PRECONDITION, "[no-such-gpu]"),
    "not allowed": (Policy(namespaces=ELSEWHERE), "1", StatusCode.PERMISSION_DENIED, "[not-allowed]"),
    "broken policy": (BROKEN, "1", StatusCode.FAILED_PRECONDITION, "plugin.index: bad"),
}


@pytest.mark.parametrize(("policy", "claim", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(log: Log, policy: Policy, claim: str, code: StatusCode, words: str) -> None:
    bench = Bench(policy)
    status = bench.ask(nri.asking(claim))
    assert isinstance(status, Status)
    assert (status.code, bench.plugin.ledger.entries) == (code, {})
    assert words in status.message
    assert status.message.isascii() and len(status.message) <= 700
    line = log.one("container refused")
    assert line.fields["decision"] == "refuse"
    assert f"[{line.fields['code']}]" in status.message


def test_a_changed_policy_holds_at_once() -> None:
    bench = Bench()
    of = nri.pod()
    armed = nri.container(of, env=["NVIDIA_VISIBLE_DEVICES=all"])
    assert bench.create(of, armed) == pb.CreateContainerResponse()
    bench.state.use(DISARMING)
    removed, pair = bench.create(of, armed).adjust.env  # perhaps another plugin's: that must be removed first
    assert (removed.key, pair.key, pair.value) == ("-NVIDIA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "void")


def test_a_bug_after_the_decision_leaks_no_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(convert, "reply_to_pb", broken)
    with pytest.raises(ZeroDivisionError):
        bench.ask(nri.asking("1"))
    assert (bench.plugin.ledger.entries, bench.ledgers) == ({}, [])


@pytest.mark.parametrize("stale", [Stale.SERVE, Stale.REFUSE])
def test_the_inventorys_age_counts_where_policy_refuses_by_it(stale: Stale) -> None:
    bench = Bench(Policy(inventory=InventorySettings(stale=stale)))
    bench.inventory_age_s = 301.0
    of = nri.asking("1")
    if stale is Stale.REFUSE:
        assert "last answered 301 s ago" in bench.refused(of)
        bench.inventory_age_s = None
    assert bench.create(of).adjust.linux.devices


def test_what_can_use_gpus_unasked_is_warned_of(log: Log) -> None:
    bench = Bench(AUDITING)
    of = nri.pod("debugger")
    for made in (privileged(of), allow(nri.container(of), None)):
        assert bench.create(of, made) == pb.CreateContainerResponse()
    first, second = log.said("container that requests no GPU can open GPUs")
    assert first.level == second.level == "WARNING"
    assert "it opens devices by a wildcard rule of its cgroup: it can use every GPU" in str(second)
    bench.granted("4")  # neither holds a GPU in particular
    assert bench.plugin.ledger.external == {}


def test_nvidias_hooks_are_warned_of_once_a_kind(log: Log) -> None:
    bench = Bench()
    for name, program in (("a", "nvidia-cdi-hook"), ("b", "nvidia-cdi-hook"), ("c", "nvidia-ctk")):
        of = nri.asking("none", name)
        made = nri.container(of)
        made.hooks.create_container.add(path=f"/usr/bin/{program}")
        bench.create(of, made)
        bench.synchronize([of], [nri.running(made)])
    warned = log.said("a container has NVIDIA's hooks")
    assert len(warned) == 2
    assert "nri-gpu check" in str(warned[0])


# ---- the life of a granted container


def test_a_container_created_while_we_were_away_does_not_start(log: Log) -> None:
    none = nri.asking("none")
    assert Bench().tell(Event.START_CONTAINER, none, nri.container(none)) == b""
    sentence = Bench().not_started(nri.asking("1"))
    assert "[not-granted]" in sentence
    assert "gpu.nri.io asks for GPUs" in sentence
    assert {line.text for line in log.lines} == {"start refused"}
    assert log.lines[0].fields["pod_name"] == "train"


def test_where_the_environment_may_ask_it_is_read_in_requests_and_at_starts(log: Log) -> None:
    bench = Bench(BY_ENVIRONMENT)
    of = nri.pod()
    reply = bench.create(of, nri.container(of, env=["NVIDIA_VISIBLE_DEVICES=1"]))
    assert "/dev/nvidia1" in {each.path for each in reply.adjust.linux.devices}
    assert log.said("GPU granted")
    missed = nri.container(of, "missed", env=["NVIDIA_VISIBLE_DEVICES=2"])
    sentence = Bench(BY_ENVIRONMENT).not_started(of, missed)
    assert "NVIDIA_VISIBLE_DEVICES asks for GPUs, but this container was created while" in sentence
    assert Bench().tell(Event.START_CONTAINER, of, missed) == b""


def forged(made: pb.Container) -> None:
    made.annotations[GRANT_KEY] = made.annotations[GRANT_KEY].replace("exclusive", "shared")


def copied(made: pb.Container) -> None:
    made.id = "another-container"


def nonsense(made: pb.Container) -> None:
    made.annotations[GRANT_KEY] = "v1;mode=\u00e9;mac=zz"


@pytest.mark.parametrize("tamper", [forged, copied, nonsense])
def test_a_grant_that_is_not_ours_counts_for_nothing(log: Log, tamper: Callable[[pb.Container], None]) -> None:
    of, made = Bench().granted()
    tamper(made)
    bench = Bench()
    assert "[not-granted]" in bench.not_started(of, made)
    bench.synchronize([of], [nri.running(made)])
    line = log.one("signed grant ignored")
    assert line.level == "WARNING"
    assert line.fields["fault"]
    assert "v1;" not in str(line)
    assert bench.plugin.ledger.entries == {}
    (external,) = bench.plugin.ledger.external.values()
    assert external.uuids == {bench.node.gpus[0].uuid}


# ---- Synchronize


def test_what_was_created_without_a_decision_is_reported(log: Log) -> None:
    asked, plain = nri.asking("1"), nri.pod("plain")
    Bench().synchronize([asked, plain], [nri.running(nri.container(of)) for of in (asked, plain)])
    (line,) = log.warnings()
    assert "created without nri-gpu" in line.text
    assert line.fields["pod_name"] == "train"


# ---- GPUs that other components assigned


def test_nodes_seen_before_the_inventory_was() -> None:
    """Synchronize comes within milliseconds of the start; NVML takes longer."""
    bench = Bench()
    known = bench.node
    bench.node = replace(known, inventory=replace(known.inventory, gpus=(), fault="just started"))
    of = nri.pod("kubelet-served")
    bench.synchronize([of], [nri.running(with_node(of))])
    bench.node = known
    assert "[gpu-busy]" in bench.refused(nri.asking("device=0", "other"))


def renumbered(bench: Bench) -> None:
    """The driver was loaded again, and gives the first two GPUs each other's minors."""
    one, two, *rest = bench.node.gpus
    swapped = (replace(one, minor_number=two.minor_number), replace(two, minor_number=one.minor_number), *rest)
    bench.node = replace(bench.node, inventory=replace(bench.node.inventory, gpus=swapped))


def test_a_container_adopted_at_its_start_has_its_numbers_too() -> None:
    of, made = Bench().granted("device=1", "old")
    bench = Bench()
    bench.tell(Event.START_CONTAINER, of, made)
    renumbered(bench)
    assert "is held by ml/old (container main" in bench.refused(nri.asking("device=0", "late"))
    assert bench.taken(shared=True) == {gpu.uuid for gpu in bench.node.gpus[:2]}  # by the kubelet neither


def test_who_opens_a_gpu_that_another_pod_has_alone_is_reported(log: Log) -> None:
    bench = Bench()
    for number in (0, 1, 2):
        bench.granted(f"device={number}", f"has-{number}")
    renumbered(bench)
    bench.plugin.observe()
    said = {line.fields["gpu_uuid"]: set(line.fields["fault"].split(" and ")) for line in log.warnings()}
    assert said == {
        bench.node.gpus[mine].uuid: {f"ml/has-{mine}", f"ml/has-{other} (container main still opens its device number)"}
        for mine, other in ((0, 1), (1, 0))
    }


def test_driver_files_stay_for_whoever_mounts_them_whatever_its_grant_says() -> None:
    bench = Bench(stage_dir="/staged")
    of, made = bench.granted("device=1")
    assert bench.plugin.ledger.live[ContainerId(made.id)].staged == {"compute+utility"}
    made.annotations[GRANT_KEY] = "v1;mode=exclusive;mac=00"
    plain = nri.pod("plain")
    other = nri.container(plain)
    other.mounts.add(destination="/opt", type="bind", source="/staged/570.1-0a1b2c3d/compute/lib64")
    bench.create(plain, other)
    for _ in range(2):
        assert {"compute+utility", "570.1-0a1b2c3d"} <= bench.plugin.ledger.generations()
        bench.synchronize([of, plain], [nri.running(made), nri.running(other)])
    assert bench.plugin.ledger.entries == {}
    bench.tell(Event.STOP_CONTAINER, of, made)
    assert bench.plugin.ledger.generations() == {"570.1-0a1b2c3d"}


def holders(bench: Bench) -> dict[str, set[str]]:
    return {other.pod: set(other.uuids) for other in bench.plugin.ledger.external.values()}


@pytest.mark.parametrize("policy", [COMPLETING, COMPLETING_ASKED], ids=["unasked", "asked"])
def test_the_life_of_a_completed_container(policy: Policy, log: Log) -> None:
    """A holder of GPUs that another component assigned, with a grant of ours that names none of them."""
    bench, restarted = Bench(policy), Bench(policy)
    of = nri.pod() if policy is COMPLETING else nri.asking("1")
    made = with_node(of, 1)
    reply = bench.create(of, made)
    after = nri.adjusted(made, reply)
    holds = {"ml/train": {bench.node.gpus[1].uuid}}
    assert {device.path.removeprefix("/dev/") for device in reply.adjust.linux.devices} == {
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
    }
    assert reply.adjust.annotations[GRANT_KEY].startswith("v1;mode=none;uuid=;gen=580.95.05-test;mac=")
    line = log.one("container completed for GPUs that another component allocated")
    assert {line.fields["gpu_uuid"]} == holds["ml/train"] == holders(bench)["ml/train"]
    assert bench.plugin.ledger.generations() == {"580.95.05-test"}
    assert bench.tell(Event.START_CONTAINER, of, after) == b""
    assert bench.tell(Event.POST_START_CONTAINER, of, after) == b""
    assert holders(bench) == holds
    assert "[gpu-busy]" in bench.refused(nri.asking("device=1; mode=exclusive", "other"))
    restarted.synchronize([of], [nri.running(after)])
    assert restarted.plugin.ledger == bench.plugin.ledger
    assert not log.warnings()
    assert bench.tell(Event.STOP_CONTAINER, of, after) == b""
    assert (holders(bench), dict(bench.plugin.ledger.entries)) == ({}, {})


def removing(*keys: str, mounts: tuple[str, ...] = ()) -> pb.CreateContainerResponse:
    """The reply of a plugin behind us that removes these device nodes and mounts."""
    reply = pb.CreateContainerResponse()
    for key in keys:
        reply.adjust.linux.devices.add(path=f"-{key}")
    for each in mounts:
        reply.adjust.mounts.add(destination=f"-{each}")
    return reply


def test_what_a_plugin_behind_us_removed_is_refused_where_we_validate() -> None:
    bench, of = Bench(stage_dir="/staged"), nri.asking("2")
    made = nri.container(of)
    ours = bench.create(of, made)
    places = tuple(mount.destination for mount in ours.adjust.mounts)

    def verdict(theirs: pb.CreateContainerResponse) -> str:
        said = bench.plugin.validate(nri.validate(of, made, {"10-nri-gpu": ours, "95-x": theirs}))
        assert isinstance(said, bytes)
        return pb.ValidateContainerAdjustmentResponse.FromString(said).reason

    assert verdict(removing("/dev/fuse", mounts=("/data",))) == ""
    assert verdict(removing("/dev/nvidia1")).startswith(
        "nri-gpu [incomplete-grant]: this container lacks nodes of its GPUs (its grant names 2): NRI plugin 95-x "
        "removed /dev/nvidia1, which nri-gpu had added; remove that plugin"
    )
    assert "lacks the mounts of the driver's files: NRI plugin 95-x removed" in verdict(removing(mounts=places))


def test_what_lacks_its_nodes_is_not_started_where_that_is_heeded() -> None:
    bench = Bench()
    of, made = bench.granted("2")
    del made.linux.devices[0]
    assert bench.tell(Event.START_CONTAINER, of, made) == b""  # as on CRI-O, which would start it anyway
    bench.plugin.runtime = "containerd"
    assert "[incomplete-grant]: this container lacks nodes of its GPUs (its grant names 2)" in bench.not_started(
        of, made
    )
    of, made = bench.granted("1", "whole")
    assert bench.tell(Event.START_CONTAINER, of, made) == b""
