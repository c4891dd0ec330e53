"""`claims.json`: what is written is read again in the same boot, and nothing else is."""

from __future__ import annotations

import hashlib
import sys
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


DAMAGE = {
    "another boot": (BOOT.encode(), BOOT[:-1].encode() + b"2", "checksum"),
    "another GPU": (make.uuid(0).encode(), make.uuid(3).encode(), "checksum"),
    "another checksum": (b'"sha256":"', b'"sha256":"0', "checksum"),
    "not JSON": (b'{"sha256"', b'{"sha256', "malformed"),
    "half of it": (b'"schema"', b"", "malformed"),
    "nothing": (None, b"", "truncated"),
    "something else": (None, b'{"grants":[]}', "sha256"),
    "no text": (None, b"\xff\xfe", "malformed"),
    "deep": (
        None,
        b'{"sha256":"","document":' + b"[" * 100_000,
        "recursion" if sys.version_info < (3, 14) else "truncated",
    ),
}


@pytest.mark.parametrize(("before", "after", "why"), DAMAGE.values(), ids=DAMAGE)
def test_what_cannot_be_trusted_is_dropped(
    tmp_path: Path, log: Log, before: bytes | None, after: bytes, why: str
) -> None:
    ClaimsFile(tmp_path, BOOT).write([CLAIM])
    file = tmp_path / FILE_NAME
    file.write_bytes(after if before is None else file.read_bytes().replace(before, after, 1))
    assert ClaimsFile(tmp_path, BOOT).read() == {}
    fault = log.one("prepared claims dropped").fields["fault"]
    assert why in fault
    assert fault.endswith(CONSEQUENCE)


def test_another_boot_is_dropped(tmp_path: Path, log: Log) -> None:
    ClaimsFile(tmp_path, "another").write([CLAIM])
    assert ClaimsFile(tmp_path, BOOT).read() == {}
    assert "before this machine was started" in log.one("prepared claims dropped").fields["fault"]


def test_another_version_is_dropped(tmp_path: Path, log: Log) -> None:
    document = b'{"schema":"nri-gpu/claims/v2","boot_id":"%s","claims":[]}' % BOOT.encode()
    sealed = b'{"sha256":"%s","document":%s}' % (hashlib.sha256(document).hexdigest().encode(), document)
    (tmp_path / FILE_NAME).write_bytes(sealed)
    assert ClaimsFile(tmp_path, BOOT).read() == {}
    assert "nri-gpu/claims/v2" in log.one("prepared claims dropped").fields["fault"]


def test_a_file_that_cannot_be_opened_is_dropped(tmp_path: Path, log: Log) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert ClaimsFile(tmp_path, BOOT).read() == {}
    assert "Is a directory" in log.one("prepared claims dropped").fields["fault"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ClaimsFile(tmp_path / "gone", BOOT).write([CLAIM])
