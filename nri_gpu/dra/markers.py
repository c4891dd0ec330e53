"""Markers: the variables by which a container shows which devices of which claims it has.

    NRI_GPU_CLAIM_<claim's UID>_<n>=v1;claim=<claim's UID>;device=<n>;mac=<hex>

The kubelet gives markers to the containers that name the claim, as edits of CDI devices. Whoever writes a pod could
write a marker too, so they are signed with the key of the boot; and they are worth nothing in pods that the claim is
not for.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from nri_gpu.domain.names import MARKER_PREFIX
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.ledger.grant_text import has_mac, mac_of, signed_fields

_FIELDS: Final = ("claim", "device", "mac")
_CONTEXT: Final = b"nri-gpu claim marker:"
_PLACE: Final = re.compile(r"[0-9]{1,6}")


class Marker(Struct, frozen=True):
    """A valid marker. device: its place among the claim's devices."""

    claim: ClaimUid
    device: int


def markers_of(claim: PreparedClaim, key: bytes) -> tuple[tuple[str, str], ...]:
    """Write the name and value of a marker for each of the claim's devices, in their order."""
    return tuple(_marker(claim.uid, device, key) for device in range(len(claim.devices)))


def read_marker(name: str, text: str, key: bytes) -> Marker | None:
    """Read a variable, if this node's nri-gpu wrote it since the node booted; else return None."""
    fields = signed_fields(text, _FIELDS) if has_mac(text, key, _CONTEXT) else None
    if fields is None or not _PLACE.fullmatch(fields["device"]):
        return None
    marker = Marker(ClaimUid(fields["claim"]), int(fields["device"]))
    return marker if name == _name(marker.claim, marker.device) else None


def _marker(claim: ClaimUid, device: int, key: bytes) -> tuple[str, str]:
    body = f"v1;claim={claim};device={device}"
    return _name(claim, device), f"{body};mac={mac_of(body, key, _CONTEXT)}"


def _name(claim: ClaimUid, device: int) -> str:
    return f"{MARKER_PREFIX}{claim.upper().replace('-', '_')}_{device}"
