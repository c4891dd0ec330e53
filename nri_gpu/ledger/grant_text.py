"""The signed grant: written on its container as an annotation, so that the runtime returns it after any restart.

`v1;mode=exclusive;uuid=GPU-…,GPU-…;gen=580.95.05-1a2b3c4d;mac=…`. The mac is HMAC-SHA-256 over pod uid, container id
and the fields before it, so a grant that was edited, or copied to another container, is invalid.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode

_NO_MODE: Final = "none"
_FIELDS: Final = ("mode", "uuid", "gen", "mac")


class SignedGrant(Struct, frozen=True):
    """A valid signed grant. mode None: no GPU was granted."""

    uuids: tuple[GpuUuid, ...]
    mode: Mode | None
    generation: str

    @property
    def of_nothing(self) -> bool:
        """Return whether it only says that somebody decided: that the container gets no GPU."""
        return not self.uuids


class InvalidGrant(Struct, frozen=True):
    """A signed grant to ignore and report. why: for the log; never holds the key or the right mac."""

    why: str


def sign_grant(grant: Grant, key: bytes) -> str:
    """Return the annotation's value for a grant."""
    mode = _NO_MODE if grant.mode is None else grant.mode.value
    body = f"v1;mode={mode};uuid={','.join(grant.uuids)};gen={grant.generation}"
    return f"{body};mac={_mac(body, grant.pod_uid, grant.container_id, key)}"


def verify_grant(text: str, pod_uid: PodUid, container_id: ContainerId, key: bytes) -> SignedGrant | InvalidGrant:
    """Read the signed grant on a container, if this node's nri-gpu wrote it for this very container."""
    body, _, mac = text.rpartition(";mac=")
    # compare_digest refuses non-ASCII text, and a forged grant may hold anything.
    if not hmac.compare_digest(_bytes(mac), _mac(body, pod_uid, container_id, key).encode()):
        return InvalidGrant("its mac does not match: not written by this node's nri-gpu, or not for this container")
    fields = signed_fields(text, _FIELDS)
    if fields is None or fields["mode"] not in {_NO_MODE, *Mode}:
        return InvalidGrant("its mac is right but its fields are not: written by another version of nri-gpu")
    return SignedGrant(
        uuids=tuple(GpuUuid(uuid) for uuid in fields["uuid"].split(",") if uuid),
        mode=None if fields["mode"] == _NO_MODE else Mode(fields["mode"]),
        generation=fields["gen"],
    )


def signed_fields(text: str, names: tuple[str, ...]) -> Mapping[str, str] | None:
    """Read the fields of `v1;name=value;...;mac=...`, with exactly these names in this order; else return None."""
    version, *rest = text.split(";")
    pairs = [part.partition("=")[::2] for part in rest]
    return dict(pairs) if version == "v1" and tuple(name for name, _ in pairs) == names else None


def mac_of(body: str, key: bytes, context: bytes) -> str:
    """Return the mac of a text. context: names its kind, so that no text passes for one of another kind."""
    return hmac.new(key, context + _bytes(body), "sha256").hexdigest()


def has_mac(text: str, key: bytes, context: bytes) -> bool:
    """Return whether a text ends in `;mac=` and the `mac_of` what stands before that."""
    body, _, mac = text.rpartition(";mac=")
    return hmac.compare_digest(_bytes(mac), mac_of(body, key, context).encode())


def _mac(body: str, pod_uid: str, container_id: str, key: bytes) -> str:
    # Each part with its length, so that no character of one can move the border to the next.
    parts = (b"%d:%b" % (len(part), part) for part in map(_bytes, (pod_uid, container_id, body)))
    return hmac.new(key, b"".join(parts), "sha256").hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
