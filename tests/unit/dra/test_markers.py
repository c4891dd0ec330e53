"""Markers: only this node's, of this boot, and as they were written."""

from __future__ import annotations

import pytest

from nri_gpu.domain.allocation import ClaimUid
from nri_gpu.dra.markers import Marker, markers_of, read_marker
from nri_gpu.kubelet.required_device import write_token
from tests.support.builders import prepared_claim

KEY, OTHER = bytes(32), bytes(range(32))
UID = "0a1b2c3d-0000-4000-8000-00000000beef"
CLAIM = prepared_claim(0, 1, uid=ClaimUid(UID))
NAME = "NRI_GPU_CLAIM_0A1B2C3D_0000_4000_8000_00000000BEEF_"


def test_each_device_has_one_that_says_which_it_is() -> None:
    markers = markers_of(CLAIM, KEY)
    assert [name for name, _ in markers] == [f"{NAME}0", f"{NAME}1"]
    assert [read_marker(name, text, KEY) for name, text in markers] == [
        Marker(ClaimUid(UID), 0),
        Marker(ClaimUid(UID), 1),
    ]
    assert markers[0][1] == (  # as earlier versions wrote it, of this boot
        f"v1;claim={UID};device=0;mac=aba3e36755ce2732034d76051e082a0702e51732fa0ba927eb72189763c1a498"
    )
    assert max(len(part) for marker in markers for part in marker) < 256


def changed() -> dict[str, tuple[str, str]]:
    (name, text), (second, _) = markers_of(CLAIM, KEY)
    mac = text.rpartition("=")[2]
    return {
        "another device": (name, text.replace("device=0", "device=1")),
        "another claim": (name, text.replace("beef", "dead")),
        "another name": (second, text),
        "no mac": (name, text.rpartition(";")[0]),
        "an empty mac": (name, text.replace(mac, "")),
        "text behind": (name, f"{text}0"),
        "text before": (name, f" {text}"),
        "nothing": (name, ""),
        "not ASCII": (name, f"v1;claim=\udcff;mac=\udcff{mac}"),
        "a device plugin's token": (name, write_token("nvidia.com/gpu", ["GPU-1"], KEY, shared=False)),
    }


@pytest.mark.parametrize("marker", changed().values(), ids=changed())
def test_what_was_changed_is_none(marker: tuple[str, str]) -> None:
    assert read_marker(*marker, KEY) is None


def test_another_boots_is_none() -> None:
    assert not any(read_marker(name, text, OTHER) for name, text in markers_of(CLAIM, KEY))
