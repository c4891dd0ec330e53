"""`claims.json`: what is written is read again in the same boot, and nothing else is."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import PodUid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import ClaimedDevice, ClaimUid, PreparedClaim
from nri_gpu.dra.claims_file import CONSEQUENCE, FILE_NAME, ClaimsFile
from tests.support import builders as make
from tests.support.log import Log

BOOT = "2c5d9c4e-0000-4000-8000-000000000001"
DEVICE = ClaimedDevice(
    request="gpu",
    pool="node-a",
    device="gpu-7",
    uuid=make.uuid(0),
    mode=Mode.SHARED,
    text="all;mode=shared",
    share_id="s-1",
)
WATCHING = replace(DEVICE, request="watch", uuid=make.uuid(1), mode=Mode.EXCLUSIVE, text="", admin=True)
CLAIM = PreparedClaim(
    uid=ClaimUid("8c5e6c5a-7d4f-4a53-8d7a-3f1c9f1f1e01"),
    namespace="ml",
    name="train",
    pods={PodUid("uid-a"): "a", PodUid("uid-b"): "b"},
    devices=(DEVICE, WATCHING),
    owned=True,
)
OTHER = replace(CLAIM, uid=ClaimUid("8c5e6c5a-7d4f-4a53-8d7a-3f1c9f1f1e02"), pods={}, owned=False)


def test_what_is_written_is_read_again(tmp_path: Path, log: Log) -> None:
    assert ClaimsFile(tmp_path, BOOT).read() == {}
    ClaimsFile(tmp_path, BOOT).write([CLAIM, OTHER])
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert ClaimsFile(tmp_path, BOOT).read() == {CLAIM.uid: CLAIM, OTHER.uid: OTHER}
    ClaimsFile(tmp_path, BOOT).write([])
    assert ClaimsFile(tmp_path, BOOT).read() == {}
    assert not log.lines


def test_a_version_that_knows_no_groups_reads_what_has_none(tmp_path: Path) -> None:
    ClaimsFile(tmp_path, BOOT).write([replace(CLAIM, groups={"g-1": "gang"}), OTHER])
    known = {"uid", "namespace", "name", "pods", "devices", "owned"}  # of 0.1.0, which takes no other field
    of_group, other = msgspec.json.decode((tmp_path / FILE_NAME).read_bytes())["document"]["claims"]
    assert (of_group.keys() - known, other.keys() - known) == ({"groups"}, set())


def test_this_boot_is_the_kernel_s(tmp_path: Path) -> None:
    ClaimsFile(tmp_path).write([CLAIM])
    assert ClaimsFile(tmp_path).read() == {CLAIM.uid: CLAIM}
    assert ClaimsFile(tmp_path, BOOT).read() == {}


Spoil = Callable[[Path], object]


def edited(before: bytes, after: bytes) -> Spoil:
    return lambda file: file.write_bytes(file.read_bytes().replace(before, after, 1))


def written(text: bytes) -> Spoil:
    return lambda file: file.write_bytes(text)


def made_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


TOMORROWS = b'{"schema":"nri-gpu/claims/v2","boot_id":"%s","claims":[]}' % BOOT.encode()
SEALED = b'{"sha256":"%s","document":%s}' % (hashlib.sha256(TOMORROWS).hexdigest().encode(), TOMORROWS)
# What becomes of a file that was written, and why it is dropped.
DAMAGE: dict[str, tuple[Spoil, str]] = {
    "another boot, by hand": (edited(BOOT.encode(), BOOT[:-1].encode() + b"2"), "checksum"),
    "another GPU": (edited(make.uuid(0).encode(), make.uuid(3).encode()), "checksum"),
    "another checksum": (edited(b'"sha256":"', b'"sha256":"0'), "checksum"),
    "not JSON": (edited(b'{"sha256"', b'{"sha256'), "malformed"),
    "half of it": (edited(b'"schema"', b""), "malformed"),
    "nothing": (written(b""), "truncated"),
    "something else": (written(b'{"grants":[]}'), "sha256"),
    "no text": (written(b"\xff\xfe"), "malformed"),
    "deep": (
        written(b'{"sha256":"","document":' + b"[" * 100_000),
        "recursion" if sys.version_info < (3, 14) else "truncated",
    ),
    "of another boot": (
        lambda file: ClaimsFile(file.parent, "another").write([CLAIM]),
        "before this machine was start",
    ),
    "of another version": (written(SEALED), "nri-gpu/claims/v2"),
    "a folder": (made_a_folder, "it is a folder"),
}


@pytest.mark.parametrize(("spoil", "why"), DAMAGE.values(), ids=DAMAGE)
def test_what_cannot_be_trusted_is_dropped(tmp_path: Path, log: Log, spoil: Spoil, why: str) -> None:
    ClaimsFile(tmp_path, BOOT).write([CLAIM])
    spoil(tmp_path / FILE_NAME)
    assert ClaimsFile(tmp_path, BOOT).read() == {}
    fault = log.one("prepared claims dropped").fields["fault"]
    assert why in fault
    assert fault.endswith(CONSEQUENCE)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ClaimsFile(tmp_path / "gone", BOOT).write([CLAIM])
