"""The driver's files under /proc: defaults, decimal modes, and what is refused as unclear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.host.facts import HostError
from nri_gpu.host.modules import read_mig_minors
from nri_gpu.host.wanted import Ownership, capability, gpu_minor, params_ownership
from tests.unit.host.host_tree import information, params

OWNERS = {
    "the driver's defaults": ("", Ownership(0o666, 0, 0, True)),
    "a mode is decimal": (params(mode=432, gid=44), Ownership(0o660, 0, 44, True)),
    "a user and a group": (params(uid=1000, gid=4294967294), Ownership(0o666, 1000, 4294967294, True)),
    "kept by the administrator": (params(modify=0), Ownership(0o666, 0, 0, False)),
    "anything but 1 keeps off": (params(modify=2), Ownership(0o666, 0, 0, False)),
    "an empty mode is a mode": (params(mode=0), Ownership(0, 0, 0, True)),
    "the first line of a key counts": ("DeviceFileUID: 1\nDeviceFileUID: 2\n", Ownership(uid=1)),
    "a value with a colon is another's": ('RegistryDwords: "DeviceFileUID: 5"\n', Ownership()),
}


@pytest.mark.parametrize(("text", "owner"), OWNERS.values(), ids=OWNERS)
def test_nodes_have_the_owner_and_mode_that_the_driver_was_told(text: str, owner: Ownership) -> None:
    assert params_ownership(text) == owner


UNCLEAR = {
    "an octal mode written as decimal": (params(mode=660), "0o1224 in octal"),
    "a leading zero": (params(mode="0666"), "decimal number"),
    "a prefix": (params(mode="0x1b6"), "decimal number"),
    "a negative number": (params(mode="-1"), "decimal number"),
    "not ASCII digits": (params(mode="४३२"), "decimal number"),
    "nothing": ("DeviceFileGID:\n", "decimal number"),
    "chown's 'leave it'": (params(uid=4294967295), "DeviceFileUID"),
    "a switch of words": ("ModifyDeviceFiles: no\n", "ModifyDeviceFiles"),
}


@pytest.mark.parametrize(("text", "words"), UNCLEAR.values(), ids=UNCLEAR)
def test_what_is_unclear_is_refused(text: str, words: str) -> None:
    with pytest.raises(HostError, match=words):
        params_ownership(text)


def test_the_minor_of_a_gpu_is_read_or_refused() -> None:
    assert gpu_minor(information(5)) == 5
    assert gpu_minor(information(5, excluded="Yes")) is None
    assert gpu_minor("Device Minor: \t 247\n") == 247
    for text in ("Model: x\n", "Device Minor: 248\n", "Device Minor: 255\n", "Device Minor: none\n"):
        with pytest.raises(HostError, match="Device Minor"):
            gpu_minor(text)


def test_a_capability_is_its_minor_and_owner_or_refused() -> None:
    text = "DeviceFileMinor: 3\nDeviceFileMode: 292\nDeviceFileModify: 0\n"
    assert capability(text) == (3, Ownership(0o444, 0, 0, modify=False))
    for wrong in (
        "",
        "DeviceFileMode: 292\n",
        "DeviceFileMinor: 8192\n",
        "DeviceFileMinor: 3\nDeviceFileMode: 444444\n",
    ):
        with pytest.raises(HostError):
            capability(wrong)


KEYS = ("DeviceFileMode", "DeviceFileUID", "ModifyDeviceFiles", "DeviceFileMinor", "Device Minor", "GPU Excluded")
texts = st.text("0123456789-:x Yes\t\x80४", max_size=12)  # a whole Unicode takes a second to set up
lines = st.one_of(texts, st.builds("{}: {}".format, st.sampled_from(KEYS), texts))


@given(text=st.lists(lines, max_size=6).map("\n".join))
def test_any_text_is_understood_or_refused(text: str) -> None:
    for parse in (params_ownership, gpu_minor, capability):
        try:
            parse(text)
        except HostError as error:
            assert len(str(error)) < 300
    read_mig_minors(text)
