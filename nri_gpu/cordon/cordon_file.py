"""The file with the GPUs that root took out of use, which outlives a reboot. No file: none was."""

from __future__ import annotations

from collections.abc import Mapping
from errno import EACCES
from pathlib import Path
from typing import Final

from msgspec import Struct, json

from nri_gpu.domain.cordons import NO_CORDONS, Cordons
from nri_gpu.domain.errors import cause_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.health.resets import AwaitedReset
from nri_gpu.system.storage import read_private, write_whole

FILE: Final = "cordoned.json"
BYTES_MAX: Final = 1 << 20


class CordonError(Exception):
    """A file that does not tell which GPUs root took out of use. Names it, and says why and what to do.

    denied: this user may not read it.
    """

    def __init__(self, sentence: str, *, denied: bool = False) -> None:
        super().__init__(sentence)
        self.denied = denied


class CordonRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU that root took out of use.

    at_s: when, seconds since the epoch. by: who, as the command said. why: root's text. given: GPU or MIG device -> as
    in `Cordon`. reset: what ends it, or None if only root does.
    """

    at_s: float
    by: str
    why: str
    given: Mapping[GpuUuid, frozenset[str]] = {}
    reset: AwaitedReset | None = None


Records = Mapping[GpuUuid, CordonRecord]


class _CordonFile(Struct, frozen=True):
    """The content. A later version may have more fields, which are passed over."""

    gpus: Records


def read_cordons(folder: Path) -> Records:
    """Return the GPUs that root took out of use. Raises: CordonError."""
    path = folder / FILE
    cure = f"correct that, or remove it (rm {path}) if no GPU is to stay out of use, and reload nri-gpu"
    try:
        content = read_private(path, BYTES_MAX + 1)
        return json.decode(content, type=_CordonFile).gpus
    except FileNotFoundError:
        return {}
    except OSError as error:
        denied = error.errno == EACCES
        raise CordonError(f"{path} cannot be read: {cause_of(error)}; {cure}", denied=denied) from error
    except (ValueError, RecursionError) as error:
        raise CordonError(f"{path} is not what nri-gpu wrote ({error}): {cure}") from error


def write_cordons(folder: Path, records: Records) -> None:
    """Write the file, for root alone, whole or not at all. Raises: OSError."""
    write_whole(folder / FILE, json.encode(_CordonFile(records)), sync=True)


def kept_cordons(folder: Path | str) -> Cordons:
    """Return what the file says, for those who do not ask the daemon; folder: or why there is none.

    Raises: CordonError: this user may not read it.
    """
    if isinstance(folder, str):
        return NO_CORDONS
    try:
        return cordons_of(read_cordons(folder))
    except CordonError as error:
        if error.denied:
            raise
        return Cordons(unknown=True)


def cordons_of(records: Records) -> Cordons:
    """Return the records as the node has them."""
    given = {uuid: ids for record in records.values() for uuid, ids in record.given.items()}
    return Cordons(frozenset(records), given)
