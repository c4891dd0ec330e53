"""The dependencies of the plugin's handlers on the rest of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, field

from nri_gpu.domain.decision import Grant
from nri_gpu.ledger.recording import Recorder
from nri_gpu.plugin.decision_log import Refusals
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.system.cgroups import ContainerCgroups


class PluginDependencies(Struct, frozen=True):
    """The parts of the daemon that the plugin needs."""

    clock: Callable[[], float]  # monotonic, seconds
    later: Callable[[Callable[[], None]], object]  # runs something once the reply is on its way
    recorder: Recorder  # keeps what happens
    # Since the source of the inventory last answered, seconds; None where it never did.
    inventory_age_s: Callable[[], float | None] = lambda: None
    look_at_gpus: Callable[[], None] | None = None  # asks for a look at released GPUs; None where nobody can look
    start_hindrance: Callable[[Grant], str] = lambda _: ""  # why a container with this grant cannot start yet, or empty
    kill: Callable[[Mapping[str, str]], None] = lambda _: None  # containers, by id with their pods, through CRI
    # Where driver files are staged, without symlinks; empty where it does not matter what containers mount from there.
    stage_dir: str = ""
    registered: Callable[[], PluginSettings] = PluginSettings  # the name and index that the runtime knows us by
    refusals: Refusals = field(default_factory=Refusals)  # logs them
    cgroups: ContainerCgroups = field(default_factory=ContainerCgroups)  # of containers, as far as they can be seen
