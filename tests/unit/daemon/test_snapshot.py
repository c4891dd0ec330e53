"""A snapshot comes back whole, or not at all with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.snapshot import (
    BYTES_MAX,
    SNAPSHOT_FILE,
    Evidence,
    Snapshot,
    SnapshotError,
    read_snapshot,
    sight_of,
    to_bytes,
)
from tests.support.plugin import KEY, node

EVIDENCE = Evidence(
    boot_id="b",
    program="0.1",
    module_version="580.95.05",
    settings=("/",),
    host=((1, 2, 3), None),
    staged=((4, 5, 6),),
    sight=sight_of("x"),
    module_versions=("580.95.05", "580.95.05", "", ""),
)
DRIVER = node().driver
assert DRIVER
SNAPSHOT = Snapshot(evidence=EVIDENCE, inventory=node().inventory, driver=DRIVER)


def kept(folder: Path, content: bytes) -> Path:
    (folder / SNAPSHOT_FILE).write_bytes(content)
    return folder


def test_it_comes_back(tmp_path: Path) -> None:
    found = read_snapshot(kept(tmp_path, to_bytes(SNAPSHOT, KEY)), KEY)
    assert found
    assert (found.inventory, found.driver, found.evidence) == (SNAPSHOT.inventory, DRIVER, EVIDENCE)
    assert to_bytes(found, KEY) == to_bytes(SNAPSHOT, KEY)


def test_none_is_no_error(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path, KEY) is None


def signed(body: str) -> bytes:
    """As a daemon of another version might write it."""
    import hashlib
    import hmac

    return hmac.new(KEY, body.encode(), hashlib.sha256).hexdigest().encode() + b"\n" + body.encode()


WHOLE = to_bytes(SNAPSHOT, KEY)
BODY = json.loads(WHOLE.partition(b"\n")[2])
BAD = {
    "edited": (WHOLE.replace(b"H100", b"H200").replace(b"A100", b"A200"), "was changed since"),
    "half": (WHOLE[: len(WHOLE) // 2], "was changed since"),
    "empty": (b"", "not written by a daemon with this state folder's key"),
    "of another key": (to_bytes(SNAPSHOT, bytes(32)), "not written by a daemon with this"),
    "too large": (b"x" * (BYTES_MAX + 1), "is larger than"),
    "no JSON": (signed("{"), "it cannot be read"),
    "nested": (signed("[" * 100_000), "it cannot be read"),
    "another shape": (signed("[]"), "it cannot be read: Expected `object`, got `array`"),
    "a field of tomorrow": (signed(json.dumps(BODY | {"more": 1})), "unknown field `more`"),
    "a schema of tomorrow": (signed(json.dumps(BODY | {"schema": "nri-gpu/snapshot/v2"})), "its schema is"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_used_says_why(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(SnapshotError, match=words.replace("[", r"\[")):
        read_snapshot(kept(tmp_path, content), KEY)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / SNAPSHOT_FILE).mkdir()
    with pytest.raises(SnapshotError, match="Is a directory"):
        read_snapshot(tmp_path, KEY)


def test_differences_are_named() -> None:
    assert EVIDENCE.differences(EVIDENCE) == ""
    other = replace(
        EVIDENCE, boot_id="c", module_version="590.1", sight="", host=(), staged=(), settings=(), program="1"
    )
    assert EVIDENCE.differences(other) == (
        "the machine was booted, another version of nri-gpu wrote it, another kernel module is loaded, "
        "the policy names another place for the driver, the driver's folders changed, the staged files changed, "
        "the kernel shows other GPUs or nodes"
    )
