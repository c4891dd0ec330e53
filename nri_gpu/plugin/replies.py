"""Replies to CreateContainer, encoded once for all containers that get the same."""

from __future__ import annotations

from typing import Final, Self

from msgspec import Struct

from nri_gpu.allocation.grant import MAC_LENGTH, grant_body, sign, sign_grant
from nri_gpu.domain.decision import Decision, Grant, Inject, Pass, Refuse
from nri_gpu.domain.edits import Edits
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri import convert
from nri_gpu.nri.convert import EMPTY
from nri_gpu.nri.status import status_of
from nri_gpu.ttrpc.status import Status

Reply = bytes | Status
REPLIES_KEPT: Final = 64


class Prepared(Struct, frozen=True):
    """A reply up to where containers of one kind differ, its mac.

    signed: what the mac at its end is about. mark: the mark in it, but for the mac.
    """

    edits: Edits
    head: bytes
    signed: bytes
    mark: str

    @classmethod
    def of(cls, edits: Edits, grant: Grant, key: bytes) -> Self:
        """The mac has a fixed length and stands at the very end, so all before it holds for every container."""
        mark = sign_grant(grant, key)
        reply = convert.reply_to_pb(edits) + convert.annotation_to_pb(GRANT_KEY, mark)
        return cls(edits, reply[:-MAC_LENGTH], grant_body(grant).encode(), mark[:-MAC_LENGTH])


class Replies:
    """By one key. Remembers the last ones, each up to its mac."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._kept: dict[tuple[object, ...], Prepared] = {}

    def to(self, decision: Decision) -> tuple[Reply, str]:
        """With the mark in it; empty where there is none."""
        match decision:
            case Pass(edits):
                return convert.reply_to_pb(edits) if edits.env else EMPTY, ""
            case Inject(edits, grant):
                prepared = self._prepared(edits, grant)
                mac = sign(prepared.signed, grant, self._key)
                return prepared.head + mac.encode(), prepared.mark + mac
            case Refuse(reason):
                return status_of(reason), ""

    def _prepared(self, edits: Edits, grant: Grant) -> Prepared:
        """The same object is encoded once for each way it is granted (`injection.plan` hands out the same ones)."""
        kind = (id(edits), grant.uuids, grant.mode, grant.generation)
        kept = self._kept.get(kind)
        if kept is not None and kept.edits is edits:
            return kept
        if len(self._kept) >= REPLIES_KEPT:
            self._kept.clear()
        self._kept[kind] = prepared = Prepared.of(edits, grant, self._key)
        return prepared
