from __future__ import annotations

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.external import external_uuids
from nri_gpu.allocation.ledger import GrantPhase, Ledger
from nri_gpu.allocation.reservations import cleared_for
from nri_gpu.decision.claim import needs_grant
from nri_gpu.decision.decide import decide
from nri_gpu.domain.claim import Mode, NumaBinding, Strategy
from nri_gpu.domain.container import Container, ContainerId, DeviceRef
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Inject, Pass, Refuse
from nri_gpu.domain.edits import NO_EDITS
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capability, GpuUuid
from nri_gpu.domain.node import Majors, Node, NumaNode
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import (
    CapabilityRules,
    ClaimDefaults,
    Disarm,
    EnvironmentSettings,
    NamespaceRules,
    Otherwise,
    PlacementSettings,
    Policy,
    RequirementSettings,
    VisibleDevices,
)
from tests.support import builders as make
from tests.support.fabrics import KNOWN
from tests.support.loading import LIBRARIES, tree_of

POLICY = Policy()
DISARMING = Policy(environment=EnvironmentSettings(disarm=Disarm.ALL))
SHARING = Policy(defaults=ClaimDefaults(mode=Mode.SHARED))
CLOSED = Policy(namespaces=NamespaceRules(deny=Globs(("ml",))))
LENIENT = Policy(namespaces=NamespaceRules(deny=Globs(("ml",)), otherwise=Otherwise.IGNORE))
BROKEN = Policy.broken("policy.toml:3: plugin.index: must be two digits.")
ARMED = {"NVIDIA_VISIBLE_DEVICES": "all"}
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}
NODE = make.node()


def injected(container: Container, node: Node = NODE, ledger: Ledger | None = None, policy: Policy = POLICY) -> Inject:
    decision = decide(container, node, cleared_for(ledger or Ledger(), container), policy)
    assert isinstance(decision, Inject), decision
    return decision


def refused(
    container: Container,
    node: Node = NODE,
    ledger: Ledger | None = None,
    policy: Policy = POLICY,
) -> Refuse:
    decision = decide(container, node, cleared_for(ledger or Ledger(), container), policy)
    assert isinstance(decision, Refuse), decision
    assert not str(decision.reason).endswith(("..", "?."))
    assert len(str(decision.reason)) < REFUSAL_MAX
    return decision


PASSES: dict[str, tuple[Container, Policy]] = {
    "nothing asked": (make.container(), POLICY),
    "nothing asked and no good policy": (make.container(), BROKEN),
    "the environment asks": (make.container(env=ARMED), POLICY),
    "nothing to disarm": (make.container(), DISARMING),
    "void already": (make.container(env=VOID), DISARMING),
    "may not ask, and that is ignored": (make.container("1"), LENIENT),
    "another's annotation": (make.container(of=make.pod(annotations={"gpu.nri.ioo": "1"})), POLICY),
}


@pytest.mark.parametrize(("container", "policy"), PASSES.values(), ids=PASSES)
def test_passes_untouched(container: Container, policy: Policy) -> None:
    decision = decide(container, NODE, Ledger(), policy)
    assert isinstance(decision, Pass)
    assert decision.edits == NO_EDITS


@pytest.mark.parametrize("policy", [DISARMING, replace(LENIENT, environment=DISARMING.environment)])
def test_where_nothing_is_granted_an_images_variable_is_disarmed(policy: Policy) -> None:
    decision = decide(make.container("1" if policy != DISARMING else None, env=ARMED), NODE, Ledger(), policy)
    assert isinstance(decision, Pass)
    assert decision.edits.env == VOID


def test_who_says_none_is_disarmed_like_who_says_nothing() -> None:
    decision = injected(make.container("none", env=ARMED), policy=DISARMING)
    assert decision.edits.env == VOID
    assert injected(make.container("none", env=ARMED)).edits == NO_EDITS


TWICE = frozenset({"NVIDIA_VISIBLE_DEVICES"})


@pytest.mark.parametrize("text", [None, "none"], ids=["nothing asked", "none"])
def test_what_cannot_be_disarmed_is_refused_where_policy_disarms(text: str | None) -> None:
    container = make.container(text, env=ARMED, env_twice=TWICE)
    assert "leave it out of the pod's environment" in str(refused(container, policy=DISARMING).reason)
    assert not isinstance(decide(container, NODE, Ledger(), POLICY), Refuse)
    void = replace(container, env=VOID)
    assert not isinstance(decide(void, NODE, Ledger(), DISARMING), Refuse)


def test_none_is_a_grant_of_nothing_so_that_it_leaves_a_signed_grant() -> None:
    empty = Node(number=1, inventory=make.inventory((), fault="no driver"))
    for node in (NODE, empty):
        grant = injected(make.container("none"), node).grant
        assert (grant.uuids, grant.mode) == ((), None)


def test_a_grant_is_recorded_and_injected_together() -> None:
    decision = injected(make.container("device=1,3"))
    assert decision.grant == make.grant(1, 3)
    assert [path for path in decision.edits.devices if path[-1].isdigit()] == ["/dev/nvidia6", "/dev/nvidia4"]
    assert decision.edits.env["NVIDIA_VISIBLE_DEVICES"] == f"{make.uuid(1)},{make.uuid(3)}"
    assert tree_of(decision.edits) == make.TREES + "/compute+utility"
    assert decision.rule == "namespaces.allow[0]"


def test_policy_fills_in_what_the_claim_leaves_open_and_nothing_else() -> None:
    assert injected(make.container("1"), policy=SHARING).grant.mode is Mode.SHARED
    assert injected(make.container("1;mode=exclusive"), policy=SHARING).grant.mode is Mode.EXCLUSIVE
    utility = Policy(defaults=ClaimDefaults(capabilities=frozenset({Capability.UTILITY})))
    assert "/dev/nvidia-uvm" not in injected(make.container("1"), policy=utility).edits.devices
    compute = injected(make.container("1;capabilities=compute"), policy=utility)
    assert "/dev/nvidia-uvm" in compute.edits.devices
    assert tree_of(compute.edits) == make.TREES + "/compute"


def test_a_node_with_an_nvidia_hook_keeps_it_idle() -> None:
    policy = Policy(environment=EnvironmentSettings(visible_devices=VisibleDevices.VOID))
    env = injected(make.container("1"), policy=policy).edits.env
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["NRI_GPU_UUIDS"]) == ("void", make.uuid(0))


HOLDING = make.container("1", devices=(make.held_node(make.gpu(2)),))
GRANTED_ELSEWHERE = make.ledger(make.entry(0, 1, 2, 3, to=make.container(of="other")))
STARTING = Node(number=1, inventory=make.inventory(), driver_fault="the driver's files are being looked for; try again")
SERVER = make.node(
    staged=make.driver(trees={some: tree for some, tree in make.trees().items() if some <= DEFAULT_CAPABILITIES})
)
COMPATIBLE = make.node(
    staged=make.driver(trees={some: tree for some, tree in make.trees().items() if some != {Capability.COMPAT32}})
)
HEADLESS = Policy(capabilities=CapabilityRules(allowed=frozenset(Capability) - {Capability.DISPLAY}))
HALF_STAGED = make.node(staged=make.driver(trees={}))


class Refused(NamedTuple):
    container: Container
    code: Code
    words: str
    node: Node = NODE
    ledger: Ledger = Ledger()
    policy: Policy = POLICY


REFUSALS = {
    "syntax": Refused(make.container("one"), Code.BAD_REQUEST, "gpu.nri.io at character 1"),
    "mistyped key": Refused(
        make.container(of=make.pod(annotations={"gpu.nri.io/pods": "1"})),
        Code.BAD_REQUEST,
        'did you mean "gpu.nri.io/pod"?',
    ),
    "syntax, even where asking is ignored": Refused(make.container("one"), Code.BAD_REQUEST, "one", policy=LENIENT),
    "syntax, even without a policy": Refused(make.container("one"), Code.BAD_REQUEST, "one", policy=BROKEN),
    "a signed grant of its own": Refused(
        make.container(annotations={"gpu.nri.io/grant": "v1"}), Code.BAD_REQUEST, "only nri-gpu writes this annotation"
    ),
    "no good policy": Refused(make.container("1"), Code.BAD_POLICY, "plugin.index", policy=BROKEN),
    "may not ask": Refused(make.container("1"), Code.NOT_ALLOWED, "namespaces.deny[0]", policy=CLOSED),
    "a capability that policy denies": Refused(
        make.container("1;capabilities=display"),
        Code.NOT_ALLOWED,
        "capabilities display may not be asked for",
        policy=HEADLESS,
    ),
    "a capability that brings a denied one": Refused(
        make.container("1;capabilities=video"),
        Code.NOT_ALLOWED,
        "capabilities compute may not be asked for (compute is brought along by another)",
        policy=Policy(capabilities=CapabilityRules(allowed=frozenset({Capability.VIDEO}))),
    ),
    "a capability that the driver has no files for": Refused(
        make.container("1;capabilities=compute,graphics,ngx"),
        Code.NODE_NOT_READY,
        "has no files for graphics, ngx",
        node=SERVER,
    ),
    "32-bit libraries of nothing": Refused(
        make.container("1;capabilities=compat32"), Code.NODE_NOT_READY, "name them too", node=COMPATIBLE
    ),
    "a volume where a node goes": Refused(
        make.container("1", mounts=frozenset({"/dev/nvidia-uvm"})), Code.VOLUME_IN_THE_WAY, "/dev/nvidia-uvm"
    ),
    "others' nodes": Refused(HOLDING, Code.HELD_BY_OTHERS, "/dev/nvidia5"),
    "others' nodes beside none": Refused(
        make.container("none", devices=HOLDING.devices), Code.HELD_BY_OTHERS, "/dev/nvidia5"
    ),
    "the inventory's fault": Refused(
        make.container("1"),
        Code.NODE_NOT_READY,
        "cannot grant GPUs: nvmlInit: driver not loaded.",
        node=make.node((), fault="nvmlInit: driver not loaded"),
    ),
    "no module": Refused(
        make.container("1"), Code.NODE_NOT_READY, "modprobe nvidia-uvm", node=make.node(majors=Majors(nvidia=195))
    ),
    "no driver files yet": Refused(make.container("1"), Code.NODE_NOT_READY, "being looked for", node=STARTING),
    "no files of these capabilities": Refused(
        make.container("1"), Code.NODE_NOT_READY, "compute, utility", node=HALF_STAGED
    ),
    "libraries of one version, the module of another": Refused(
        make.container("1"),
        Code.NODE_NOT_READY,
        "libraries on this node are 580.95.05 but its loaded kernel module is 570.26",
        node=replace(NODE, module_version="570.26"),
    ),
    "the same, as NVML says": Refused(
        make.container("1"),
        Code.NODE_NOT_READY,
        "libraries on this node are 580.95.05 but its loaded kernel module is 590.44.01",
        node=make.node(driver_version="590.44.01"),
    ),
    "the module unloaded": Refused(
        make.container("1"),
        Code.NODE_NOT_READY,
        "module was unloaded, and the driver's libraries are 580.95.05",
        node=replace(NODE, module_version=""),
    ),
    "no gpus": Refused(make.container("1"), Code.NO_SUCH_GPU, "no GPU that can be granted", node=make.node(())),
    "all held": Refused(make.container("1"), Code.GPU_BUSY, "held by ml/other", ledger=GRANTED_ELSEWHERE),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refuses(case: Refused) -> None:
    reason = refused(case.container, case.node, case.ledger, case.policy).reason
    assert reason.code is case.code
    assert case.words in reason.sentence


VENDORS = (
    "nvidia.com/gpu",
    "management.nvidia.com/gpu",
    "runtime.nvidia.com/gpu",
    "k8s.device-plugin.nvidia.com/gpu",
    "k8s.gpu.nvidia.com/claim",
    "k8s.compute-domain.nvidia.com/claim",
)


@pytest.mark.parametrize("kind", VENDORS)
@pytest.mark.parametrize("privileged", [False, True])
@pytest.mark.parametrize("text", ["1", "none"])
def test_cdi_names_of_gpus_bring_no_further_gpus(kind: str, privileged: bool, text: str) -> None:
    container = make.container(text, cdi_devices=(f"{kind}=0",), privileged=privileged)
    reason = refused(container).reason
    assert reason.code is Code.HELD_BY_OTHERS
    assert f"already holds {kind}=0, put there" in reason.sentence
    asked_for_nothing = replace(container, pod=make.pod())
    assert isinstance(decide(asked_for_nothing, NODE, Ledger(), POLICY), Pass)


def test_many_names_stay_a_sentence_and_other_vendors_are_none_of_ours() -> None:
    many = tuple(f"nvidia.com/gpu={'x' * 50}{number}" for number in range(9))
    assert "..." in refused(make.container("1", cdi_devices=many)).reason.sentence
    others = ("notnvidia.com/gpu=0", "nvidia.com.org/gpu=0", "nvidia.comm/gpu=0", "", "=", "vendor.org/nvidia.com=0")
    assert injected(make.container("1", cdi_devices=others))


REQUIRING = {"NVIDIA_REQUIRE_CUDA": "cuda>=13.0 brand=tesla,driver>=570"}
UNCHECKED = Policy(requirements=RequirementSettings(check=False))
STRICT = Policy(requirements=RequirementSettings(may_disable=False))
OLD = make.node(driver_version="580.95.05", cuda_version="12.8")
TESLA = make.node([make.gpu(brand="tesla")], driver_version="580.95.05", cuda_version="12.8")
SAYS_OFF = {**REQUIRING, "NVIDIA_DISABLE_REQUIRE": "1"}


def test_what_an_image_requires_and_would_not_get_is_refused_with_the_condition() -> None:
    for ledger in (Ledger(), make.ledger(make.entry(0, to=make.container("1")))):  # asked again: no different
        reason = refused(make.container("1", env=REQUIRING), OLD, ledger).reason
        assert reason.code is Code.REQUIREMENT_NOT_MET
        assert "needs cuda>=13.0, and its other alternative does not hold; this node has CUDA 12.8" in reason.sentence
    assert "CUDA_VERSION" in refused(make.container("1", env={"CUDA_VERSION": "13.0.1"}), OLD).reason.sentence


def test_requirements_are_asked_of_the_gpus_that_were_chosen() -> None:
    assert injected(make.container("1", env=REQUIRING), TESLA)
    both = make.node([make.gpu(0, brand="tesla"), make.gpu(1)], driver_version="580.95.05", cuda_version="12.8")
    assert injected(make.container("device=0", env=REQUIRING), both)
    refused(make.container("device=1", env=REQUIRING), both)
    refused(make.container("all", env=REQUIRING), both)


def test_whoever_gets_no_gpu_requires_nothing() -> None:
    assert injected(make.container("none", env=REQUIRING), OLD)
    assert isinstance(decide(make.container(env=REQUIRING), OLD, Ledger(), POLICY), Pass)


def test_policy_says_whether_requirements_count_and_who_may_turn_them_off() -> None:
    assert injected(make.container("1", env=REQUIRING), OLD, policy=UNCHECKED)
    assert injected(make.container("1", env=SAYS_OFF), OLD)
    assert (
        "policy does not let it count" in refused(make.container("1", env=SAYS_OFF), OLD, policy=STRICT).reason.sentence
    )


def test_a_requirement_that_cannot_be_met_and_a_busy_gpu_are_told_apart() -> None:
    container = make.container("1", env=REQUIRING)
    assert refused(container, OLD, GRANTED_ELSEWHERE).reason.code is Code.GPU_BUSY


def test_a_simulated_node_grants_without_the_drivers_files() -> None:
    node = make.node(staged=make.driver(trees={}), simulated=True, driver_version="570.26")
    assert not injected(make.container("1"), node).edits.mounts


def test_a_privileged_container_lists_every_node_of_the_host_and_may_ask_all_the_same() -> None:
    every = tuple(make.held_node(gpu) for gpu in NODE.gpus)
    assert injected(make.container("1", devices=every, privileged=True)).grant.uuids == (make.uuid(0),)


def test_asking_twice_gives_the_same_mode_even_where_the_default_changed_in_between() -> None:
    container, side = make.container("device=0"), make.container("device=0", name="side")
    ledger = Ledger().after(injected(container), 0.0)
    ledger = ledger.after(injected(side, ledger=ledger), 0.0)
    assert injected(container, ledger=ledger, policy=SHARING) == injected(container)


def test_asking_again_after_its_gpu_was_lost_gives_another() -> None:
    ledger = make.ledger(make.entry(0, to=make.container("1")))
    broken = [make.gpu(0, unavailable="nvmlDeviceGetName: GPU is lost (15)"), make.gpu(1)]
    for found in (make.gpus()[1:], broken):
        assert injected(make.container("1"), make.node(found), ledger).grant.uuids == (make.uuid(1),)


def test_the_next_attempt_of_a_container_gets_what_the_dead_one_held() -> None:
    failed = make.entry(0, 1, 2, 3, to=make.container("all", id=ContainerId("first")), phase=GrantPhase.CREATED)
    assert len(injected(make.container("all"), ledger=make.ledger(failed)).grant.uuids) == 4


def test_the_dead_attempt_of_a_container_is_no_load() -> None:
    failed = make.entry(0, to=make.container("1", id=ContainerId("first")), phase=GrantPhase.CREATED)
    assert injected(make.container("1"), ledger=make.ledger(failed)).grant.uuids == (make.uuid(0),)
    shared = make.entry(
        0, 1, mode=Mode.SHARED, to=make.container("2", id=ContainerId("first")), phase=GrantPhase.CREATED
    )
    again = injected(make.container("device=0,1"), ledger=make.ledger(shared))
    assert again.grant.mode is Mode.EXCLUSIVE


def test_a_lapsed_grant_neither_blocks_nor_reserves_gpus() -> None:
    other = make.container("device=0", of="other")
    ledger = make.ledger(make.entry(0, to=make.container("1"), phase=GrantPhase.LAPSED))
    ledger = ledger.after(injected(other, ledger=ledger), 0.0)
    assert injected(make.container("1"), ledger=ledger).grant.uuids == (make.uuid(1),)


NEEDS: dict[str, tuple[Container, Policy, str]] = {
    "nothing asked": (make.container(), POLICY, ""),
    "asked": (make.container("1"), POLICY, "gpu.nri.io"),
    "asked by its own key": (
        make.container(of=make.pod(annotations={"gpu.nri.io/container.main": "1", "gpu.nri.io": "none"})),
        POLICY,
        "gpu.nri.io/container.main",
    ),
    "none": (make.container("none"), POLICY, ""),
    "not understood": (make.container("one"), POLICY, "gpu.nri.io"),
    "may not ask": (make.container("1"), CLOSED, "gpu.nri.io"),
    "may not ask, and that is ignored": (make.container("1"), LENIENT, ""),
    "asked, and no good policy": (make.container("1"), BROKEN, "gpu.nri.io"),
    "its own signed grant is no request": (make.container(annotations={"gpu.nri.io/grant": "v1"}), POLICY, ""),
}


@pytest.mark.parametrize(("container", "policy", "key"), NEEDS.values(), ids=NEEDS)
def test_what_must_not_start_without_a_grant(container: Container, policy: Policy, key: str) -> None:
    assert needs_grant(container, policy) == key


HELD: dict[str, tuple[tuple[DeviceRef, ...], Majors, set[int]]] = {
    "nothing": ((), make.MAJORS, set()),
    "by number, whatever its name": ((DeviceRef("/dev/x", 195, 5),), make.MAJORS, {2}),
    "the shared nodes name no gpu": ((DeviceRef("/dev/nvidiactl", 195, 255),), make.MAJORS, set()),
    "another major": ((DeviceRef("/dev/nvidia5", 226, 5),), make.MAJORS, set()),
    "no driver": ((DeviceRef("/dev/nvidia5", 195, 5),), Majors(), set()),
    "two": ((DeviceRef("/dev/a", 195, 7), DeviceRef("/dev/b", 195, 4)), make.MAJORS, {0, 3}),
}


@pytest.mark.parametrize(("devices", "majors", "indices"), HELD.values(), ids=HELD)
def test_whose_nodes_a_container_holds(devices: tuple[DeviceRef, ...], majors: Majors, indices: set[int]) -> None:
    found = external_uuids(make.container(devices=devices), make.node(majors=majors))
    assert found == set(map(make.uuid, indices))


def test_a_grant_says_which_of_its_variables_do_not_reach_the_program() -> None:
    path = {"LD_LIBRARY_PATH": "/opt/lib"}
    assert "LD_LIBRARY_PATH" in injected(make.container("1", env=path, env_twice=frozenset(path))).note
    assert injected(make.container("1", env=path)).note == ""


CUT = make.mig_gpu(1, ["1g.5gb", "1g.5gb"])
CUT_NODE = make.node([make.gpu(0), CUT])


def caps(*places: int) -> tuple[DeviceRef, ...]:
    """Capability nodes of MIG devices of GPU 1, of both kinds, beside its own."""
    minors = [m for at in places for m in (CUT.mig[at].gpu_instance_minor, CUT.mig[at].compute_instance_minor) if m]
    return (make.held_node(CUT), *(DeviceRef(f"/dev/nvidia-caps/nvidia-cap{minor}", 510, minor) for minor in minors))


def test_a_mig_device_is_granted_by_its_own_uuid() -> None:
    decision = injected(make.container("mig=1g.5gb"), CUT_NODE)
    assert decision.grant.uuids == (make.mig_uuid(1, 0),)
    assert decision.edits.env["NVIDIA_VISIBLE_DEVICES"] == make.mig_uuid(1, 0)
    minors = (CUT.mig[0].gpu_instance_minor, CUT.mig[0].compute_instance_minor)
    assert {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in minors} < set(decision.edits.devices)


def test_each_mig_device_has_its_own_holder() -> None:
    first = injected(make.container("mig=1g.5gb", of="a"), CUT_NODE)
    second = injected(make.container("mig=1g.5gb", of="b"), CUT_NODE, Ledger().after(first, 0.0))
    assert second.grant.uuids == (make.mig_uuid(1, 1),)
    both = Ledger().after(first, 0.0).after(second, 0.0)
    third = decide(make.container("mig=1g.5gb", of="c"), CUT_NODE, both, POLICY)
    assert isinstance(third, Refuse)
    assert third.reason.code is Code.GPU_BUSY


def test_mig_without_the_capabilities_major_is_refused() -> None:
    node = make.node([CUT], majors=Majors(nvidia=195, nvidia_uvm=511))
    refusal = decide(make.container("mig=1g.5gb"), node, Ledger(), POLICY)
    assert isinstance(refusal, Refuse)
    assert (refusal.reason.code, "nvidia-caps" in refusal.reason.sentence) == (Code.NODE_NOT_READY, True)


HELD_PARTS: dict[str, tuple[tuple[DeviceRef, ...], list[GpuUuid]]] = {
    "the first": (caps(0), [make.mig_uuid(1, 0)]),
    "both": (caps(0, 1), [make.mig_uuid(1, 0), make.mig_uuid(1, 1)]),
    "nobody can tell which": (caps(), [make.mig_uuid(1, 0), make.mig_uuid(1, 1)]),
}


@pytest.mark.parametrize(("devices", "parts"), HELD_PARTS.values(), ids=HELD_PARTS)
def test_others_hold_the_mig_devices_whose_capabilities_they_have(
    devices: tuple[DeviceRef, ...], parts: list[GpuUuid]
) -> None:
    found = external_uuids(make.container(devices=devices), CUT_NODE)
    assert found == {CUT.uuid, *parts}


def test_a_container_with_a_mig_device_of_others_is_given_no_other() -> None:
    refusal = decide(make.container("mig=1g.5gb", devices=caps(0)), CUT_NODE, Ledger(), POLICY)
    assert isinstance(refusal, Refuse)
    assert refusal.reason.code is Code.HELD_BY_OTHERS


def test_a_capability_brings_along_what_it_needs() -> None:
    video = injected(make.container("1;capabilities=video"))
    assert "/dev/nvidia-uvm" in video.edits.devices
    assert tree_of(video.edits) == make.TREES + "/compute+video"
    display = injected(make.container("1;capabilities=display,utility"))
    assert "/dev/nvidia-modeset" in display.edits.devices
    assert tree_of(display.edits) == make.TREES + "/display+graphics+utility"


def test_32_bit_libraries_are_found_by_the_variable() -> None:
    edits = injected(make.container("1;capabilities=utility,compat32")).edits
    assert edits.env["LD_LIBRARY_PATH"] == f"{LIBRARIES}:{LIBRARIES}/lib32"


@pytest.mark.parametrize(("strategy", "chosen"), [(Strategy.PACK, 1), (Strategy.SPREAD, 4)], ids=str)
def test_policy_says_where_equal_gpus_are_taken(strategy: Strategy, chosen: int) -> None:
    known = KNOWN["8 x PCIe"]
    node = make.node(known.gpus, links=known.links)
    policy = Policy(placement=PlacementSettings(strategy=strategy))
    ledger = make.ledger(make.entry(0, to=make.container(of="other")))
    assert injected(make.container("1"), node, ledger, policy).grant.uuids == (make.uuid(chosen),)


def test_policy_binds_to_the_numa_nodes_of_the_gpus() -> None:
    node = make.node([make.gpu(0, numa_node=0)], numa=(NumaNode(0, "0-7"),))
    edits = injected(make.container("1"), node, policy=Policy(placement=PlacementSettings(numa=NumaBinding.CPUS))).edits
    assert (edits.cpuset_cpus, edits.cpuset_mems) == ("0-7", "")
