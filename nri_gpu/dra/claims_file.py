"""`claims.json`: the claims that are prepared on this node, for the next daemon.

It holds for the boot in which it was written: after the next one the kubelet prepares what its pods need again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.system.storage import boot_id, read_bytes, write_whole

FILE_NAME: Final = "claims.json"  # in the state folder
BYTES_MAX: Final = 16 << 20
CONSEQUENCE: Final = (
    "running containers keep their GPUs, and are refused when they start again: delete all pods of such a claim then"
)


class _Claims(Struct, frozen=True):
    schema: Literal["nri-gpu/claims/v1"]
    boot_id: str
    claims: tuple[PreparedClaim, ...]


class _Sealed(Struct, frozen=True):
    """A document with its checksum. sha256: of `document` as it is written."""

    sha256: str
    document: msgspec.Raw


class ClaimsFile:
    """The file in a state folder. boot: the id of this boot."""

    def __init__(self, folder: Path, boot: str | None = None) -> None:
        self._path = folder / FILE_NAME
        self._boot = boot_id() if boot is None else boot

    def write(self, claims: Iterable[PreparedClaim]) -> None:
        """Write the claims. Raises: OSError."""
        document = msgspec.json.encode(_Claims("nri-gpu/claims/v1", self._boot, tuple(claims)))
        write_whole(self._path, msgspec.json.encode(_Sealed(_digest(document), msgspec.Raw(document))))

    def read(self) -> Mapping[ClaimUid, PreparedClaim]:
        """Read the claims of the daemon before this one. A file that cannot be trusted is logged, and has no claims."""
        try:
            claims = self._claims_in(read_bytes(self._path, BYTES_MAX))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            bound = logger.bind(path=str(self._path), fault=f"{fault_of(error)}; {CONSEQUENCE}")
            bound.warning("prepared claims dropped")
            return {}
        return {each.uid: each for each in claims}

    def _claims_in(self, text: bytes) -> tuple[PreparedClaim, ...]:
        """Decode a file's text. Raises: ValueError: it is damaged, of another version, or of another boot."""
        sealed = msgspec.json.decode(text, type=_Sealed)
        if sealed.sha256 != _digest(sealed.document):
            raise ValueError("its checksum is wrong")
        found = msgspec.json.decode(sealed.document, type=_Claims)
        if found.boot_id != self._boot:
            raise ValueError("it was written before this machine was started")
        return found.claims


def _digest(document: msgspec.Raw | bytes) -> str:
    return hashlib.sha256(bytes(memoryview(document))).hexdigest()
