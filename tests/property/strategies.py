"""Strategies of nodes, pods, policies and ledgers: small, so that what is drawn meets, and hostile where it may be."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId, DeviceRef, Pod, PodId, PodUid, Qos
from nri_gpu.domain.cordons import Cordons, marked
from nri_gpu.domain.edits import (
    HARMLESS,
    Channels,
    DeviceNode,
    Edits,
    Extra,
    Mount,
    NodeExtra,
    Rlimit,
)
from nri_gpu.domain.edits import (
    UNLIMITED as NO_RLIMIT,
)
from nri_gpu.domain.gpu import (
    DEFAULT_CAPABILITIES,
    Capability,
    ComputeMode,
    DrmNode,
    Ecc,
    Fabric,
    FabricState,
    Gpu,
    GpuUuid,
    MigDevice,
)
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import GpuFault, Inventory, Majors, Node
from nri_gpu.ledger.holders import ExternalAllocation, Releasing
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.nri.convert import READ_ENV
from nri_gpu.policy import model
from nri_gpu.policy.forms import UNLIMITED, Globs
from nri_gpu.policy.model import Policy
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.policy.rules import LIMIT_KEYS, NO_LIMITS, Limits, Pool, PoolList, Rule, RuleList
from nri_gpu.request.environment import CAPABILITIES
from tests.support import builders as make

REQUIREMENTS: Final = ("NVIDIA_REQUIRE_CUDA", "CUDA_VERSION", "NVIDIA_DISABLE_REQUIRE", "NVIDIA_REQUIRE_JETPACK")
POD_NAMES: Final = ("a", "b", "c")
CONTAINER_NAMES: Final = ("main", "side")

modes = st.sampled_from(Mode)
texts = st.text(max_size=12)
_wanted = st.one_of(
    st.sampled_from(["all", "1", "2", "3", "memory>=41Gi", "model=*h100*", "model=[", "2;capabilities=utility"]),
    st.sampled_from(["device=0", "device=1,2", "device=9", "device=GPU-0000", "all;arch>8.0"]),
    st.just(f"device={make.uuid(1)}"),
    st.sampled_from(["mig=1g.5gb", "mig=1g.5gb:2,3g.20gb", "mig=3g.20gb;memory>=10Gi", "mig=7g.40gb", "device=0:0,1"]),
    st.sampled_from([f"device={make.mig_uuid(1)}", "device=MIG-0000", "device=0:1", "device=1:0,0:0", "device=3:9"]),
)
_extra = st.sampled_from(["drm", "gds", "rdma", "gdrcopy", "nvswitch", "imex:0", "imex:9", "profile", "mig-config"])
_extras = st.lists(_extra, min_size=1, max_size=3, unique=True).map(lambda some: ";extras=" + ",".join(some))
_asking = st.builds(
    "{}{}{}".format,
    _wanted,
    st.sampled_from(["", ";mode=shared", ";mode=exclusive", ";mode=mps", ";mode=mps;sharing=memory:30Gi,threads:40"]),
    st.one_of(st.just(""), st.just(""), _extras),
)
claims = st.one_of(_asking, _asking, _asking, _asking, st.just("none"))
values = st.one_of(claims, claims, st.text(max_size=20), st.just("model=" + "?" * 60 + ";" + " " * 3000))
keys = st.one_of(
    st.sampled_from([make.KEY, make.KEY + "/pod", make.KEY + "/container.main", make.KEY + "/container.side"]),
    st.sampled_from([make.KEY + "/grant", make.KEY + "/", "nri.io", "x"]),
    texts.map(f"{make.KEY}/{{}}".format),
)
_usual = claims.map(lambda claim: {make.KEY: claim})
requests = st.one_of(_usual, _usual, st.dictionaries(keys, values, max_size=3))


def migs(gpu_index: int) -> st.SearchStrategy[MigDevice]:
    """A MIG device as NVML and the kernel may tell of it."""
    sound = st.builds(
        lambda place, profile: make.mig(gpu_index, place, profile=profile),
        st.integers(0, 3),
        st.sampled_from(["1g.5gb", "1g.5gb", "3g.20gb", "1g.5gb+gfx"]),
    )
    vague = sound.map(lambda part: replace(part, compute_instance_minor=None))
    failed = sound.map(lambda part: replace(part, unavailable="nvmlDeviceGetAttributes_v2: Unknown Error (999)"))
    return st.one_of(sound, sound, sound, vague, failed)


def facts() -> st.SearchStrategy[dict[str, Any]]:
    """How a GPU is set up; None and empty for what nobody told."""
    numbers = st.integers(0, 2**32 - 1)
    cluster = st.sampled_from(["", "01234567-89ab-cdef-0123-456789abcdef"])
    return st.fixed_dictionaries(
        {
            "architecture": st.sampled_from(["", "hopper", "ada-lovelace"]),
            "cpus": st.sampled_from(["", "0-3,8"]),
            "compute_mode": st.none() | st.sampled_from(ComputeMode),
            "persistence": st.none() | st.booleans(),
            "ecc": st.none() | st.builds(Ecc, st.booleans(), st.booleans()),
            "addressing": st.sampled_from(["", "none", "hmm", "ats"]),
            "pcie_root": st.sampled_from(["", "pci0000:c9", "pci00010000:00"]),
            "remap_pending": st.none() | st.booleans(),
            "fabric": st.none()
            | st.builds(Fabric, st.sampled_from(FabricState), numbers, cluster, numbers, st.none() | numbers),
        }
    )


@st.composite
def gpus(draw: st.DrawFn, index: int) -> Gpu:
    """Healthy, lost, cut into MIG devices, of either model."""
    parts = tuple(draw(st.lists(migs(index), max_size=3, unique_by=lambda part: part.index)))
    cut = make.gpu(index, mig_enabled=True, mig=parts)
    drm = draw(st.sampled_from([(), (DrmNode(f"card{index}", 226, index),)]))
    healthy = replace(draw(st.sampled_from([make.gpu(index), make.gpu(index), cut])), drm=drm)
    h100 = replace(healthy, model="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, arch=(9, 0))
    healthy = replace(healthy, brand=draw(st.sampled_from(["", "nvidia", "geforce"])))
    lost = replace(healthy, unavailable="nvmlDeviceGetName: GPU is lost (15)")
    return draw(st.sampled_from([healthy, healthy, healthy, h100, lost]))


OFFERS: Final = {
    Extra.GDS: NodeExtra((DeviceNode("/dev/nvidia-fs0", 1520, 0),), (Mount("/etc/cufile.json", "/etc/cufile.json"),)),
    Extra.GDRCOPY: NodeExtra(lacking="there is no /dev/gdrdrv"),
    Extra.RDMA: NodeExtra((DeviceNode("/dev/infiniband/uverbs0", 231, 192),)),
    Extra.IMEX: NodeExtra(channels=Channels(512, 8)),
    Extra.MIG_CONFIG: NodeExtra((DeviceNode("/dev/nvidia-caps/nvidia-cap1", 510, 1, 0o400),)),
}
offers = st.one_of(
    st.just(OFFERS), st.sets(st.sampled_from([*OFFERS])).map(lambda some: {extra: OFFERS[extra] for extra in some})
)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """From no GPU to four of which some are gone, or out of use; one pod may have had the first before."""
    number = draw(st.integers(0, make.GPUS))
    gone = draw(st.sets(st.integers(0, make.GPUS - 1), max_size=1))
    some = st.sampled_from([None, 511])
    out_of_use = frozenset(map(make.uuid, draw(st.sets(st.integers(0, make.GPUS - 1), max_size=2))))
    given = {make.uuid(0): draw(st.sampled_from([frozenset[str](), frozenset({f"uid-{POD_NAMES[0]}"})]))}
    found = make.inventory(
        [draw(gpus(index)) for index in range(number) if index not in gone],
        faults=tuple(GpuFault(index, draw(texts)) for index in gone),
        majors=draw(st.one_of(st.just(make.MAJORS), st.builds(Majors, st.just(195), some), st.just(Majors()))),
        driver_version=draw(st.sampled_from(["", "580.95.05"])),
        cuda_version=draw(st.sampled_from(["", "13.0"])),
        fault=draw(st.sampled_from(["", "", "", "", "driver is gone \u2603" * 60])),
        simulated=draw(st.booleans()),
        extras=draw(offers),
    )
    return marked(found, Cordons(draw(st.sampled_from([frozenset[GpuUuid](), out_of_use])), given))


SOME = (DEFAULT_CAPABILITIES, *(frozenset({each}) for each in DEFAULT_CAPABILITIES))
DRAWING = frozenset({Capability.COMPUTE, Capability.GRAPHICS})
# A few of the trees there can be: hypothesis prints what it fails with.
DRIVER = make.driver(trees={some: make.trees()[some] for some in (*SOME, DRAWING, DRAWING | SOME[0])})
LACKING = make.driver(lacks={Capability.GRAPHICS: "libGLX_nvidia.so", Capability.NGX: "libnvidia-ngx.so"})
nodes = st.builds(
    Node,
    number=st.just(1),
    inventory=st.one_of(st.just(make.inventory(extras=OFFERS)), inventories(), inventories()),
    driver=st.sampled_from([DRIVER, DRIVER, LACKING, make.driver(trees={}), None]),
    driver_fault=st.sampled_from(["", "looking.\n"]),
    module_version=st.sampled_from([None, None, "580.95.05", "570.26", ""]),
    compat=st.sampled_from([(), (make.package(),)]),
    inventory_age_s=st.sampled_from([0.0, 301.0]),
)
globs = st.sampled_from([("*",), ("ml",), ("m[a-z]", "x*"), ()]).map(Globs)
name_globs = st.one_of(
    st.none(),
    st.lists(
        st.sampled_from(["*", "ml", "m*", "*l", "m?", "[a-m]l", "[!x]*", "a", "b", "main", "s*", "?", "", "x[", "*a*"]),
        min_size=1,
        max_size=2,
        unique=True,
    ).map(lambda patterns: Globs(tuple(patterns))),
)
label_values = st.sampled_from(["", "a", "b", "ab"])
labels = st.dictionaries(st.sampled_from(["team", "example.com/tier"]), label_values, max_size=2)
label_globs = st.dictionaries(
    st.sampled_from(["team", "example.com/tier"]), st.sampled_from(["a", "*", "?", "a*"]), min_size=1, max_size=2
).map(lambda pairs: tuple((key, Globs((pattern,))) for key, pattern in pairs.items()))
CGROUPS: Final = (
    "/kubepods/burstable/pod1",
    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice",
    "/kubepods/pod1",
    "",
    "/kubepods",
    "/system.slice",
)
numbers = st.one_of(st.just(UNLIMITED), st.integers(0, 3))
limits = st.one_of(
    st.just(NO_LIMITS),
    st.builds(
        lambda values, shares: Limits(**dict(zip(LIMIT_KEYS, (*values, shares), strict=True))),
        st.lists(numbers, min_size=len(LIMIT_KEYS) - 1, max_size=len(LIMIT_KEYS) - 1),
        st.sampled_from([UNLIMITED, 1, 2]),
    ),
)
own_limits = st.dictionaries(st.sampled_from(LIMIT_KEYS), st.integers(1, 3), max_size=2).map(
    lambda own: tuple(own.items())
)
POOL_NAMES: Final = ("big", "cut")


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Most often nothing."""
    return st.one_of(st.none(), st.none(), strategy)


@st.composite
def rules_of(draw: st.DrawFn, pools: tuple[str, ...] = ()) -> Rule:
    """A rule that may match, and says little more than what the parser would let it say."""
    whom = {key: draw(optional(name_globs)) for key in ("namespace", "pod", "container", "runtime_handler")}
    rule = Rule(
        allow=draw(st.booleans()),
        name=draw(st.sampled_from(["", "r"])),
        labels=draw(optional(label_globs)),
        qos=draw(optional(st.frozensets(st.sampled_from(Qos), min_size=1))),
        reason=draw(st.sampled_from(["", "because " * 24])),
        **whom,
    )
    if not rule.allow:
        return replace(rule, otherwise=draw(optional(st.sampled_from(model.Otherwise))))
    return replace(
        rule,
        default_mode=draw(optional(modes)),
        modes=draw(optional(st.frozensets(modes, min_size=1))),
        default_capabilities=draw(optional(st.just(frozenset({Capability.UTILITY})))),
        capabilities=draw(optional(st.just(DEFAULT_CAPABILITIES))),
        pool=draw(optional(st.sampled_from(pools).map(lambda name: Globs((name,))))) if pools else None,
        limits=draw(optional(own_limits)),
    )


@st.composite
def _pool(draw: st.DrawFn, name: str) -> Pool:
    return Pool(
        name=name,
        device=draw(optional(st.sampled_from([("0", "1"), (make.uuid(2),), ("0:1", make.mig_uuid(1)), ("9",)]))),
        model=draw(optional(st.sampled_from([Globs(("*h100*",)), Globs(("*",))]))),
        memory_at_least=draw(optional(st.just(41 * 2**30))),
        mig=draw(optional(st.just(("1g.5gb",)))),
        namespaces=draw(optional(st.sampled_from([Globs(("ml",)), Globs(("x",))]))),
        containers_per_gpu=draw(optional(st.sampled_from([1, 2, UNLIMITED]))),
    )


@st.composite
def rules_and_pools(draw: st.DrawFn) -> tuple[RuleList, PoolList]:
    """Most policies have neither."""
    names = draw(st.sampled_from([(), (), POOL_NAMES[:1], POOL_NAMES]))
    rules = draw(st.one_of(st.just([]), st.lists(rules_of(names), max_size=4)))
    return RuleList(tuple(rules)), PoolList(tuple(draw(_pool(name)) for name in names))


mps_settings = st.builds(
    MpsSettings,
    enabled=st.sampled_from([True, True, False]),
    containers_per_gpu=st.sampled_from([48, 2]),
    default_memory_mib=st.sampled_from([0, 4096]),
    most_memory_mib=st.sampled_from([0, 35 * 1024]),
    most_threads_percent=st.sampled_from([100, 30]),
)
_plain_policies = st.builds(
    Policy,
    defaults=st.builds(
        model.ClaimDefaults,
        mode=modes,
        capabilities=st.sampled_from(
            [DEFAULT_CAPABILITIES, frozenset({Capability.UTILITY}), frozenset({Capability.DISPLAY}), DRAWING]
        ),
    ),
    extras=st.builds(
        model.ExtraRules, allowed=st.sampled_from([frozenset(Extra), frozenset(Extra), HARMLESS, frozenset[Extra]()])
    ),
    namespaces=st.builds(
        model.NamespaceRules,
        allow=st.one_of(st.just(Globs(("*",))), globs),
        deny=st.sampled_from([Globs(()), Globs(()), Globs(("ml",))]),
        otherwise=st.sampled_from(model.Otherwise),
    ),
    compat=st.builds(model.CompatSettings, dir=st.sampled_from(["", "/packages"]), across_minor=st.booleans()),
    foreign=st.builds(
        model.ForeignSettings,
        complete=st.sampled_from(model.Complete),
        monitors=st.sampled_from([Globs(()), Globs(()), Globs(("ml/*",))]),
    ),
    requirements=st.builds(model.RequirementSettings, check=st.booleans(), may_disable=st.booleans()),
    environment=st.builds(
        model.EnvironmentSettings,
        visible_devices=st.sampled_from(model.VisibleDevices),
        disarm=st.sampled_from(model.Disarm),
        driver_capabilities=st.sampled_from(model.DriverCapabilities),
        may_ask=st.sampled_from([Globs(()), Globs(()), Globs(("ml",))]),
        may_ask_all=st.booleans(),
    ),
    modes=st.builds(
        model.ModeRules, allowed=st.sampled_from([frozenset(Mode), frozenset(Mode), frozenset({Mode.SHARED})])
    ),
    limits=st.one_of(st.just(NO_LIMITS), limits),
    mps=mps_settings,
    privileged=st.builds(model.PrivilegedSettings, action=st.sampled_from(model.PrivilegedAction)),
    inventory=st.builds(model.InventorySettings, stale=st.sampled_from(model.Stale)),
)
good_policies = st.builds(
    lambda policy, tables: replace(policy, rule=tables[0], pool=tables[1]), _plain_policies, rules_and_pools()
)
policies = st.one_of(st.just(Policy()), good_policies, st.builds(Policy.broken, st.text(min_size=1, max_size=900)))


@st.composite
def pods(draw: st.DrawFn) -> Pod:
    """One of three pods."""
    name = draw(st.sampled_from(POD_NAMES))
    namespace = draw(st.one_of(st.just("ml"), texts))
    return make.pod(
        name,
        annotations=draw(requests),
        namespace=namespace,
        runtime_handler=draw(st.one_of(st.sampled_from(["", "nvidia"]), texts)),
        labels=draw(labels),
        cgroup_parent=draw(st.sampled_from(CGROUPS)),
    )


devices = st.one_of(
    st.sampled_from([DeviceRef("/dev/fuse", 10, 229), DeviceRef("/dev/nvidiactl", 195, 255)]),
    st.builds(DeviceRef, texts.map("/dev/{}".format), st.sampled_from([1, 195, 511]), st.integers(0, 8)),
)
# Of NVIDIA_DRIVER_CAPABILITIES.
parts_of_the_driver = st.one_of(
    st.just("all"), st.lists(st.sampled_from([*Capability, "x"]), max_size=4).map(",".join), texts
)
env = st.dictionaries(
    st.one_of(
        st.sampled_from(["LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", CAPABILITIES, "PATH", *REQUIREMENTS]),
        st.text(max_size=4).filter(lambda name: "=" not in name),
    ),
    st.one_of(st.sampled_from(["all", "void", "", ":", "/usr/local/nvidia/lib64:/x", "1", "0,1", "cuda>=13.0"]), texts),
    max_size=3,
)
mounts = st.frozensets(
    st.one_of(
        st.sampled_from(["/", "/usr/local", "/usr/local/nvidia", "/opt", "/run/", "/usr/bin", "/dev/shm", ""]), texts
    ),
    max_size=4,
)


@st.composite
def containers(draw: st.DrawFn) -> Container:
    """A container of one of the pods, most often without anything odd about it."""
    of, name, variables = draw(pods()), draw(st.sampled_from(CONTAINER_NAMES)), draw(env)
    twice = draw(st.sampled_from([frozenset[str](), frozenset(READ_ENV)])) & variables.keys()
    return Container(
        id=ContainerId(f"{of.name}.{name}"),
        name=name,
        pod=of,
        annotations=draw(st.one_of(st.just({}), st.just({}), st.dictionaries(keys, values, max_size=2))),
        env=variables,
        env_twice=frozenset(twice),
        devices=tuple(draw(st.lists(devices, max_size=2))),
        mounts=draw(mounts),
        rlimits=draw(st.sampled_from([frozenset[str](), frozenset({"RLIMIT_MEMLOCK", "RLIMIT_NOFILE"})])),
        pinned=draw(st.sampled_from([False, False, True])),
        privileged=draw(st.sampled_from([False, False, False, True])),
        uid=draw(st.sampled_from([None, None, 0, 1000])),
    )


def edits(names: st.SearchStrategy[str]) -> st.SearchStrategy[Edits]:
    """Edits of every kind whose paths, variables and limits have these names."""
    ids = st.integers(0, 9)
    nodes = st.builds(DeviceNode, names, st.integers(0, 4095), st.integers(0, 2**20), st.integers(0, 0o7777), ids, ids)
    limits = st.integers(0, NO_RLIMIT)
    return st.builds(
        Edits.of,
        devices=st.lists(nodes, max_size=4).map(tuple),
        mounts=st.lists(st.builds(Mount, names, names, st.lists(names, max_size=2).map(tuple)), max_size=4).map(tuple),
        env=st.dictionaries(names, texts, max_size=3),
        rlimits=st.lists(st.builds(Rlimit, names, limits, limits), max_size=3).map(tuple),
        cpuset_cpus=st.sampled_from(["", "0-3", "4"]),
        cpuset_mems=st.sampled_from(["", "0", "0,1"]),
    )


mig_uuids: st.SearchStrategy[GpuUuid] = st.builds(make.mig_uuid, st.integers(0, 3), st.integers(0, 3))


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """Of a container that exists here, or of one that is no more."""
    of = make.pod(draw(st.sampled_from(POD_NAMES)), namespace=draw(texts))
    name = draw(st.sampled_from(CONTAINER_NAMES))
    number = draw(st.sampled_from(["", ".2", ".3"]))
    holder = make.container(of=of, name=name, id=ContainerId(f"{of.name}.{name}{number}"))
    indices = draw(st.lists(st.integers(0, 5), unique=True, max_size=4))
    parts = draw(st.lists(mig_uuids, unique=True, max_size=2))
    mode = draw(modes) if indices or parts else None
    entry = make.entry(*indices, to=holder, mode=mode, phase=draw(st.sampled_from(GrantPhase)))
    return replace(entry, grant=replace(entry.grant, uuids=(*entry.grant.uuids, *parts)))


externals = st.builds(
    lambda pod, uuids, said, name, watched: ExternalAllocation(
        ContainerId(f"{pod}.dp"),
        PodId(f"sandbox-{pod}"),
        f"{said}/{pod}",
        frozenset(uuids),
        name,
        name or "m" * 63,
        watched & uuids,
    ),
    st.sampled_from(POD_NAMES),
    st.sets(st.one_of(st.integers(0, 5).map(make.uuid), mig_uuids), min_size=1, max_size=2),
    texts,
    st.sampled_from(["", "main", "x" * 63]),
    st.frozensets(st.integers(0, 5).map(make.uuid), max_size=3),
)
# Any ledger at all, over capacity too: a bug elsewhere must not turn into a crash here.
released = st.builds(
    lambda pod, since, processes: Releasing(PodUid(f"uid-{pod}"), f"ml/{pod}", since, 60.0, processes),
    st.sampled_from(POD_NAMES),
    st.floats(0, 200),
    st.sampled_from([None, 1, 2]),
)
prepared_claims = st.builds(
    lambda indices, name, pods, mode, text, admin: make.prepared_claim(
        *indices, name=name, pods=pods, mode=mode, text=text, admin=admin
    ),
    st.sets(st.integers(0, 5), min_size=1, max_size=2),
    st.sampled_from(["one", "two"]),
    st.sets(st.sampled_from(POD_NAMES), max_size=2),
    modes,
    st.sampled_from(["", "capabilities=utility", "mode=shared"]),
    st.sampled_from([False, False, True]),
)
ledgers = st.builds(
    lambda some, others, releasing, prepared: replace(
        make.ledger(*some, others=others).with_releasing(releasing), claims={each.uid: each for each in prepared}
    ),
    st.lists(entries(), max_size=5),
    st.lists(externals, max_size=2),
    st.dictionaries(st.one_of(st.integers(0, 5).map(make.uuid), mig_uuids), released, max_size=2),
    st.lists(prepared_claims, max_size=2),
)
of_claims = st.builds(
    lambda container, claim: replace(
        container,
        kubelet=Allocated(
            tuple(AllocatedDevice("claim", each.uuid) for each in claim.devices),
            shared=claim.devices[0].mode is Mode.SHARED,
            key=claim.called,
            claims=(claim.uid,),
            request=claim.devices[0].text,
            admin=claim.devices[0].admin,
        ),
    ),
    containers(),
    prepared_claims,
)


def capacity_faults(ledger: Ledger) -> list[str]:
    """Pairs of grants that must not hold one GPU at a time."""
    holding = [each for each in ledger.entries.values() if each.holds]
    return [
        f"{one.grant.container_id} and {two.grant.container_id}"
        for at, one in enumerate(holding)
        for two in holding[at + 1 :]
        if set(one.grant.uuids) & set(two.grant.uuids) and not _together(one, two)
    ]


def _together(one: Entry, two: Entry) -> bool:
    same_pod = one.grant.pod_uid == two.grant.pod_uid
    return one.grant.mode is two.grant.mode and (one.grant.mode in (Mode.SHARED, Mode.MPS) or same_pod)
