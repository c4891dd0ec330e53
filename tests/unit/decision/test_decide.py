from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.allocation import Allocated, AllocatedDevice, ClaimUid
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Pass, Refuse
from nri_gpu.domain.edits import NO_EDITS, DeviceNode, Extra, NodeExtra
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capability, DrmNode
from nri_gpu.domain.gpu_request import Mode, NumaBinding, Strategy
from nri_gpu.domain.node import Majors, Node, NumaNode
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import (
    CapabilityRules,
    ClaimDefaults,
    Complete,
    Disarm,
    EnvironmentSettings,
    ExtraRules,
    ForeignSettings,
    NamespaceRules,
    Otherwise,
    PlacementSettings,
    Policy,
    RequirementSettings,
    VisibleDevices,
)
from tests.support import builders as make
from tests.support.fabrics import KNOWN
from tests.support.loading import tree_of
from tests.unit.decision.deciding import NODE, POLICY, injected, refused

DISARMING = Policy(environment=EnvironmentSettings(disarm=Disarm.ALL))
SHARING = Policy(defaults=ClaimDefaults(mode=Mode.SHARED))
CLOSED = Policy(namespaces=NamespaceRules(deny=Globs(("ml",))))
LENIENT = Policy(namespaces=NamespaceRules(deny=Globs(("ml",)), otherwise=Otherwise.IGNORE))
BROKEN = Policy.broken("policy.toml:3: plugin.index: must be two digits.")
ARMED = {"NVIDIA_VISIBLE_DEVICES": "all"}
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}


PASSES: dict[str, tuple[Container, Policy]] = {
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
    assert "leave it out of the pod's environment" in str(refused(container, policy=DISARMING))
    assert not isinstance(decide(container, NODE, Ledger(), POLICY), Refuse)
    void = replace(container, env=VOID)
    assert not isinstance(decide(void, NODE, Ledger(), DISARMING), Refuse)


def test_none_is_a_grant_of_nothing_so_that_it_leaves_a_signed_grant() -> None:
    empty = Node(number=1, inventory=make.inventory((), fault="no driver"))
    for node in (NODE, empty):
        grant = injected(make.container("none"), node).grant
        assert (grant.uuids, grant.mode) == ((), None)


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


HANDLERS = {"nvidia": True, "nvidia-cdi": True, "nvidia-legacy": True, "": False, "runc": False, "not-nvidia": False}


@pytest.mark.parametrize(("handler", "theirs"), HANDLERS.items())
def test_a_pod_on_nvidias_runtime_is_injected_once(handler: str, theirs: bool) -> None:
    """That runtime acts on the variable as well, and leaves `void` alone."""
    of = make.pod(runtime_handler=handler)
    allocated = Allocated((AllocatedDevice("nvidia.com/gpu", make.uuid(2)),))
    claimed = Allocated((AllocatedDevice("gpu", make.uuid(2)),), claims=(ClaimUid("c"),))
    asking = [
        make.container(of=replace(of, annotations={"gpu.nri.io": "device=2"})),
        make.container(of=of, kubelet=allocated, env={"NVIDIA_VISIBLE_DEVICES": make.uuid(2)}),
        make.container(of=of, kubelet=claimed, cdi_devices=("gpu.nri.io/claim=c",)),
    ]
    voided = {**VOID, "NRI_GPU_UUIDS": make.uuid(2)}
    for container in asking:
        env = injected(container).edits.env
        shown = {name: env[name] for name in env if name != "LD_LIBRARY_PATH"}
        assert shown == (voided if theirs else {"NVIDIA_VISIBLE_DEVICES": make.uuid(2)})


def test_on_nvidias_runtime_what_others_brought_by_cdi_or_nobody_asked_of_us_is_left_as_it_is() -> None:
    of = make.pod(runtime_handler="nvidia")
    for container in (
        make.container(of=of, env=ARMED),
        make.container(of=of, env=VOID, cdi_devices=("nvidia.com/gpu=0",)),
        make.container(
            of=of, env=VOID, cdi_devices=("k8s.gpu.nvidia.com/claim=0",), devices=(make.held_node(NODE.gpus[0]),)
        ),
    ):
        for policy in (POLICY, Policy(foreign=ForeignSettings(complete=Complete.ALL))):
            decision = decide(container, NODE, Ledger(), policy)
            assert isinstance(decision, Pass)
            assert decision.edits == NO_EDITS


STARTING = Node(
    number=1, inventory=make.inventory(), driver_fault="the driver's files are being searched for; try again"
)
STAGED = make.trees()
SERVER = make.node(staged=make.driver(trees={some: STAGED[some] for some in STAGED if some <= DEFAULT_CAPABILITIES}))
COMPATIBLE = make.node(
    staged=make.driver(trees={some: STAGED[some] for some in STAGED if some != {Capability.COMPAT32}})
)
MIG_ALONE = make.node([make.mig_gpu(1)], majors=Majors(nvidia=195, nvidia_uvm=511))
TWO_VERSIONS = "libraries on this node are 580.95.05 but its loaded kernel module is"
NO_CUDA = make.node(staged=make.driver(lacks={Capability.COMPUTE: "libcuda.so"}))
NO_DRAWING = make.node(staged=make.driver(lacks={Capability.GRAPHICS: "libA.so or libB.so", Capability.NGX: "libC.so"}))
# The claim, the node, and what is said of it.
NOT_READY: dict[str, tuple[str, Node, str]] = {
    "no files of a capability": ("1;capabilities=compute,graphics,ngx", SERVER, "has no files for graphics, ngx"),
    "no libcuda": ("1", NO_CUDA, "has no libcuda.so for compute, and an image's own does not count: install"),
    "no libcuda, and what goes without": ("1", NO_CUDA, "ask with capabilities=utility, or run"),
    "no libcuda, and nothing goes without": (
        "1;capabilities=video,compat32",
        NO_CUDA,
        "ask with capabilities=utility,",
    ),
    "no libnvidia-ml": (
        "1;capabilities=utility",
        make.node(staged=make.driver(lacks={Capability.UTILITY: "libD.so"})),
        "install that part of it or run the pod on a node that has it.",
    ),
    "no libraries of two": (
        "1;capabilities=compute,display,ngx",
        NO_DRAWING,
        "has no libA.so or libB.so for graphics and no libC.so for ngx, and an image's own does not count: install "
        "that part of it, ask with capabilities=compute, or",
    ),
    "no files of any": ("1", make.node(staged=make.driver(trees={})), "compute, utility"),
    "no driver files yet": ("1", STARTING, "being searched for"),
    "32-bit libraries of nothing": ("1;capabilities=compat32", COMPATIBLE, "name them too"),
    "the inventory's fault": (
        "1",
        make.node((), fault="no driver is loaded"),
        "cannot grant GPUs: no driver is loaded.",
    ),
    "no module": ("1", make.node(majors=Majors(nvidia=195)), "modprobe nvidia-uvm"),
    "no module for MIG devices": ("mig=1g.5gb", MIG_ALONE, "nvidia-caps"),
    "another module": ("1", replace(NODE, module_version="570.26"), f"{TWO_VERSIONS} 570.26"),
    "another module, as NVML says": ("1", make.node(driver_version="590.44.01"), f"{TWO_VERSIONS} 590.44.01"),
    "no module any more": (
        "1",
        replace(NODE, module_version=""),
        "module was unloaded, and the driver's libraries are 580.95.05",
    ),
}


@pytest.mark.parametrize(("claim", "node", "words"), NOT_READY.values(), ids=NOT_READY)
def test_a_node_that_is_not_ready_says_why(claim: str, node: Node, words: str) -> None:
    reason = refused(make.container(claim), node)
    assert reason.code is Code.NODE_NOT_READY
    assert words in reason.sentence


def test_utility_needs_no_libcuda_and_a_simulated_node_no_library() -> None:
    assert injected(make.container("1;capabilities=utility"), NO_CUDA)
    assert injected(make.container("1"), replace(NO_CUDA, inventory=replace(NO_CUDA.inventory, simulated=True)))


HEADLESS = Policy(capabilities=CapabilityRules(allowed=frozenset(Capability) - {Capability.DISPLAY}))
VIDEO = Policy(capabilities=CapabilityRules(allowed=frozenset({Capability.VIDEO})))
FORGED = make.container(annotations={"gpu.nri.io/grant": "v1"})
COVERED = make.container("1", mounts=frozenset({"/dev/nvidia-uvm"}))
BROUGHT = "capabilities compute may not be asked for (compute is brought along by another)"
REFUSALS: dict[str, tuple[Container, Policy, Code, str]] = {
    "syntax": (make.container("one"), POLICY, Code.BAD_REQUEST, "gpu.nri.io at character 1"),
    "syntax, even where asking is ignored": (make.container("one"), LENIENT, Code.BAD_REQUEST, "one"),
    "syntax, even without a policy": (make.container("one"), BROKEN, Code.BAD_REQUEST, "one"),
    "a signed grant of its own": (FORGED, POLICY, Code.BAD_REQUEST, "only nri-gpu writes this annotation"),
    "no good policy": (make.container("1"), BROKEN, Code.BAD_POLICY, "plugin.index"),
    "may not ask": (make.container("1"), CLOSED, Code.NOT_ALLOWED, "namespaces.deny[0]"),
    "a capability that policy denies": (
        make.container("1;capabilities=display"),
        HEADLESS,
        Code.NOT_ALLOWED,
        "capabilities display may not be asked for",
    ),
    "a capability that brings a denied one": (
        make.container("1;capabilities=video"),
        VIDEO,
        Code.NOT_ALLOWED,
        BROUGHT,
    ),
    "a volume where a node goes": (COVERED, POLICY, Code.VOLUME_IN_THE_WAY, "/dev/nvidia-uvm"),
}


@pytest.mark.parametrize(("container", "policy", "code", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(container: Container, policy: Policy, code: Code, words: str) -> None:
    reason = refused(container, policy=policy)
    assert reason.code is code
    assert words in reason.sentence


NEW = make.pod("web-6d4b9-x2v4p", "2", labels={"pod-template-hash": "6d4b9"})
OTHERS = {
    "web-5f7c8-abcde": True,
    "web-6d4b9-abcde": False,  # of the same ReplicaSet
    "web-5f7c8-0": False,
    "web-api-5f7c8-abcde": False,
    "api-5f7c8-abcde": False,
}


@pytest.mark.parametrize("node", [make.node([make.gpu(0), make.gpu(1)])])
@pytest.mark.parametrize(("old", "named"), OTHERS.items())
def test_a_rolling_update_that_waits_for_itself_is_told_which_pod_to_delete(node: Node, old: str, named: bool) -> None:
    to_delete = f"delete ml/{old} if this pod replaces it (a Deployment does with strategy: Recreate), or wait until"
    held = make.ledger(make.entry(0, to=make.container(of=old)))
    asks = {"2": NEW, "device=0": make.pod(NEW.name, "device=0", labels=NEW.labels)}
    for pod in asks.values():
        assert (to_delete in refused(make.container(of=pod), node, held).sentence) is named
    alone = replace(NEW, labels={})
    assert to_delete not in refused(make.container(of=alone), node, held).sentence
    elsewhere = make.ledger(make.entry(0, to=make.container(of=make.pod(old, namespace="other"))))
    assert to_delete not in refused(make.container(of=NEW), node, elsewhere).sentence


# What an annotation may not ask for beside one GPU of the kubelet's.
BEYOND = {
    "2": "asks for 2 GPUs, but the kubelet allocated 1: ask for the same number in resources.limits",
    "device=0": "names GPUs, but here the kubelet chooses them: write all, which means those that it allocated",
    "1;mode=shared": "asks for mode=shared, but the kubelet allocated in exclusive mode: ask for another resource",
    "1;mode=mps": "take the resource out of its limits, and have the policy put GPUs for annotations into a [[pool]]",
}


@pytest.mark.parametrize(("claim", "words"), BEYOND.items())
def test_an_annotation_only_shapes_what_the_kubelet_allocated(claim: str, words: str) -> None:
    allocated = Allocated((AllocatedDevice("nvidia.com/gpu", make.uuid(2)),))
    reason = refused(make.container(claim, kubelet=allocated))
    assert reason.code is Code.BAD_REQUEST
    assert words in reason.sentence
    assert injected(make.container("all", kubelet=allocated)).grant.uuids == (make.uuid(2),)
    assert injected(make.container("none", kubelet=allocated)).grant.uuids == ()


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
    reason = refused(container)
    assert reason.code is Code.HELD_BY_OTHERS
    assert f"already holds {kind}=0, put there" in reason.sentence
    asked_for_nothing = replace(container, pod=make.pod())
    assert isinstance(decide(asked_for_nothing, NODE, Ledger(), POLICY), Pass)


def test_many_names_stay_a_sentence_and_other_vendors_are_none_of_ours() -> None:
    many = tuple(f"nvidia.com/gpu={'x' * 50}{number}" for number in range(9))
    assert "..." in refused(make.container("1", cdi_devices=many)).sentence
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
        reason = refused(make.container("1", env=REQUIRING), OLD, ledger)
        assert reason.code is Code.REQUIREMENT_NOT_MET
        assert "needs cuda>=13.0, and its other alternative does not hold; this node has CUDA 12.8" in reason.sentence
    assert "CUDA_VERSION" in refused(make.container("1", env={"CUDA_VERSION": "13.0.1"}), OLD).sentence


def test_requirements_are_asked_of_the_gpus_that_were_chosen() -> None:
    assert injected(make.container("1", env=REQUIRING), TESLA)
    both = make.node([make.gpu(0, brand="tesla"), make.gpu(1)], driver_version="580.95.05", cuda_version="12.8")
    assert injected(make.container("device=0", env=REQUIRING), both)
    refused(make.container("device=1", env=REQUIRING), both)
    refused(make.container("all", env=REQUIRING), both)


def test_policy_says_whether_requirements_count_and_who_may_turn_them_off() -> None:
    assert injected(make.container("1", env=REQUIRING), OLD, policy=UNCHECKED)
    assert injected(make.container("1", env=SAYS_OFF), OLD)
    assert "policy ignores it" in refused(make.container("1", env=SAYS_OFF), OLD, policy=STRICT).sentence


def test_a_simulated_node_grants_without_the_drivers_files() -> None:
    node = make.node(staged=make.driver(trees={}), simulated=True, driver_version="570.26")
    assert not injected(make.container("1"), node).edits.mounts


def test_a_privileged_container_lists_every_node_of_the_host_and_may_ask_all_the_same() -> None:
    every = tuple(make.held_node(gpu) for gpu in NODE.gpus)
    assert injected(make.container("1", devices=every, privileged=True)).grant.uuids == (make.uuid(0),)


def test_asking_again_after_its_gpu_was_lost_gives_another() -> None:
    ledger = make.ledger(make.entry(0, to=make.container("1")))
    broken = [make.gpu(0, unavailable="nvmlDeviceGetName: GPU is lost (15)"), make.gpu(1)]
    for found in (make.gpus()[1:], broken):
        assert injected(make.container("1"), make.node(found), ledger).grant.uuids == (make.uuid(1),)


def test_a_grant_says_which_of_its_variables_do_not_reach_the_program() -> None:
    path = {"LD_LIBRARY_PATH": "/opt/lib"}
    assert "LD_LIBRARY_PATH" in injected(make.container("1", env=path, env_twice=frozenset(path))).note
    assert injected(make.container("1", env=path)).note == ""


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


# --- extras: policy first, then what the node has

DRAWING = tuple(make.gpu(index, drm=(DrmNode(f"card{index}", 226, index),)) for index in range(2))
EQUIPPED = make.node(
    DRAWING,
    extras={
        Extra.GDRCOPY: NodeExtra((DeviceNode("/dev/gdrdrv", 1521, 0),)),
        Extra.RDMA: NodeExtra((DeviceNode("/dev/infiniband/uverbs0", 231, 192),)),
    },
)
ALLOWING = Policy(extras=ExtraRules(allowed=frozenset(Extra)))


def test_what_policy_does_not_list_is_refused_before_anybody_looks_for_it() -> None:
    reason = refused(make.container("1;extras=gdrcopy,fabricmanager"), EQUIPPED)
    assert (reason.code, "extras gdrcopy, fabricmanager may not be asked for" in reason.sentence) == (
        Code.NOT_ALLOWED,
        True,
    )
    assert refused(make.container("1;extras=fabricmanager"), EQUIPPED, policy=ALLOWING).code is Code.NODE_NOT_READY


def test_a_limit_of_the_containers_own_is_told_of() -> None:
    limited = make.container("1;extras=rdma", rlimits=frozenset({"RLIMIT_MEMLOCK"}))
    decision = injected(limited, EQUIPPED, policy=ALLOWING)
    assert "RLIMIT_MEMLOCK" in decision.note
    assert not decision.edits.rlimits


def test_policy_gives_extras_to_whoever_names_none() -> None:
    gifts = Policy(defaults=ClaimDefaults(extras=frozenset({Extra.DRM})))
    assert "/dev/dri/card0" in injected(make.container("device=0"), EQUIPPED, policy=gifts).edits.devices


def test_who_names_what_is_no_extra_any_more_gets_no_more_for_it() -> None:
    """It named extras, so the policy's gifts are not for it; and it is not refused, whatever the policy lists."""
    gifts = Policy(defaults=ClaimDefaults(extras=frozenset({Extra.DRM})), extras=ExtraRules(allowed=frozenset()))
    named = injected(make.container("device=0;extras=profile"), EQUIPPED, policy=gifts)
    plain = injected(make.container("device=0"), EQUIPPED)
    assert named.edits == plain.edits
    assert "extra profile no longer exists" in named.note


def test_what_policy_gives_it_must_also_allow() -> None:
    torn = Policy(defaults=ClaimDefaults(extras=frozenset({Extra.RDMA})))
    assert refused(make.container("1"), EQUIPPED, policy=torn).code is Code.NOT_ALLOWED
