"""The lines of usage.jsonl: who had which GPU, from when to when.

A hold is a holder with its GPUs and MIG devices. It has a line when it begins and one when it ends; once an hour, and
when a daemon begins, one line lists all that are open. A line that is missing is found by these lists: a hold that
a list lacks, or of a boot that is over, ended after the last line that knew it. Each line has the boot and the seconds
on the boot's monotonic clock, by which times are told apart from each other whatever sets the other clock.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.json import Decoder, encode

from nri_gpu.domain.gpu import GpuUuid, MigPart, Unit, compute_share, whole
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.holds import End, Hold, HoldWay

SCHEMA: Final = "nri-gpu/usage-log/v1"
_Seconds = Annotated[float, Meta(ge=0, lt=1e12)]
_Part = Annotated[float, Meta(gt=0, le=1)]


class LogMoment(Struct, frozen=True):
    """A moment of one boot: seconds on its monotonic clock, and since the epoch."""

    mono_s: float
    at_s: float


class _Line(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """at_s: seconds since the epoch; mono_s: the same moment, seconds on that boot's monotonic clock."""

    boot: str
    at_s: _Seconds
    mono_s: _Seconds


class HeldDevice(Struct, frozen=True, kw_only=True):
    """A GPU or MIG device. gpu_uuid: of the whole GPU. share: the part of its compute slices."""

    uuid: str
    gpu_uuid: str
    place: str = ""
    model: str = ""
    profile: str = ""
    share: _Part = 1.0


class Begun(_Line, frozen=True, kw_only=True, tag="begun"):
    """A holder that has devices. It may stand in the file again: each file has those that are open when it begins.

    since_s: when that began, on the same clock as mono_s. part: of each device, that a scheduler of fractions gave it.
    """

    schema: str = SCHEMA
    hold: str
    since_s: _Seconds
    devices: tuple[HeldDevice, ...]
    way: HoldWay
    mode: str
    namespace: str
    pod: str
    pod_uid: str
    container: str
    claim: str
    part: _Part = 1.0

    @property
    def began(self) -> LogMoment:
        """Return when the hold began."""
        return LogMoment(self.since_s, self.at_s - (self.mono_s - self.since_s))


class HoldEnded(_Line, frozen=True, kw_only=True, tag="ended"):
    """The end of a hold."""

    hold: str
    why: End


class Open(_Line, frozen=True, kw_only=True, tag="open"):
    """A list of all holds that are open."""

    holds: tuple[str, ...]


class Cordoned(_Line, frozen=True, kw_only=True, tag="cordoned"):
    """A GPU that root took out of use, and once more when it is in use again.

    by: who took it out of use, since_s: when, seconds since the epoch. why: root's text. ended: how it came back, or
    empty.
    """

    device: HeldDevice
    by: str
    why: str
    since_s: _Seconds
    ended: str = ""


UsageLine = Begun | HoldEnded | Open | Cordoned
_DECODER: Final[Decoder[UsageLine]] = Decoder(UsageLine)


def now() -> LogMoment:
    return LogMoment(time.monotonic(), time.time())


def hold_id(hold: Hold) -> str:
    """Return a hold's id in the file; a device of the kubelet has another for each pod."""
    known = (*hold.key, hold.mode, hold.pod_uid, hold.pod, *hold.uuids)
    return hashlib.blake2b("\n".join(known).encode(), digest_size=8).hexdigest()


def begun_line(hold: Hold, devices: Mapping[str, HeldDevice], since_s: float, boot: str, now: LogMoment) -> Begun:
    """Return the line of a hold's beginning. devices: of the node by UUID; it may not have one any more."""
    return Begun(
        boot=boot,
        at_s=now.at_s,
        mono_s=now.mono_s,
        hold=hold_id(hold),
        since_s=since_s,
        devices=tuple(device_named(uuid, devices) for uuid in hold.uuids),
        way=hold.way,
        mode=hold.mode,
        namespace=hold.namespace,
        pod=hold.pod,
        pod_uid=hold.pod_uid,
        container=hold.container,
        claim=hold.claim,
        part=hold.part,
    )


def device_named(uuid: GpuUuid, devices: Mapping[str, HeldDevice]) -> HeldDevice:
    """Return the device with that UUID, or one of which nothing more is known."""
    return devices.get(uuid) or HeldDevice(uuid=uuid, gpu_uuid=uuid)


def devices_of(inventory: Inventory) -> Mapping[str, HeldDevice]:
    """Return a node's devices by UUID."""
    return {unit.uuid: device_of(unit) for unit in inventory.units}


def device_of(unit: Unit) -> HeldDevice:
    return HeldDevice(
        uuid=unit.uuid,
        gpu_uuid=whole(unit).uuid,
        place=unit.place,
        model=unit.model,
        profile=unit.device.profile if isinstance(unit, MigPart) else "",
        share=compute_share(unit),
    )


def encoded(line: UsageLine) -> bytes:
    return encode(line) + b"\n"


def decoded(line: bytes) -> UsageLine | None:
    """Return a line of the file; None for one that was cut short, damaged, or that a later version wrote."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
