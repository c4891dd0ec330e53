"""Rules, moments and GPUs for tests of health."""

from msgspec.structs import replace

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.health import EventType, GpuEvent, HealthNotes, Sign
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.health.gpu_record import Moment, reset_text
from nri_gpu.health.node_health import NodeHealth
from nri_gpu.policy.health_settings import HealthSettings, OtherXids
from tests.support import builders as make

UUIDS = tuple(GpuUuid(f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(3))
PARTS = tuple(GpuUuid(f"MIG-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(3))
RULES = HealthSettings(
    ignored_xids=frozenset({31, 43}),
    fatal_xids=frozenset({79, 48}),
    other_xids=OtherXids.SUSPECT,
    fatal_signs=frozenset({Sign.LOST, Sign.RESET_REQUIRED}),
    suspect_signs=frozenset({Sign.REMAP_PENDING}),
    hold_down_s=100,
    reprobe_s=10,
)


def xid(number: int, gpu: int = 0) -> GpuEvent:
    return GpuEvent(UUIDS[gpu], int(EventType.XID), number)


def at(seconds: float) -> Moment:
    return Moment(seconds, 1_700_000_000 + seconds)


def with_parts(inventory: Inventory, gpu: int, *places: int) -> Inventory:
    """In MIG mode, with an instance at each of these places."""
    parts = tuple(
        make.mig(place=place, uuid=PARTS[place], gpu_instance_id=place + 1, profile="1g.10gb") for place in places
    )
    gpus = list(inventory.gpus)
    gpus[gpu] = replace(gpus[gpu], mig_enabled=True, mig=parts)
    return replace(inventory, gpus=tuple(gpus))


def look(*signs: tuple[Sign, ...], faults: tuple[GpuFault, ...] = ()) -> Inventory:
    """GPUs by their signs, from index 0."""
    gpus = tuple(make.gpu(index, uuid=UUIDS[index], signs=each) for index, each in enumerate(signs))
    return Inventory(taken_at=1.0, gpus=gpus, faults=faults)


def after_xid(
    number: int, uuid: GpuUuid, inventory: Inventory, now: Moment
) -> tuple[Inventory, dict[str, HealthNotes]]:
    """The inventory after a GPU's XID, with the rules that are built in, and what `status` is told beside it."""
    rules, event = HealthSettings(), GpuEvent(uuid, int(EventType.XID), number)
    health, _ = NodeHealth().after_inventory(inventory, rules, now)
    health, _ = health.after_event(event, rules, now)
    return health.applied_to(inventory, rules), {uuid: HealthNotes(reset=reset_text(health.records[uuid]))}
