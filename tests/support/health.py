"""Rules, moments and GPUs for tests of health."""

from nri_gpu.domain.gpu import Gpu, GpuFault, GpuUuid, Inventory, PciBusId
from nri_gpu.domain.health import EventType, GpuEvent, Sign
from nri_gpu.health.classes import Meaning, Rules
from nri_gpu.health.fleet import Moment

UUIDS = tuple(GpuUuid(f"GPU-{n}b200000-0000-4000-8000-00000000000{n}") for n in range(3))
RULES = Rules(
    ignored_xids=frozenset({31, 43}),
    fatal_xids=frozenset({79, 48}),
    other_xids=Meaning.SUSPECT,
    fatal_signs=frozenset({Sign.LOST, Sign.RESET_REQUIRED}),
    suspect_signs=frozenset({Sign.REMAP_PENDING}),
    hold_down_s=100,
    reprobe_s=10,
)


def xid(number: int, gpu: int = 0) -> GpuEvent:
    return GpuEvent(UUIDS[gpu], int(EventType.XID), number)


def at(seconds: float) -> Moment:
    return Moment(seconds, 1_700_000_000 + seconds)


def look(*signs: tuple[Sign, ...], faults: tuple[GpuFault, ...] = ()) -> Inventory:
    """GPUs by their signs, from index 0."""
    gpus = tuple(
        Gpu(
            index=index,
            minor_number=index,
            uuid=UUIDS[index],
            pci_bus_id=PciBusId(f"0000:{index + 16:02x}:00.0"),
            model="NVIDIA H100",
            memory_bytes=1,
            arch=(9, 0),
            signs=each,
        )
        for index, each in enumerate(signs)
    )
    return Inventory(taken_at=1.0, gpus=gpus, faults=faults)
