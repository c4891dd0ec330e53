"""The early ends of trouble: the driver's recovery action, a reset that shows, an error that was contained."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.health import RESETS, RecoveryAction, Sign
from nri_gpu.health.gpu_record import GpuRecord, Moment, Witness, confirmed, taken_back
from nri_gpu.policy.health_settings import HealthSettings

NO_ACTION: Final = "the driver's recovery action is none"
IS_CONTAINED: Final = "the error is contained"


class AwaitedReset(Struct, frozen=True, omit_defaults=True):
    """A reset that root waits for, and what was seen of the GPU since.

    boot_id, module: of the kernel and which load of the driver's module it is, or empty. pending: a remap was pending.
    asked: the driver's recovery action was a reset.
    """

    boot_id: str = ""
    module: str = ""
    pending: bool = False
    asked: bool = False

    def after(self, gpu: Gpu, module: str, boot_id: str) -> AwaitedReset | None:
        """Return what is awaited after the driver described the GPU, or None once that proves a reset."""
        if (module and self.module not in ("", module)) or (boot_id and self.boot_id not in ("", boot_id)):
            return None
        remap = Sign.REMAP_PENDING in gpu.signs or gpu.remap_pending
        if (self.pending and remap is False) or (self.asked and gpu.recovery_action is RecoveryAction.NONE):
            return None
        return AwaitedReset(
            boot_id=self.boot_id or boot_id,
            module=self.module or module,
            pending=self.pending or bool(remap),
            asked=self.asked or gpu.recovery_action in RESETS,
        )


def after_contained(record: GpuRecord, rules: HealthSettings, now: Moment) -> GpuRecord:
    """Return the record after a contained ECC error. Errors that come together are one."""
    another = record.remap and now.clock_s - record.contained_s >= rules.reprobe_s
    record = replace(record, contained_s=now.clock_s, contained=record.contained + another)
    word = record.words.get(Witness.DOUBLE_BIT)
    if word and now.clock_s - word.at_s < rules.reprobe_s:
        return taken_back(record, Witness.DOUBLE_BIT, IS_CONTAINED, now)
    return record


def after_memory(record: GpuRecord, gpu: Gpu) -> GpuRecord:
    """Return the record after a refresh told whether a remap is pending."""
    pending = Sign.REMAP_PENDING in gpu.signs or gpu.remap_pending
    if pending is None:
        return record
    remap = pending and gpu.recovery_action is None
    record = replace(record, remap=remap, contained=record.contained if remap else 0)
    if record.reset is None:
        return record
    if pending:
        return replace(record, reset=replace(record.reset, pending=True))
    return replace(confirmed(record), reset=None) if record.reset.pending else record


def after_answer(record: GpuRecord, gpu: Gpu, now: Moment, asked_s: float, module: str) -> GpuRecord:
    """Return the record after a refresh told the driver's recovery action, and which load of its module it is."""
    due, word = record.reset, record.words.get(Witness.CATALOGUE)
    if due and module and due.module and module != due.module:
        record, due = replace(confirmed(record), reset=None), None
    if gpu.recovery_action is RecoveryAction.NONE:
        if due and asked_s >= due.at_s:
            record = replace(record, reset=None)
        if word and asked_s >= word.at_s:
            return taken_back(record, Witness.CATALOGUE, NO_ACTION, now)
    elif gpu.recovery_action in RESETS:
        return confirmed(record)
    return record
