"""The policy as a value: every setting once, with its type, its default, its rule and its help.

The file's parser, the command line's overrides, the JSON Schema and the reference in docs/policy.md are read off these
declarations (`fields.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability
from nri_gpu.policy.globs import EVERYTHING, NOTHING, Globs
from nri_gpu.policy.kinds import Choice, Choices, Declaration, Flag, Folder, Patterns, Text, Texts, Whole

BUILT_IN: Final = "the built-in defaults"  # the source of a policy that came from no file
LIBRARY_DIRS_MAX: Final = 16
SOCKET_PATH_MAX: Final = 107  # bytes: sun_path of a Unix socket holds 108 with its NUL (Linux: unix(7))

# Printable ASCII without blanks, because these paths are shown in refusals; no part of a path is "." or "..".
_PATH: Final = r"(?:/(?!\.\.?(?:/|$))[!-.0-~]+)+"
_ANY_FOLDER: Final = Folder(rf"/|{_PATH}/?", 'an absolute path without blanks, "." or ".."', 1024)
_FOLDER: Final = Folder(rf"{_PATH}/?", 'an absolute path below / without blanks, "." or ".."', 1024)
_SOCKET: Final = Text(_PATH, 'an absolute path to a socket without blanks, "." or ".."', SOCKET_PATH_MAX)
# The runtime's own rule since NRI 0.12 (containerd/nri: pkg/api/validate.go).
_NAME: Final = Text(r"[A-Za-z0-9_.+-]+", "letters, digits and _ . + -", 64)
_INDEX: Final = Text(r"[0-9]{2}", 'two digits in quotes, such as "10"', 2)
# shadow-utils' rule for names, and nothing at all.
_GROUP: Final = Text(r"(?:[A-Za-z_][A-Za-z0-9_.-]*)?", "a group's name", 32)
_NAMESPACES: Final = Patterns(Text(r"[!-~]+", "a pattern of printable ASCII without blanks", 253))


class Otherwise(StrEnum):
    """What happens to a container that asks from a namespace that may not."""

    REFUSE = "refuse"
    IGNORE = "ignore"


class VisibleDevices(StrEnum):
    """What a granted container finds in NVIDIA_VISIBLE_DEVICES."""

    UUIDS = "uuids"
    VOID = "void"


class Disarm(StrEnum):
    """Whose NVIDIA_VISIBLE_DEVICES is overridden with `void` although nothing was granted."""

    NONE = "none"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """How nri-gpu presents itself to the container runtime."""

    name: Annotated[str, Declaration(_NAME, "Name the runtime and its log know the plugin by.")] = "nri-gpu"
    index: Annotated[
        str,
        Declaration(_INDEX, "Place among NRI plugins: lower numbers are asked first.", flag="--index"),
    ] = "10"
    socket: Annotated[str, Declaration(_SOCKET, "The runtime's NRI socket.", flag="--socket")] = "/var/run/nri/nri.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """Where the host's NVIDIA driver is, and where its files are staged for containers."""

    root: Annotated[
        str,
        Declaration(_ANY_FOLDER, 'Folder the driver\'s user space lives under: "/" or a tree.', flag="--driver-root"),
    ] = "/"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimDefaults:
    """What a request means where it does not say."""

    mode: Annotated[Mode, Declaration(Choice(Mode), "How GPUs are held: exclusive is exclusive to the pod.")] = (
        Mode.EXCLUSIVE
    )
    capabilities: Annotated[
        Capabilities, Declaration(Choices(Capability), "Which parts of the driver a container gets.")
    ] = DEFAULT_CAPABILITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRules:
    """Which parts of the driver may be asked for at all."""

    allowed: Annotated[
        Capabilities,
        Declaration(
            Choices(Capability),
            "A request for any other is refused. What a capability brings along must be allowed too: video brings "
            "compute, display brings graphics.",
        ),
    ] = frozenset(Capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRules:
    """Who may ask, by the pod's namespace: whole names, shell-style patterns; deny wins over allow."""

    allow: Annotated[Globs, Declaration(_NAMESPACES, "Namespaces whose pods may ask for GPUs.")] = EVERYTHING
    deny: Annotated[Globs, Declaration(_NAMESPACES, "Namespaces whose pods may not, whatever allow says.")] = NOTHING
    otherwise: Annotated[
        Otherwise,
        Declaration(
            Choice(Otherwise),
            "A container that asks and may not: refuse it, or ignore its request and start it without GPUs.",
        ),
    ] = Otherwise.REFUSE


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """What is written to containers' environment. It is never read as a request."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementSettings:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InventorySettings:
    """How often the driver is asked what GPUs there are."""

    refresh_s: Annotated[int, Declaration(Whole(1, 3600), "Seconds between two looks.")] = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """How grants are kept."""

    created_grace_s: Annotated[
        int,
        Declaration(
            Whole(5, 3600),
            "Seconds after which GPUs of a container that was created and never started may go to another.",
        ),
    ] = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Who may ask the daemon about itself."""

    group: Annotated[
        str,
        Declaration(
            _GROUP,
            "Group that may ask for `nri-gpu status` beside root; empty for root alone. The systemd unit needs it as "
            "its Group= too.",
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything an operator decides. source: the file it was read from, for sentences; no part of its identity."""

    plugin: PluginSettings = PluginSettings()
    driver: DriverSettings = DriverSettings()
    defaults: ClaimDefaults = ClaimDefaults()
    capabilities: CapabilityRules = CapabilityRules()
    namespaces: NamespaceRules = NamespaceRules()
    environment: EnvironmentSettings = EnvironmentSettings()
    requirements: RequirementSettings = RequirementSettings()
    inventory: InventorySettings = InventorySettings()
    ledger: LedgerSettings = LedgerSettings()
    control: ControlSettings = ControlSettings()
    guard: GuardSettings = GuardSettings()
    source: str = field(default=BUILT_IN, compare=False)

    @classmethod
    def default(cls) -> Policy:
        """The policy where there is no file: every default."""
        return cls()
