"""The mark: a grant written on its container, signed, so that the runtime hands it back after any restart.

`v1;mode=exclusive;uuid=GPU-…,GPU-…;gen=580.95.05-1a2b3c4d;mac=…`. The mac is HMAC-SHA-256 over pod uid, container id
and the fields before it: a mark copied to another container, or edited, is worth nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec import Struct

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid

KEY_BYTES: Final = 32
MAC_LENGTH: Final = 64  # characters
_NO_MODE: Final = "none"
_FIELDS: Final = ("mode", "uuid", "gen", "mac")


class SignedGrant(Struct, frozen=True):
    """What a valid mark says. mode None: a grant of nothing."""

    uuids: tuple[GpuUuid, ...]
    mode: Mode | None
    generation: str


class InvalidGrant(Struct, frozen=True):
    """A mark that must be ignored and reported. why: for the log; never holds the key or the right mac."""

    why: str


def sign_grant(grant: Grant, key: bytes) -> str:
    """The annotation's value for a grant."""
    body = grant_body(grant)
    return f"{body};mac={sign(body.encode(), grant, key)}"


def grant_body(grant: Grant) -> str:
    """What a mark says, without its mac: the same for all containers that get the same."""
    return f"v1;mode={_mode_word(grant.mode)};uuid={','.join(grant.uuids)};gen={grant.generation}"


def sign(body: bytes, grant: Grant, key: bytes) -> str:
    """The mac of that body on that grant's container: MAC_LENGTH hexadecimal digits."""
    return _mac(key, _bytes(grant.pod_uid), _bytes(grant.container_id), body)


def verify_grant(text: str, pod_uid: PodUid, container_id: ContainerId, key: bytes) -> SignedGrant | InvalidGrant:
    """The mark on a container, if it is ours and about this very container."""
    body, _, mac = text.rpartition(";mac=")
    # compare_digest refuses non-ASCII text; a forged mark may hold anything.
    right = _mac(key, _bytes(pod_uid), _bytes(container_id), _bytes(body))
    if not hmac.compare_digest(_bytes(mac), right.encode()):
        return InvalidGrant("its mac does not match: not written by this node's nri-gpu, or not for this container")
    fields = _fields(text)
    if fields is None:
        return InvalidGrant("its mac is right but its fields are not: written by another version of nri-gpu")
    return SignedGrant(
        uuids=tuple(GpuUuid(uuid) for uuid in fields["uuid"].split(",") if uuid),
        mode=None if fields["mode"] == _NO_MODE else Mode(fields["mode"]),
        generation=fields["gen"],
    )


def _mac(key: bytes, uid: bytes, id_: bytes, body: bytes) -> str:
    # Each part with its length, so that no character of one can move the border to the next.
    mac = _keyed(key).copy()
    mac.update(b"%d:%b%d:%b%d:%b" % (len(uid), uid, len(id_), id_, len(body), body))
    return mac.hexdigest()


@lru_cache(maxsize=4)
def _keyed(key: bytes) -> hmac.HMAC:
    """Begun with the key: copying it takes half as long as beginning anew, in cold caches too."""
    return hmac.new(key, digestmod="sha256")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _fields(text: str) -> Mapping[str, str] | None:
    fields = signed_fields(text, _FIELDS)
    return fields if fields and fields["mode"] in {_NO_MODE, *Mode} else None


def signed_fields(text: str, names: tuple[str, ...]) -> Mapping[str, str] | None:
    """`v1;name=value;...;mac=...` with exactly these names in this order; None for any other text."""
    version, *rest = text.split(";")
    pairs = [part.partition("=")[::2] for part in rest]
    return dict(pairs) if version == "v1" and tuple(name for name, _ in pairs) == names else None


def _mode_word(mode: Mode | None) -> str:
    return _NO_MODE if mode is None else mode.value
