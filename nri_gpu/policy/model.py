"""The policy as a value: every setting once, with its type, its default, its rule and its help.

The file's parser, the command line's overrides, the JSON Schema and the reference in docs/policy.md are read off these
declarations (`fields.py`).
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final, Self

from msgspec import Struct

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.extras import HARMLESS, Extra
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability
from nri_gpu.domain.loader import Loader
from nri_gpu.domain.placement import NumaBinding, Strategy
from nri_gpu.domain.value import Value
from nri_gpu.policy.globs import EVERYTHING, NOTHING, Globs
from nri_gpu.policy.health import DEFAULT_HEALTH, HealthSettings
from nri_gpu.policy.kinds import Choice, Choices, Declaration, Flag, Folder, Patterns, Text, Texts, Whole
from nri_gpu.policy.limits import NO_LIMITS, Limits
from nri_gpu.policy.mps import NO_MPS, MpsSettings
from nri_gpu.policy.pools import NO_POOLS, Pools
from nri_gpu.policy.rules import NO_RULES, Rules
from nri_gpu.policy.words import POOL_NAMES
from nri_gpu.policy.words import Otherwise as Otherwise

BUILT_IN: Final = "the built-in defaults"  # the source of a policy that came from no file
LIBRARY_DIRS_MAX: Final = 16
SOCKET_PATH_MAX: Final = 107  # bytes: sun_path of a Unix socket holds 108 with its NUL (Linux: unix(7))

# Printable ASCII without blanks, because these paths are shown in refusals; no part of a path is "." or "..".
_PATH: Final = r"(?:/(?!\.\.?(?:/|$))[!-.0-~]+)+"
_ANY_FOLDER: Final = Folder(rf"/|{_PATH}/?", 'an absolute path without blanks, "." or ".."', 1024)
_FOLDER: Final = Folder(rf"{_PATH}/?", 'an absolute path below / without blanks, "." or ".."', 1024)
_FOLDER_OR_NONE: Final = Folder(rf"|{_PATH}/?", 'empty or an absolute path below / without blanks, "." or ".."', 1024)
_ROOT_OR_NONE: Final = Folder(rf"|/|{_PATH}/?", 'empty or an absolute path without blanks, "." or ".."', 1024)
_FILE_OR_NONE: Final = Text(rf"|{_PATH}", 'empty or an absolute path without blanks, "." or ".."', 1024)
_BRANDS: Final = Texts(Text(r"[a-z]+", "a brand in NVML's words, such as tesla, in lower case", 32), 32)
_SOCKET: Final = Text(_PATH, 'an absolute path to a socket without blanks, "." or ".."', SOCKET_PATH_MAX)
_SOCKET_OR_NONE: Final = Text(rf"|{_PATH}", "empty or an absolute path to a socket", SOCKET_PATH_MAX)
# The runtime's own rule since NRI 0.12 (containerd/nri: pkg/api/validate.go).
_NAME: Final = Text(r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -", 64)
_INDEX: Final = Text(r"[0-9]{2}", 'two digits in quotes, such as "10"', 2)
# The kubelet's: a qualified name with a prefix, not Kubernetes' own (kubernetes: pkg/apis/core/v1/helper). NVIDIA's
# device plugin keeps to 63 characters, and ours has to leave room for `mig-7g.80gb.me.shared`.
_RESOURCE: Final = Text(
    r"(?!(?:[a-z0-9.-]+\.)?kubernetes\.io/|requests\.)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?",
    "a resource such as nvidia.com/gpu",
    40,
)
_RESOURCES: Final = Patterns(Text(r"[!-~]+/[!-~]+", "a resource such as nvidia.com/gpu, or a pattern of them", 63))
_POOL_OR_NONE: Final = Text(rf"(?:{POOL_NAMES.pattern})?", "empty or the name of a [[pool]]", POOL_NAMES.max_length)
# shadow-utils' rule for names, and nothing at all.
_GROUP: Final = Text(r"(?:[A-Za-z_][A-Za-z0-9_.-]*)?", "a group's name", 32)
_EXTRAS: Final = Choices(Extra, minimum=0, but=frozenset({Extra.IMEX}))
_NAMESPACES: Final = Patterns(Text(r"[!-~]+", "a pattern of printable ASCII without blanks", 253))


class VisibleDevices(StrEnum):
    """What a granted container finds in NVIDIA_VISIBLE_DEVICES."""

    UUIDS = "uuids"
    VOID = "void"


class Disarm(StrEnum):
    """Whose NVIDIA_VISIBLE_DEVICES is overridden with `void` although nothing was granted."""

    NONE = "none"
    ALL = "all"


class PrivilegedAction(StrEnum):
    """What becomes of a privileged container's request. It can use every device of the host anyway."""

    ALLOW = "allow"
    AUDIT = "audit"
    DENY = "deny"


class Stale(StrEnum):
    """What happens to requests while the inventory is older than it should be."""

    SERVE = "serve"
    REFUSE = "refuse"


class PluginSettings(Struct, frozen=True, kw_only=True):
    """How nri-gpu presents itself to the container runtime."""

    name: Annotated[str, Declaration(_NAME, "Name the runtime and its log know the plugin by.")] = "nri-gpu"
    index: Annotated[
        str,
        Declaration(_INDEX, "Place among NRI plugins: lower numbers are asked first.", flag="--index"),
    ] = "10"
    socket: Annotated[str, Declaration(_SOCKET, "The runtime's NRI socket.", flag="--socket")] = "/var/run/nri/nri.sock"


class DriverSettings(Struct, frozen=True, kw_only=True):
    """Where the host's NVIDIA driver is, where its files are staged, and how containers find them."""

    root: Annotated[
        str,
        Declaration(_ANY_FOLDER, 'Folder the driver\'s user space lives under: "/" or a tree.', flag="--driver-root"),
    ] = "/"
    host_root: Annotated[
        str,
        Declaration(
            _ROOT_OR_NONE,
            "What the runtime calls that folder, where nri-gpu runs in a pod and has it elsewhere; empty: the same.",
            flag="--driver-host-root",
        ),
    ] = ""
    library_dirs: Annotated[
        tuple[str, ...],
        Declaration(
            Texts(_FOLDER, LIBRARY_DIRS_MAX),
            "Folders below root with the driver's libraries, looked into before those that distributions use; bin, "
            "share and etc beside them too.",
        ),
    ] = ()
    stage_dir: Annotated[
        str,
        Declaration(
            _FOLDER, "Folder for one staged copy per driver generation; on the driver's filesystem it is free."
        ),
    ] = "/var/lib/nri-gpu/drivers"
    loader: Annotated[
        Loader,
        Declaration(
            Choice(Loader),
            "How a container's loader finds the libraries; docs/loader.md says which images each way serves, and what "
            "it costs.",
        ),
    ] = Loader.FOLDERS


class ClaimDefaults(Struct, frozen=True, kw_only=True):
    """What a request means where it does not say."""

    mode: Annotated[Mode, Declaration(Choice(Mode), "How GPUs are held: exclusive is exclusive to the pod.")] = (
        Mode.EXCLUSIVE
    )
    capabilities: Annotated[
        Capabilities, Declaration(Choices(Capability), "Which parts of the driver a container gets.")
    ] = DEFAULT_CAPABILITIES
    extras: Annotated[
        frozenset[Extra],
        Declaration(_EXTRAS, "Extras that a container gets which names none; all but imex, which takes a number."),
    ] = frozenset()


class CapabilityRules(Struct, frozen=True, kw_only=True):
    """Which parts of the driver may be asked for at all."""

    allowed: Annotated[
        Capabilities,
        Declaration(
            Choices(Capability),
            "A request for any other is refused. What a capability brings along must be allowed too: video brings "
            "compute, display brings graphics.",
        ),
    ] = frozenset(Capability)


class ExtraRules(Struct, frozen=True, kw_only=True):
    """Which extras may be asked for; docs/extras.md says what each opens beyond the GPUs that were granted."""

    allowed: Annotated[
        frozenset[Extra],
        Declaration(Choices(Extra, minimum=0), "A request for any other is refused."),
    ] = HARMLESS


class ModeRules(Struct, frozen=True, kw_only=True):
    """How GPUs may be asked for at all."""

    allowed: Annotated[frozenset[Mode], Declaration(Choices(Mode), "A request for any other mode is refused.")] = (
        frozenset(Mode)
    )


class NamespaceRules(Struct, frozen=True, kw_only=True):
    """Who may ask where no rule decides, by the pod's namespace: whole names, shell-style patterns; deny wins."""

    allow: Annotated[Globs, Declaration(_NAMESPACES, "Namespaces whose pods may ask for GPUs.")] = EVERYTHING
    deny: Annotated[Globs, Declaration(_NAMESPACES, "Namespaces whose pods may not, whatever allow says.")] = NOTHING
    otherwise: Annotated[
        Otherwise,
        Declaration(
            Choice(Otherwise),
            "A container that asks and may not: refuse it, or ignore its request and start it without GPUs.",
        ),
    ] = Otherwise.REFUSE


class EnvironmentSettings(Struct, frozen=True, kw_only=True):
    """What is written to containers' environment, and where it is read as a request: nowhere, by default."""

    visible_devices: Annotated[
        VisibleDevices,
        Declaration(
            Choice(VisibleDevices),
            "NVIDIA_VISIBLE_DEVICES of a granted container: its GPUs' UUIDs, or void where an NVIDIA runtime or hook "
            "is still installed and must stay idle (NRI_GPU_UUIDS then has the list).",
        ),
    ] = VisibleDevices.UUIDS
    disarm: Annotated[
        Disarm,
        Declaration(
            Choice(Disarm),
            "all: override an image's NVIDIA_VISIBLE_DEVICES with void where nothing was granted. Not beside NVIDIA's "
            "device plugin, which asks through that variable.",
        ),
    ] = Disarm.NONE
    may_ask: Annotated[
        Globs,
        Declaration(
            _NAMESPACES,
            "Namespaces where NVIDIA_VISIBLE_DEVICES is a request, for containers without an annotation; an image "
            "that sets it then asks, too.",
        ),
    ] = NOTHING
    may_ask_all: Annotated[
        bool,
        Declaration(Flag(), "Whether it may be all there: every CUDA image says so, so each would get every GPU."),
    ] = False


class PrivilegedSettings(Struct, frozen=True, kw_only=True):
    """Privileged containers: they can use every device of the host, whatever is granted."""

    action: Annotated[
        PrivilegedAction,
        Declaration(
            Choice(PrivilegedAction),
            "Their requests: allow; audit, which grants and warns, of those that did not ask too; deny, which refuses.",
        ),
    ] = PrivilegedAction.ALLOW


class RequirementSettings(Struct, frozen=True, kw_only=True):
    """What images say they need of driver and GPU, by NVIDIA_REQUIRE_* and CUDA_VERSION."""

    check: Annotated[
        bool, Declaration(Flag(), "Refuse a container whose image requires what this node does not have.")
    ] = True
    may_disable: Annotated[
        bool,
        Declaration(
            Flag(),
            "Whether an image or a pod may turn the check off for itself, by NVIDIA_DISABLE_REQUIRE=1. It then starts "
            "and fails by itself; it is granted nothing more.",
        ),
    ] = True


class CompatSettings(Struct, frozen=True, kw_only=True):
    """A newer CUDA than the driver's, from NVIDIA's forward-compatibility packages on the host."""

    dir: Annotated[
        str,
        Declaration(
            _FOLDER_OR_NONE,
            "Folder with one package per CUDA version in folders named for it (13.0/libcuda.so.580.65.06 ...); empty: "
            "off.",
        ),
    ] = ""
    brands: Annotated[
        tuple[str, ...],
        Declaration(_BRANDS, "Brands of GPUs that may have it; on others such a libcuda fails with CUDA's error 804."),
    ] = ("tesla", "nvidia")
    across_minor: Annotated[
        bool,
        Declaration(
            Flag(),
            "Also for an image that is newer than the driver by a minor version only, which CUDA mostly runs without.",
        ),
    ] = False


class Complete(StrEnum):
    """Which containers that hold GPUs by others' hand are given what they lack to use them."""

    NONE = "none"
    ASKED = "asked"
    ALL = "all"


class ForeignSettings(Struct, frozen=True, kw_only=True):
    """Containers that hold GPU nodes which others put there, such as a device plugin."""

    complete: Annotated[
        Complete,
        Declaration(
            Choice(Complete),
            "Who gets the driver's libraries, shared nodes and environment for the GPUs it holds, and never another "
            "GPU: none; asked: who asks by annotation too, which may then only shape; all: those that do not ask as "
            "well.",
        ),
    ] = Complete.NONE


class PlacementSettings(Struct, frozen=True, kw_only=True):
    """Which GPUs of many are taken, and what else of the node goes with them."""

    strategy: Annotated[
        Strategy,
        Declaration(
            Choice(Strategy),
            "Of sets of GPUs that are linked equally well, for exclusive requests: pack leaves the others together, "
            "spread takes from where most are free. Shared requests always go where the load is least.",
        ),
    ] = Strategy.PACK
    numa: Annotated[
        NumaBinding,
        Declaration(
            Choice(NumaBinding),
            "Keep a granted container to CPUs, memory or both of its GPUs' NUMA nodes, where nobody else has set its "
            "cpuset.",
        ),
    ] = NumaBinding.NONE


class InventorySettings(Struct, frozen=True, kw_only=True):
    """How often the driver is asked what GPUs there are, and what holds while it does not answer."""

    refresh_s: Annotated[int, Declaration(Whole(1, 3600), "Seconds between two looks.")] = 60
    stale_after_s: Annotated[
        int, Declaration(Whole(1, 86400), "Seconds without an answer after which what is known counts as stale.")
    ] = 300
    stale: Annotated[
        Stale, Declaration(Choice(Stale), "Requests then: serve them by what is known, or refuse them.")
    ] = Stale.SERVE


class LedgerSettings(Struct, frozen=True, kw_only=True):
    """How grants are kept."""

    created_grace_s: Annotated[
        int,
        Declaration(
            Whole(5, 3600),
            "Seconds after which GPUs of a container that was created and never started may go to another.",
        ),
    ] = 60


class Unknown(StrEnum):
    """What becomes of a GPU whose processes nobody can tell."""

    WAIT = "wait"
    OFFER = "offer"


class HandoverSettings(Struct, frozen=True, kw_only=True):
    """When a GPU that one pod had exclusively is offered to the next."""

    wait: Annotated[
        bool, Declaration(Flag(), "Only when the driver shows no process on it any more; false: as its container ends.")
    ] = True
    grace_s: Annotated[
        int, Declaration(Whole(1, 3600), "Seconds after which it is offered whatever the driver shows.")
    ] = 60
    unknown: Annotated[
        Unknown,
        Declaration(Choice(Unknown), "Where the driver cannot tell of processes: wait for the grace, or offer it."),
    ] = Unknown.WAIT


class AuditSettings(Struct, frozen=True, kw_only=True):
    """The audit log: every decision with all that decided it, for `nri-gpu replay`."""

    max_mib: Annotated[
        int, Declaration(Whole(0, 1024), "Size of the log in MiB, and of the one before it that is kept; 0: no log.")
    ] = 4
    dir: Annotated[
        str,
        Declaration(
            _FOLDER_OR_NONE,
            "Folder for it; empty: the state folder, which a reboot empties. In the systemd unit it must be writable.",
        ),
    ] = ""


class ControlSettings(Struct, frozen=True, kw_only=True):
    """Who may ask the daemon about itself."""

    group: Annotated[
        str,
        Declaration(
            _GROUP,
            "Group that may ask for `nri-gpu status` beside root; empty for root alone. The systemd unit needs it as "
            "its Group= too.",
        ),
    ] = ""


class LabelSettings(Struct, frozen=True, kw_only=True):
    """What a cluster's scheduler may know of this node's GPUs, as labels."""

    file: Annotated[
        str,
        Declaration(
            _FILE_OR_NONE,
            "File for Node Feature Discovery with the node's labels, in the names of NVIDIA's feature discovery; its "
            "folder must exist. Empty: none.",
            flag="--labels",
        ),
    ] = ""


class GuardSettings(Struct, frozen=True, kw_only=True):
    """The second process, `nri-gpu guard`: how it presents itself, and what it does about what got past it."""

    name: Annotated[str, Declaration(_NAME, "Name the runtime and its log know the guard by.")] = "nri-gpu-guard"
    index: Annotated[
        str, Declaration(_INDEX, "Its place among NRI plugins: behind whoever else may refuse a start.")
    ] = "90"
    stop_ungranted: Annotated[
        bool,
        Declaration(
            Flag(),
            "Stop containers that run without the GPUs they asked for, when the guard finds some as it connects. "
            "Needs the cri extra (grpcio).",
        ),
    ] = False
    stop_grace_s: Annotated[int, Declaration(Whole(0, 300), "Seconds that such a container has to end by itself.")] = 10
    cri_socket: Annotated[str, Declaration(_SOCKET, "The runtime's CRI socket, through which they are stopped.")] = (
        "/run/containerd/containerd.sock"
    )


class MigStrategy(StrEnum):
    """As what MIG devices are offered to the kubelet, in the words of NVIDIA's device plugin."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class Registration(StrEnum):
    """How the kubelet hears of a device plugin."""

    REGISTER = "register"
    WATCHER = "watcher"


class KubeletSettings(Struct, frozen=True, kw_only=True):
    """The kubelet's device plugin, for a node of a cluster: the scheduler then counts the GPUs."""

    enabled: Annotated[
        bool,
        Declaration(
            Flag(), "Offer this node's GPUs to the kubelet. Needs the kubernetes extra (grpcio).", flag="--kubelet"
        ),
    ] = False
    dir: Annotated[str, Declaration(_FOLDER, "Folder of the kubelet's socket and of its device plugins'.")] = (
        "/var/lib/kubelet/device-plugins"
    )
    resource: Annotated[str, Declaration(_RESOURCE, "What pods ask for in resources.limits.")] = "nvidia.com/gpu"
    mig_strategy: Annotated[
        MigStrategy,
        Declaration(
            Choice(MigStrategy),
            "MIG devices: none offers whole GPUs only; single offers MIG devices of one profile as the resource; mixed "
            "offers each profile as a resource of its own, nvidia.com/mig-1g.10gb, beside whole GPUs.",
        ),
    ] = MigStrategy.NONE
    replicas: Annotated[
        int, Declaration(Whole(1, 64), "How many pods share each GPU or MIG device; 1: each has its own.")
    ] = 1
    rename: Annotated[bool, Declaration(Flag(), "Call shared ones by another name: nvidia.com/gpu.shared.")] = False
    pool: Annotated[
        str,
        Declaration(_POOL_OR_NONE, "Offer the GPUs of this [[pool]] alone; empty: all, whoever else they are for."),
    ] = ""
    registration: Annotated[
        Registration,
        Declaration(
            Choice(Registration),
            "register: we call the kubelet, as everybody does; watcher: it finds us in registry_dir by itself.",
            flag="--kubelet-registration",
        ),
    ] = Registration.REGISTER
    registry_dir: Annotated[str, Declaration(_FOLDER, "Folder that the kubelet looks for plugins in.")] = (
        "/var/lib/kubelet/plugins_registry"
    )
    podresources: Annotated[
        str,
        Declaration(
            _SOCKET_OR_NONE,
            "The kubelet's PodResources socket, asked what it gave to whom: off the hook path, and only where enabled, "
            "inject_for or reservations is set. Empty: never.",
        ),
    ] = "/var/lib/kubelet/pod-resources/kubelet.sock"
    inject_for: Annotated[
        Globs,
        Declaration(
            _RESOURCES,
            "Resources of NVIDIA's device plugin whose GPUs are injected here, without its runtime or hook: those that "
            "PodResources lists for the container, and that its NVIDIA_VISIBLE_DEVICES, where set, names too.",
        ),
    ] = NOTHING
    reservations: Annotated[
        Globs,
        Declaration(
            _NAMESPACES,
            "Namespaces where KAI-Scheduler or Run:ai reserves GPUs by pods of its own: pods of the same GPU group "
            "then share those. Nobody else may make pods there.",
        ),
    ] = NOTHING

    @property
    def beside(self) -> bool:
        """Whether others' device plugins or schedulers give GPUs that are injected here."""
        return bool(self.inject_for.patterns or self.reservations.patterns)


class Policy(Value, frozen=True, kw_only=True):
    """Everything an operator decides. source: the file it was read from, for sentences; no part of its identity."""

    aside: ClassVar = ("source",)

    plugin: PluginSettings = PluginSettings()
    driver: DriverSettings = DriverSettings()
    defaults: ClaimDefaults = ClaimDefaults()
    capabilities: CapabilityRules = CapabilityRules()
    extras: ExtraRules = ExtraRules()
    modes: ModeRules = ModeRules()
    mps: MpsSettings = NO_MPS
    namespaces: NamespaceRules = NamespaceRules()
    limits: Limits = NO_LIMITS
    environment: EnvironmentSettings = EnvironmentSettings()
    privileged: PrivilegedSettings = PrivilegedSettings()
    requirements: RequirementSettings = RequirementSettings()
    compat: CompatSettings = CompatSettings()
    foreign: ForeignSettings = ForeignSettings()
    placement: PlacementSettings = PlacementSettings()
    inventory: InventorySettings = InventorySettings()
    health: HealthSettings = DEFAULT_HEALTH
    ledger: LedgerSettings = LedgerSettings()
    handover: HandoverSettings = HandoverSettings()
    control: ControlSettings = ControlSettings()
    audit: AuditSettings = AuditSettings()
    labels: LabelSettings = LabelSettings()
    guard: GuardSettings = GuardSettings()
    kubelet: KubeletSettings = KubeletSettings()
    rule: Rules = NO_RULES
    pool: Pools = NO_POOLS
    source: str = BUILT_IN

    @classmethod
    def default(cls) -> Self:
        """The policy where there is no file: every default."""
        return cls()
