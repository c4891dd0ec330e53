"""What the plugin's handlers need of the rest of the daemon."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from nri_gpu.domain.decision import Grant
from nri_gpu.ledger.recording import Recorder
from nri_gpu.plugin.decision_log import Refusals
from nri_gpu.system.cgroups import ContainerCgroups


class PluginDependencies(Struct, frozen=True):
    """What the plugin needs of the rest of the daemon.

    clock: monotonic seconds. later: run something once the reply is on its way. recorder: keeps what happens.
    inventory_age_s: seconds since the source of the inventory last answered; None where it never did.
    start_hindrance: why a container with this grant cannot start yet; empty when it can. stage_dir: where driver files
    are staged, without symlinks; empty: what containers have mounted from there does not matter. refusals: logs them.
    cgroups: of containers, as far as they can be seen.
    """

    clock: Callable[[], float]
    later: Callable[[Callable[[], None]], object]
    recorder: Recorder
    inventory_age_s: Callable[[], float | None] = lambda: None
    start_hindrance: Callable[[Grant], str] = lambda _: ""
    stage_dir: str = ""
    refusals: Refusals = field(default_factory=Refusals)
    cgroups: ContainerCgroups = field(default_factory=ContainerCgroups)
