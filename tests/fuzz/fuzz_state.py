"""Whatever bytes a file of the state folder holds, the daemon starts: the file is read, or dropped with a sentence.

A file that carries a checksum or a mac is also tried with the right one around the same bytes. An input is the name of
a file and its content. The folder is root's; a full disk, a kill and an editor make such files.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from nri_gpu.domain.errors import PolicyError
from nri_gpu.domain.health import GpuEvent
from nri_gpu.dra.claims_file import ClaimsFile
from nri_gpu.health.gpu_record import GpuRecord
from nri_gpu.health.health_file import load_health
from nri_gpu.health.node_health import NodeHealth
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.mps.mps_folders import NOTE, noted_folders
from nri_gpu.plugin.guard_status import read_guard_status
from nri_gpu.records.journal import Journal
from nri_gpu.records.ledger_file import read_ledger, write_ledger
from nri_gpu.records.policy_file import load_last_good
from nri_gpu.verify.node_snapshot import SnapshotError, from_bytes
from tests.fuzz.fuzz_signed import GRANT, SIGNED
from tests.fuzz.target import Target, chosen, named, scratch, words, written
from tests.support.plugin import KEY

NOW: Final = 1000.0
FOLDER: Final = scratch()


def ledger(data: bytes) -> bool:
    try:
        found = read_ledger(written(data, FOLDER, "ledger.json"), NOW)
    except ValueError:
        return False
    write_ledger(FOLDER / "again.json", found)
    assert read_ledger(FOLDER / "again.json", NOW).entries.keys() == found.entries.keys()
    return bool(found.entries)


def journal(data: bytes) -> bool:
    found = Journal(written(data, FOLDER, "journal"), KEY).remembered(0)
    assert all(each.grant.uuids == GRANT.uuids for each in found)
    return bool(found)


def snapshot(data: bytes) -> bool:
    signed = hmac.new(KEY, data, hashlib.sha256).hexdigest().encode() + b"\n" + data
    for content in (data, signed):
        with suppress(SnapshotError):
            from_bytes(content, KEY)
            return True
    return False


def claims(data: bytes) -> bool:
    sealed = b'{"sha256":"%b","document":%b}' % (hashlib.sha256(data).hexdigest().encode(), data)
    return any(
        [ClaimsFile(written(content, FOLDER, "claims.json").parent, "boot").read() for content in (data, sealed)]
    )


def health(data: bytes) -> bool:
    return load_health(written(data, FOLDER, "health.json"))[0] != NodeHealth()


def last_policy(data: bytes) -> bool:
    written(data, FOLDER, "policy.last")
    try:
        return load_last_good(FOLDER) is not None
    except PolicyError as error:
        assert str(error).isprintable() or "\n" in str(error)
        return False


def guard(data: bytes) -> bool:
    written(data, FOLDER, "guard", "guard.json")
    return read_guard_status(FOLDER / "guard") is not None


def mps(data: bytes) -> bool:
    written(data, FOLDER, "mps", "GPU-x", NOTE)
    for folder in noted_folders(FOLDER):
        folder.noted()
    return True


def _ledger_text() -> bytes:
    write_ledger(FOLDER / "good.json", Ledger({GRANT.container_id: Entry(GRANT, GrantPhase.RUNNING, 0.0)}))
    return (FOLDER / "good.json").read_bytes()


def _journal_text() -> bytes:
    file = FOLDER / "good.journal"
    file.unlink(missing_ok=True)
    kept = Journal(file, KEY)
    kept.granted(GRANT, SIGNED, NOW)
    kept.close()
    return file.read_bytes()


READERS: Final[dict[str, Callable[[bytes], object]]] = {
    "ledger.json": ledger,
    "journal": journal,
    "snapshot.json": snapshot,
    "claims.json": claims,
    "health.json": health,
    "policy.last": last_policy,
    "guard.json": guard,
    "mps": mps,
}
_CLAIM: Final = b'{"uid":"a","namespace":"ml","name":"train","pods":["p"],"devices":[],"text":""}'
STATE: Final = Target(
    chosen(READERS),
    good=[
        *named("ledger.json", _ledger_text()),
        *named("journal", _journal_text()),
        *named("policy.last", "# none", "[plugin]\nindex = '20'\n"),
        *named("mps", "12 34 generation\n"),
    ],
    bad=[
        *(
            each
            for name in READERS
            if name not in ("mps", "policy.last")
            for each in named(name, b"", b"\xff", b"{}", b"[" * 2500, b'{"a":' * 1500, b'{"a":"\xff"}')
        ),
        *named("claims.json", b'{"schema":"nri-gpu/claims/v1","boot_id":"boot","claims":[%b]}' % _CLAIM),
        *named("snapshot.json", b'{"schema":"nri-gpu/snapshot/v2","evidence":{},"inventory":{},"driver":{}}'),
        *named("policy.last", b""),
        *named("health.json", b'{"gpus":{},"seen":{}}'),
        *named("health.json", b'{"records":{"GPU-0":{"words":{"catalogue":{"signal":"fatal","why":"","at_s":"1"}}}}}'),
    ],
    pieces=(
        *READERS,
        *msgspec.json.encode(
            sorted(NodeHealth.__struct_fields__ + GpuRecord.__struct_fields__ + GpuEvent.__struct_fields__)
        )
        .decode()
        .split(","),
        *words('"schema": "grants": "leaving": "since_s": "grace_s": 1e999 null -1'),
        *words('{"settled":"c"} "mark": "at": "claims": "devices": "evidence": "pid": "started":'),
        *('"\\ud800"', "[" * 300, "\xff"),
    ),
    bytes_max=6000,
)
TARGETS: Final = {"state": STATE}
