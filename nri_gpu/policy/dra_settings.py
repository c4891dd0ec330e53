"""Settings of Dynamic Resource Allocation: how this node's GPUs are offered to the scheduler as devices."""

from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.policy.forms import FOLDER, POOL_OR_NONE, about, text
from nri_gpu.policy.kubelet_settings import KubeletSettings

DRIVER_MAX: Final = 63  # characters (kubernetes: staging/src/k8s.io/api/resource/v1/types.go, DriverNameMaxLength)
_DRIVER: Final = text(
    r"[a-z](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)+",
    "a DNS name such as gpu.nri.io",
    DRIVER_MAX,
)


class DraSettings(Struct, frozen=True, kw_only=True):
    """Dynamic Resource Allocation: `nri-gpu dra` publishes GPUs and prepares ResourceClaims (docs/dra.md)."""

    enabled: Annotated[
        bool, about("Serve `nri-gpu dra`, a process of its own that talks to kubelet and API server.", flag="--dra")
    ] = False
    driver: Annotated[
        str, _DRIVER, about("Name of the driver in DeviceClasses and ResourceSlices.", flag="--dra-driver")
    ] = "gpu.nri.io"
    pool: Annotated[
        str, POOL_OR_NONE, about("Offer only the GPUs of this [[pool]]; empty: all GPUs, in pools too.")
    ] = ""
    replicas: Annotated[
        int,
        Meta(ge=1, le=64),
        about("How many claims share each GPU or MIG device; 1: each has its own. Needs DRAConsumableCapacity."),
    ] = 1
    cdi_enabled: Annotated[
        bool,
        about(
            "Confirm that containerd 1.x has enable_cdi = true: without it, containerd starts pods without the "
            "devices of their claims, so claims are refused there. Other runtimes have CDI on and ignore this setting."
        ),
    ] = False
    dir: Annotated[
        str,
        FOLDER,
        about(
            "The kubelet's folder for plugins; the driver's socket is in it. kubelet.registry_dir, kubelet.cdi_dir and "
            "kubelet.fail_closed hold here, too.",
            flag="--dra-dir",
        ),
    ] = "/var/lib/kubelet/plugins"


def dra_faults(settings: DraSettings, kubelet: KubeletSettings) -> Iterator[tuple[str, str]]:
    """Yield the faults between keys: key path and sentence of each."""
    if settings.enabled and kubelet.enabled and not (settings.pool and kubelet.resource_of(settings.pool) is None):
        apart = (
            "set dra.pool to a [[pool]] that kubelet.resources does not list, and list kubelet.resource there"
            if kubelet.resources
            else "set dra.pool and kubelet.pool to two different [[pool]]s"
        )
        yield (
            "dra.pool",
            "dra.enabled and kubelet.enabled would both offer the same GPUs to the scheduler, which counts them twice: "
            f"{apart}, or leave one of the two off",
        )
