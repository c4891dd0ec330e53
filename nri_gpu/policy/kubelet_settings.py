"""Settings of the kubelet's device plugin, and of other components that allocate GPUs."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.policy.forms import (
    FOLDER,
    NAMESPACES,
    NOTHING,
    POOL_NAME,
    POOL_OR_NONE,
    SOCKET_OR_NONE,
    Globs,
    about,
    names,
    patterns,
    text,
)

# The kubelet's: a qualified name with a prefix, not Kubernetes' own (kubernetes: pkg/apis/core/v1/helper). NVIDIA's
# device plugin keeps to 63 characters, and ours has to leave room for `mig-7g.80gb.me.shared`.
_RESOURCE: Final = text(
    r"(?!(?:[a-z0-9.-]+\.)?kubernetes\.io/|requests\.)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?",
    "a resource such as nvidia.com/gpu",
    40,
)
_RESOURCES: Final = patterns(text(r"[!-~]+/[!-~]+", "a resource such as nvidia.com/gpu, or a pattern of them", 63))


SHARED: Final = ".shared"  # ends the names of renamed resources
MIG: Final = "mig-"  # begins the names of profiles' resources


def mig_resource(resource: str, profile: str) -> str:
    """Name a profile's resource beside another, as `nvidia.com/mig-1g.10gb.me`: a resource's name may hold no `+`."""
    return f"{resource.partition('/')[0]}/{MIG}{profile.replace('+', '.')}"


class MigStrategy(StrEnum):
    """The way MIG devices are offered to the kubelet, in the words of NVIDIA's device plugin."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class Registration(StrEnum):
    """The way the kubelet learns of the device plugin."""

    REGISTER = "register"
    WATCHER = "watcher"


class FailClosed(StrEnum):
    """The stop for a container that the kubelet allocated GPUs to and that got no injection."""

    AUTO = "auto"
    GUARD = "guard"


class KubeletSettings(Struct, frozen=True, kw_only=True):
    """The kubelet's device plugin, for a node of a cluster: the scheduler then counts the GPUs."""

    enabled: Annotated[
        bool,
        about("Offer this node's GPUs to the kubelet.", flag="--kubelet"),
    ] = False
    dir: Annotated[str, FOLDER, about("Folder of the kubelet's socket and of its device plugins'.")] = (
        "/var/lib/kubelet/device-plugins"
    )
    resource: Annotated[str, _RESOURCE, about("Resource that pods request in resources.limits.")] = "nvidia.com/gpu"
    mig_strategy: Annotated[
        MigStrategy,
        about(
            "MIG devices: none offers whole GPUs only; single offers MIG devices of one profile as the resource; mixed "
            "offers each profile as a resource of its own, nvidia.com/mig-1g.10gb, beside whole GPUs."
        ),
    ] = MigStrategy.NONE
    replicas: Annotated[
        int, Meta(ge=1, le=64), about("How many pods share each GPU or MIG device; 1: each has its own.")
    ] = 1
    rename: Annotated[bool, about("Offer shared GPUs under another name: nvidia.com/gpu.shared.")] = False
    pool: Annotated[
        str,
        POOL_OR_NONE,
        about("Offer only the GPUs of this [[pool]]; empty: all GPUs, in pools too."),
    ] = ""
    resources: Annotated[
        tuple[tuple[str, str], ...],
        names(_RESOURCE, POOL_NAME, "resource = pool"),
        about(
            "Resources for the GPUs of a [[pool]] each, beside resource, which then has the GPUs of no pool listed "
            "here, or, where it is listed itself, those of its own pool. Not with pool."
        ),
    ] = ()
    registration: Annotated[
        Registration,
        about(
            "register: nri-gpu calls the kubelet, as most plugins do; watcher: the kubelet finds it in registry_dir.",
            flag="--kubelet-registration",
        ),
    ] = Registration.REGISTER
    registry_dir: Annotated[str, FOLDER, about("Folder in which the kubelet looks for plugins.")] = (
        "/var/lib/kubelet/plugins_registry"
    )
    podresources: Annotated[
        str,
        SOCKET_OR_NONE,
        about(
            "The kubelet's PodResources socket, asked which devices containers have; never on the request path, and "
            "only if enabled, dra.enabled, inject_for, reservations or foreign.monitors is set, or by [stray]. "
            "Empty: never."
        ),
    ] = "/var/lib/kubelet/pod-resources/kubelet.sock"
    fail_closed: Annotated[
        FailClosed,
        about(
            "auto: Allocate adds a CDI device that lets the container start only after our injection, if the runtime "
            "has NRI 0.7 or newer; guard: no such device, so that only the guard stops a container without injection."
        ),
    ] = FailClosed.AUTO
    cdi_dir: Annotated[str, FOLDER, about("Folder for that CDI device: one of the runtime's cdi_spec_dirs.")] = (
        "/var/run/cdi"
    )
    inject_for: Annotated[
        Globs,
        _RESOURCES,
        about(
            "Resources of NVIDIA's device plugin whose GPUs are injected here, without its runtime or hook: those that "
            "PodResources lists for the container, and that its NVIDIA_VISIBLE_DEVICES, where set, names too."
        ),
    ] = NOTHING
    reservations: Annotated[
        Globs,
        NAMESPACES,
        about(
            "Namespaces where KAI-Scheduler or Run:ai reserves GPUs with its own pods: pods of the same GPU group then "
            "share them. Only the scheduler may create pods there."
        ),
    ] = NOTHING

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all resources, `resource` first, as policy has them."""
        return tuple(dict.fromkeys((self.resource, *dict(self.resources))))

    @property
    def pools(self) -> frozenset[str]:
        """Return the names of the pools that policy gives a resource."""
        return frozenset(filter(None, (self.pool, *dict(self.resources).values())))

    def resource_of(self, pool: str) -> str | None:
        """Return the resource that offers the GPUs of a pool, or of no pool (empty), or None if none does."""
        named = next((resource for resource, its in self.resources if its == pool), None)
        if named or self.resource in dict(self.resources):
            return named
        return self.resource if self.pool in ("", pool) else None

    def is_own(self, resource: str) -> bool:
        """Return whether a resource is the device plugin's, also by the name that it has with `rename`."""
        if self.rename:
            resource = resource.removesuffix(SHARED)
        prefix, _, name = resource.partition("/")
        mixed = self.mig_strategy is MigStrategy.MIXED and name.startswith(MIG)
        return resource in self.names or (mixed and any(each.startswith(f"{prefix}/") for each in self.names))

    @property
    def suffix(self) -> str:
        """Return how the names of all resources end that are offered: `.shared`, or empty."""
        return SHARED if self.rename and self.replicas > 1 else ""

    @property
    def injects_external(self) -> bool:
        """Return whether policy has us inject GPUs that other device plugins or schedulers allocate."""
        return bool(self.inject_for.patterns or self.reservations.patterns)

    @property
    def reads_variable(self) -> bool:
        """Return whether NVIDIA_VISIBLE_DEVICES can name what the kubelet allocated.

        Written by a plugin or scheduler that we inject for, or by a plugin that served our own resource before us.
        """
        return self.injects_external or (self.enabled and bool(self.podresources))

    def injected(self, devices: Iterable[AllocatedDevice]) -> tuple[AllocatedDevice, ...]:
        """Return the devices of other plugins' resources that policy has us inject."""
        return tuple(each for each in devices if self.inject_for.match(each.resource))
