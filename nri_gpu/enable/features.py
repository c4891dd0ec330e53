"""The features that `nri-gpu enable` knows, each with its units, its drop-in and its setting of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from nri_gpu.policy.model import Policy

SERVICE: Final = "nri-gpu.service"
OBSERVER_SERVICE: Final = "nri-gpu-observe.service"
CLIENTS: Final = r"run-nri\x2dgpu-mps-clients.mount"
# A mount unit is named after its folder where it is installed.
INSTALLED_AS: Final[Mapping[str, str]] = MappingProxyType({"nri-gpu-mps-clients.mount": CLIENTS})
# The program in the units of this tree.
UNIT_PROGRAM: Final = "/opt/nri-gpu/bin/nri-gpu"


class Feature(Struct, frozen=True):
    """A feature.

    units: enabled, by their names where they are installed. mounts: only installed, since the drop-in starts them.
    drop_in: its name, for the first of `services` that the node has. setting: without which it does nothing, or empty;
    value: what to write there.
    """

    units: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    drop_in: str = ""
    services: tuple[str, ...] = (SERVICE,)
    setting: str = ""
    value: str = "true"
    needs_kubelet: bool = False

    def is_set(self, policy: Policy) -> bool:
        """Return whether the policy has the setting."""
        table, _, key = self.setting.partition(".")
        return bool(getattr(getattr(policy, table), key))


FEATURES: Final[Mapping[str, Feature]] = MappingProxyType(
    {
        "metrics": Feature(
            drop_in="metrics.conf",
            services=(SERVICE, OBSERVER_SERVICE),
            setting="metrics.listen",
            value='"127.0.0.1:9464"',
        ),
        "kubelet": Feature(drop_in="kubelet.conf", setting="kubelet.enabled", needs_kubelet=True),
        "stray": Feature(drop_in="stray.conf", setting="stray.enabled"),
        "mps": Feature(drop_in="mps.conf", mounts=(CLIENTS,), setting="mps.enabled"),
        "cdi": Feature(units=("nri-gpu-cdi.service", "nri-gpu-cdi.path")),
        "dra": Feature(units=("nri-gpu-dra.service",), setting="dra.enabled", needs_kubelet=True),
        "prepare": Feature(units=("nri-gpu-prepare.service",)),
    }
)
