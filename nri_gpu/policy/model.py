"""The policy: every setting of its file with its default, declared once for parser, documentation and schema."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Self

from msgspec import Meta, Struct

from nri_gpu.domain.edits import HARMLESS, Extra
from nri_gpu.domain.errors import Fault
from nri_gpu.domain.finding import Finding
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability
from nri_gpu.domain.gpu_request import Mode, NumaBinding, Strategy
from nri_gpu.domain.node import Loader
from nri_gpu.domain.value import Value
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.forms import (
    ANY_FOLDER,
    DEFAULT_EXTRAS,
    EVERYTHING,
    FOLDER,
    FOLDER_OR_NONE,
    FOLDERS,
    NAMESPACES,
    NOTHING,
    ROOT_OR_NONE,
    Globs,
    about,
    patterns,
    text,
    unique,
)
from nri_gpu.policy.forms import Otherwise as Otherwise
from nri_gpu.policy.health_settings import HealthSettings
from nri_gpu.policy.kubelet_settings import KubeletSettings
from nri_gpu.policy.metrics_settings import MetricsSettings
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.policy.observe_settings import ObserveSettings
from nri_gpu.policy.plugin_settings import AuditSettings, ControlSettings, GuardSettings, LabelSettings, PluginSettings
from nri_gpu.policy.rules import NO_LIMITS, Limits, PoolList, RuleList
from nri_gpu.policy.stray_settings import StraySettings
from nri_gpu.policy.usage_settings import UsageSettings

BUILT_IN: Final = "the built-in defaults"  # the source of a policy that came from no file
_MONITORS: Final = patterns(
    text(r"[a-z0-9-]+/[!-.0-~]+", "namespace/pod, with no wildcard in the namespace, such as gpu-operator/dcgm-*", 317)
)
_Brand = Annotated[str, text(r"[a-z]+", "a brand in NVML's words, such as tesla, in lower case", 32)]


class VisibleDevices(StrEnum):
    """The value of NVIDIA_VISIBLE_DEVICES that a granted container finds."""

    UUIDS = "uuids"
    VOID = "void"


class Disarm(StrEnum):
    """The containers whose NVIDIA_VISIBLE_DEVICES is overridden with `void` although nothing was granted."""

    NONE = "none"
    ALL = "all"


class DriverCapabilities(StrEnum):
    """The use made of a container's NVIDIA_DRIVER_CAPABILITIES."""

    IGNORE = "ignore"
    ASK = "ask"


class PrivilegedAction(StrEnum):
    """The fate of the request of a privileged container, which can use every device of the host anyway."""

    ALLOW = "allow"
    AUDIT = "audit"
    DENY = "deny"


class Stale(StrEnum):
    """The fate of requests while the inventory is older than it should be."""

    SERVE = "serve"
    REFUSE = "refuse"


class DriverSettings(Struct, frozen=True, kw_only=True):
    """Places of the host's NVIDIA driver and of its staged files, and how containers find them."""

    root: Annotated[
        str,
        ANY_FOLDER,
        about('Folder the driver\'s user space lives under: "/" or a tree.', flag="--driver-root"),
    ] = "/"
    host_root: Annotated[
        str,
        ROOT_OR_NONE,
        about(
            "Path of that folder on the host, if nri-gpu runs in a pod that has it mounted elsewhere; empty: the same.",
            flag="--driver-host-root",
        ),
    ] = ""
    library_dirs: Annotated[
        tuple[str, ...],
        FOLDERS,
        about(
            "Folders below root with the driver's libraries, searched before those of distributions; bin, share and "
            "etc next to them too."
        ),
    ] = ()
    stage_dir: Annotated[
        str,
        FOLDER,
        about(
            "Folder for one staged copy per driver generation; on the driver's filesystem it is free.",
            flag="--stage-dir",
        ),
    ] = "/var/lib/nri-gpu/drivers"
    loader: Annotated[
        Loader,
        about(
            "How a container's loader finds the libraries; docs/loader.md says which images each way serves, and its "
            "cost."
        ),
    ] = Loader.FOLDERS


class ClaimDefaults(Struct, frozen=True, kw_only=True):
    """Defaults of a request, where it does not say."""

    mode: Annotated[Mode, about("How GPUs are held: exclusive is exclusive to the pod.")] = Mode.EXCLUSIVE
    capabilities: Annotated[Capabilities, Meta(min_length=1), about("Which parts of the driver a container gets.")] = (
        DEFAULT_CAPABILITIES
    )
    extras: Annotated[
        frozenset[Extra],
        DEFAULT_EXTRAS,
        about("Extras of a container that names none; all but imex, which takes a number."),
    ] = frozenset()


class CapabilityRules(Struct, frozen=True, kw_only=True):
    """Parts of the driver that may be asked for at all."""

    allowed: Annotated[
        Capabilities,
        Meta(min_length=1),
        about(
            "A request for any other is refused. What a capability brings along must be allowed too: video brings "
            "compute, display brings graphics."
        ),
    ] = frozenset(Capability)


class ExtraRules(Struct, frozen=True, kw_only=True):
    """Extras that may be asked for; docs/extras.md says what each opens beyond the GPUs that were granted."""

    allowed: Annotated[
        frozenset[Extra],
        about("A request for any other is refused."),
    ] = HARMLESS


class ModeRules(Struct, frozen=True, kw_only=True):
    """Modes that GPUs may be asked for in at all."""

    allowed: Annotated[frozenset[Mode], Meta(min_length=1), about("A request for any other mode is refused.")] = (
        frozenset(Mode)
    )


class NamespaceRules(Struct, frozen=True, kw_only=True):
    """Namespaces of the pods that may ask where no rule decides: whole names, shell-style patterns; deny wins."""

    allow: Annotated[Globs, NAMESPACES, about("Namespaces whose pods may ask for GPUs.")] = EVERYTHING
    deny: Annotated[Globs, NAMESPACES, about("Namespaces whose pods may not, whatever allow says.")] = NOTHING
    otherwise: Annotated[
        Otherwise,
        about("A container that asks and may not: refuse it, or ignore its request and start it without GPUs."),
    ] = Otherwise.REFUSE


class EnvironmentSettings(Struct, frozen=True, kw_only=True):
    """The environment of containers: what is written to it, and where it counts as a request: nowhere by default."""

    visible_devices: Annotated[
        VisibleDevices,
        about(
            "NVIDIA_VISIBLE_DEVICES of a granted container: its GPUs' UUIDs, or void where an NVIDIA runtime or hook "
            "is still installed and must stay idle (NRI_GPU_UUIDS then has the list), as always in a pod whose "
            "runtime handler begins with nvidia."
        ),
    ] = VisibleDevices.UUIDS
    disarm: Annotated[
        Disarm,
        about(
            "all: override an image's NVIDIA_VISIBLE_DEVICES with void where nothing was granted. Not beside NVIDIA's "
            "device plugin, which asks through that variable."
        ),
    ] = Disarm.NONE
    driver_capabilities: Annotated[
        DriverCapabilities,
        about(
            "NVIDIA_DRIVER_CAPABILITIES of a container that is given GPUs. ask: it says which parts of the driver "
            "come, where neither the request nor a rule does; what it may not ask for or this node lacks is left out. "
            "ignore: it changes nothing. With both, the log has what it names and did not come."
        ),
    ] = DriverCapabilities.IGNORE
    may_ask: Annotated[
        Globs,
        NAMESPACES,
        about(
            "Namespaces where NVIDIA_VISIBLE_DEVICES is a request of containers without an annotation; an image that "
            "sets it asks, too."
        ),
    ] = NOTHING
    may_ask_all: Annotated[
        bool,
        about("Whether its value all is a request there: every CUDA image sets it, so each would get every GPU."),
    ] = False


class PrivilegedSettings(Struct, frozen=True, kw_only=True):
    """Privileged containers: they can use every device of the host, whatever is granted."""

    action: Annotated[
        PrivilegedAction,
        about(
            "Their requests: allow; audit: grant, and warn of privileged containers, also those that do not ask; deny."
        ),
    ] = PrivilegedAction.ALLOW


class RuntimeRules(Struct, frozen=True, kw_only=True):
    """Runtime handlers that start virtual machines, in which a device node of the host leads to no GPU."""

    refuse: Annotated[
        Globs,
        NAMESPACES,
        about(
            "Handlers, as a RuntimeClass names them, in whose pods a container that would be given GPUs is refused; "
            "what asks for none, and what another component gave, passes. A pod without a handler never matches. "
            "Empty: none is refused."
        ),
    ] = Globs(("kata*",))


class RequirementSettings(Struct, frozen=True, kw_only=True):
    """Requirements of images on driver and GPU, by NVIDIA_REQUIRE_* and CUDA_VERSION."""

    check: Annotated[bool, about("Refuse a container whose image requires what this node does not have.")] = True
    may_disable: Annotated[
        bool,
        about(
            "Whether an image or a pod may turn the check off for itself by NVIDIA_DISABLE_REQUIRE=1. Its program may "
            "then fail; it is granted nothing more."
        ),
    ] = True


class CompatSettings(Struct, frozen=True, kw_only=True):
    """A newer CUDA than the driver's, from NVIDIA's forward-compatibility packages on the host."""

    dir: Annotated[
        str,
        FOLDER_OR_NONE,
        about(
            "Folder with one package per CUDA version in folders named for it (13.0/libcuda.so.580.65.06 ...); empty: "
            "off."
        ),
    ] = ""
    brands: Annotated[
        tuple[_Brand, ...],
        unique(32),
        about("Brands of GPUs that may have it; on others such a libcuda fails with CUDA's error 804."),
    ] = ("tesla", "nvidia")
    across_minor: Annotated[
        bool,
        about("Also for an image that is newer than the driver by a minor version only, which mostly runs without."),
    ] = False
    image: Annotated[
        bool,
        about(
            "Where no package on the host serves: put the compatibility folder that an image's LD_LIBRARY_PATH names "
            "(/usr/local/cuda/compat) before the driver's libraries. It is the image's code: none of it is read."
        ),
    ] = False


class Complete(StrEnum):
    """The containers with another component's GPUs that get what they lack to use them."""

    NONE = "none"
    ASKED = "asked"
    ALL = "all"


class OnConflict(StrEnum):
    """The fate of a container that brings nodes of a GPU which another pod has exclusively."""

    REPORT = "report"
    REFUSE = "refuse"


class ForeignSettings(Struct, frozen=True, kw_only=True):
    """Containers whose GPU nodes come from another component, such as a device plugin."""

    complete: Annotated[
        Complete,
        about(
            "Which of them get the driver's libraries, shared nodes and environment for the GPUs that they hold, and "
            "never another GPU: none; asked: those that also ask by annotation, which can only shape these GPUs; all: "
            "also those that do not ask."
        ),
    ] = Complete.NONE
    monitors: Annotated[
        Globs,
        _MONITORS,
        about(
            "Pods that open GPUs and hold none of them, such as exporters of metrics, as namespace/pod; shell-style "
            "patterns of the pod's name. They keep no other pod from a GPU, but hold what they were granted or the "
            "kubelet allocated to them (docs/foreign.md)."
        ),
    ] = NOTHING
    conflict: Annotated[
        OnConflict,
        about(
            "A container that another component gave a GPU which another pod has exclusively: report it in log, "
            "status, doctor and metrics, or refuse it. Monitors and privileged containers pass either way."
        ),
    ] = OnConflict.REPORT


class PlacementSettings(Struct, frozen=True, kw_only=True):
    """The choice between several GPUs, and what else of the node comes with them."""

    strategy: Annotated[
        Strategy,
        about(
            "For exclusive requests, among sets of GPUs that are linked equally well: pack keeps the remaining GPUs "
            "together, spread takes GPUs from where most are free. Shared requests always go to the least loaded GPU."
        ),
    ] = Strategy.PACK
    numa: Annotated[
        NumaBinding,
        about(
            "Bind a granted container to the CPUs, the memory or both of its GPUs' NUMA nodes, unless another "
            "component has set its cpuset."
        ),
    ] = NumaBinding.NONE


class InventorySettings(Struct, frozen=True, kw_only=True):
    """Queries of NVML for the GPUs: how often, and what happens while it does not answer."""

    refresh_s: Annotated[int, Meta(ge=1, le=3600), about("Seconds between two queries.")] = 60
    stale_after_s: Annotated[
        int, Meta(ge=1, le=86400), about("Seconds without an answer after which the inventory is stale.")
    ] = 300
    stale: Annotated[
        Stale,
        about("Requests while it is stale: serve them from the last inventory, or refuse them."),
    ] = Stale.SERVE


class LedgerSettings(Struct, frozen=True, kw_only=True):
    """Grants, and how they are kept."""

    created_grace_s: Annotated[
        int,
        Meta(ge=5, le=3600),
        about(
            "Seconds after which GPUs of a container that was created and never started may go to another container."
        ),
    ] = 60


class Unknown(StrEnum):
    """The fate of a released GPU whose processes NVML cannot list."""

    WAIT = "wait"
    OFFER = "offer"


class HandoverSettings(Struct, frozen=True, kw_only=True):
    """The time when a GPU that a pod held exclusively is offered to other pods."""

    wait: Annotated[
        bool,
        about("Offer it only when NVML shows no process on it; false: as soon as its container ends."),
    ] = True
    grace_s: Annotated[int, Meta(ge=1, le=3600), about("Seconds after which it is offered whatever NVML shows.")] = 60
    unknown: Annotated[
        Unknown,
        about("If NVML cannot list its processes: wait for grace_s, or offer it at once."),
    ] = Unknown.WAIT


class Policy(Value, frozen=True, kw_only=True):
    """The policy: every setting."""

    aside: ClassVar = ("source", "ignored", "empty_tables", "written")

    plugin: PluginSettings = PluginSettings()
    driver: DriverSettings = DriverSettings()
    defaults: ClaimDefaults = ClaimDefaults()
    capabilities: CapabilityRules = CapabilityRules()
    extras: ExtraRules = ExtraRules()
    modes: ModeRules = ModeRules()
    mps: MpsSettings = MpsSettings()
    namespaces: NamespaceRules = NamespaceRules()
    limits: Limits = NO_LIMITS
    environment: EnvironmentSettings = EnvironmentSettings()
    privileged: PrivilegedSettings = PrivilegedSettings()
    runtimes: RuntimeRules = RuntimeRules()
    requirements: RequirementSettings = RequirementSettings()
    compat: CompatSettings = CompatSettings()
    foreign: ForeignSettings = ForeignSettings()
    placement: PlacementSettings = PlacementSettings()
    inventory: InventorySettings = InventorySettings()
    health: HealthSettings = HealthSettings()
    ledger: LedgerSettings = LedgerSettings()
    handover: HandoverSettings = HandoverSettings()
    control: ControlSettings = ControlSettings()
    audit: AuditSettings = AuditSettings()
    labels: LabelSettings = LabelSettings()
    guard: GuardSettings = GuardSettings()
    metrics: MetricsSettings = MetricsSettings()
    usage: UsageSettings = UsageSettings()
    stray: StraySettings = StraySettings()
    observe: ObserveSettings = ObserveSettings()
    kubelet: KubeletSettings = KubeletSettings()
    dra: DraSettings = DraSettings()
    rule: RuleList = RuleList()
    pool: PoolList = PoolList()
    source: str = BUILT_IN  # the file that the settings come from, for messages; it does not count in comparisons
    # A finding for each thing in the file that an earlier version knew (`policy/dropped.py`); likewise.
    ignored: tuple[Finding, ...] = ()
    # A fault for each table without a key, which is none of a file that is read for the first time; likewise.
    empty_tables: tuple[Fault, ...] = ()
    written: frozenset[str] = frozenset()  # `namespaces.allow`: what the file sets, be it to the default
    # What is wrong with the policy file, or empty; `decide` refuses every request of a policy with a fault.
    fault: str = ""

    @classmethod
    def default(cls) -> Self:
        """Return every default: the policy of a node without a policy file."""
        return cls()

    @classmethod
    def broken(cls, fault: str) -> Self:
        """Return the policy for a faulty file if no earlier one was kept: it refuses every request with the fault."""
        return cls(source="-", fault=fault)
