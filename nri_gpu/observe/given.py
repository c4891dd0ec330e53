"""The devices that were given to containers, by what the kubelet, a claim, CDI or a runtime says of them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

PodContainer = tuple[str, str, str]  # namespace, pod and container


class GivenDevice(Struct, frozen=True, kw_only=True):
    """A device that the kubelet lists for a container. All of it is some plugin's text, and untrusted.

    Of a device plugin `resource` and `id` are set; of a claim `driver`, `pool`, `device`, and `claim`.
    """

    resource: str = ""  # `nvidia.com/gpu`
    id: str = ""  # `GPU-...`, `MIG-...`, or with `::2` a replica of one
    driver: str = ""  # `gpu.nvidia.com`
    pool: str = ""
    device: str = ""  # its name in the ResourceSlice, `gpu-3`
    claim: str = ""  # `namespace/name`
    cdi: tuple[str, ...] = ()  # qualified CDI names

    @property
    def by(self) -> str:
        """Return who gave it, as status and metrics name it."""
        return f"DRA driver {self.driver}" if self.driver else f"device plugin {self.resource}"


class Given(Struct, frozen=True, kw_only=True):
    """The kubelet's list. fault: why it is missing or old; a sentence, or empty. at: monotonic; None: never asked."""

    at: float | None = None
    devices: Mapping[PodContainer, tuple[GivenDevice, ...]] = {}
    kubelet: bool = False  # whether this node has a kubelet that can be asked
    fault: str = ""


NO_KUBELET = Given()
