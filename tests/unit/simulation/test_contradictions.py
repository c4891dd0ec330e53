"""Contradictions in topology files, at the beginning and after each change."""

from __future__ import annotations

from itertools import combinations

import pytest

from nri_gpu.simulation.topology import parse_scenario
from tests.unit.simulation.files import GPU, LINK, MIG, NODE, SECOND, faults, parse, part

CONTRADICTIONS = {
    "nvidia and nvidia_uvm with one major": (
        "[node.majors]\nnvidia = 195\nnvidia_uvm = 195\nnvidia_caps = 195\n",
        [
            "node.majors.nvidia_uvm: 195 already belongs to nvidia",
            "node.majors.nvidia_caps: 195 already belongs to nvidia",
        ],
    ),
    "one capability for two compute instances": (
        GPU + part(1, ci_minor=13) + part(2, ci_minor=13),
        ["gpu[0].mig[1].ci_minor: 13 is already ci_minor of MIG device 0:0"],
    ),
    "one capability for two GPU instances": (
        GPU + part(1, gi_minor=12, ci_minor=13) + part(2, gi_minor=12, ci_minor=14),
        ["gpu[0].mig[1].gi_minor: 12 is already gi_minor of MIG device 0:0"],
    ),
    "one capability for instances of two GPUs": (
        GPU + part(1) + SECOND + part(2, gi_minor=12),
        ["gpu[1].mig[0].gi_minor: 12 is already gi_minor of MIG device 0:0"],
    ),
    "a GPU instance and its compute instance": (
        GPU + part(1, gi_minor=5, ci_minor=5),
        ["gpu[0].mig[0].ci_minor: 5 is already gi_minor of MIG device 0:0"],
    ),
    "two capabilities for one GPU instance": (
        GPU + part(1, profile="1c.3g.40gb") + part(2, gi=1, ci=1, profile="1c.3g.40gb", gi_minor=77),
        ["gpu[0].mig[1].gi_minor: 77, where another part of GPU instance 1 has 12"],
    ),
    "more memory than the GPU has": (
        GPU + part(1, memory_bytes=50 * 10**9) + part(2, memory_bytes=40 * 10**9),
        ["gpu[0].mig[1].memory_bytes: with those before it 90000000000 bytes, and its GPU has 85520809984"],
    ),
    "several whole GPUs of one": (
        GPU + part(0, profile="7g.80gb") + part(1, profile="7g.80gb") + part(2, profile="7g.80gb"),
        ["gpu[0].mig[1].profile: with those before it 14 slices, and no GPU has more than 7"],
    ),
    "more compute slices than the instance has": (
        GPU + part(1, profile="2c.3g.40gb") + part(2, gi=1, ci=1, profile="2c.3g.40gb"),
        ["gpu[0].mig[1].profile: with those before it 4 compute slices, and GPU instance 1 has 3"],
    ),
    "an instance of two sizes": (
        GPU + part(1, profile="1c.3g.40gb") + part(2, gi=1, ci=1, profile="1c.2g.20gb"),
        ["gpu[0].mig[1].profile: 1c.2g.20gb, where another part of GPU instance 1 is 1c.3g.40gb"],
    ),
    "devices are found by what they say": (
        SECOND + part(1, index=4, ci_minor=13) + part(2, index=3, ci_minor=13) + GPU,
        ["gpu[0].mig[0].ci_minor: 13 is already ci_minor of MIG device 1:3"],
    ),
    "one graphics node of two GPUs": (
        GPU
        + "drm = [{ name = 'card0', major = 226, minor = 0 }]\n"
        + SECOND
        + "drm = [{ name = 'card1', major = 226, minor = 1 }, { name = 'card2', major = 226, minor = 0 }]\n",
        ["gpu[1].drm[1].minor: 226:0 already belongs to card0"],
    ),
    "a mesh of more NVLinks than there are": (
        GPU
        + SECOND
        + SECOND.replace("1\n", "2\n").replace("GPU-1", "GPU-2").replace("3c", "3d")
        + LINK
        + "nvlink = 20\n"
        + LINK.replace("b = 1", "b = 2")
        + "nvlink = 17\n"
        + LINK.replace("a = 0\nb = 1", "a = 1\nb = 2")
        + "nvlink = 4\n",
        [
            "link[2].nvlink: GPU 0 has 37 NVLinks, and no GPU has more than 36; "
            "through switches this pair would have 17",
        ],
    ),
    "a link to a GPU of which nothing is known": (
        GPU + "[[fault]]\nindex = 1\nreason = 'gone'\n" + LINK,
        ["link[0].b: there is no GPU with index 1"],
    ),
    "a link twice": (GPU + SECOND + LINK + LINK, ["link[1]: the same as link[0]"]),
    "an event of no GPU": (
        GPU + "[[event]]\nat_s = 1\ngpu = 7\nxid = 79\n",
        ["event[0].gpu: there is no GPU with index 7"],
    ),
    "a MIG device larger than its GPU": (
        GPU + part(1, memory_bytes=99 * 10**9),
        ["gpu[0].mig[0].memory_bytes: it has 99000000000 bytes, and its GPU has 85520809984"],
    ),
    "every kind at once": (
        "[node.majors]\nnvidia = 195\nnvidia_uvm = 195\n"
        + GPU
        + part(1, ci_minor=13)
        + part(2, ci_minor=13)
        + part(3, profile="7g.80gb"),
        [
            "node.majors.nvidia_uvm: 195 already belongs to nvidia",
            "gpu[0].mig[1].ci_minor: 13 is already ci_minor of MIG device 0:0",
            "gpu[0].mig[2].profile: with those before it 9 slices, and no GPU has more than 7",
        ],
    ),
    "beside a fault of its own nothing is made up": (
        GPU.replace("index = 0", "index = 'a'") + part(1, ci_minor=13) + part(2, ci_minor=13),
        ["gpu[0].index: 'a' is not a whole number from 0 to 247"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradiction(text: str, expected: list[str]) -> None:
    assert faults(NODE + text) == expected


AGREEING = {
    "parts of one GPU instance share its memory and its capability": GPU
    + part(1, profile="1c.4g.40gb", memory_bytes=60 * 10**9)
    + part(2, gi=1, ci=1, profile="3c.4g.40gb", memory_bytes=60 * 10**9),
    "seven slices": GPU + "".join(part(number) for number in range(7, 14)),
    "unknown minors": GPU + part(1, gi_minor=-1, ci_minor=-1) + part(2, gi_minor=-1, ci_minor=-1),
    "a GPU that shares the host's memory": GPU.replace("85_520_809_984", "0") + part(1) + part(2),
    "switches, one link of which is down": GPU
    + SECOND
    + SECOND.replace("1\n", "2\n").replace("GPU-1", "GPU-2").replace("3c", "3d")
    + SECOND.replace("1\n", "3\n").replace("GPU-1", "GPU-3").replace("3c", "3e")
    + "".join(
        f"[[link]]\na = {a}\nb = {b}\npcie = 'NODE'\nnvlink = {17 if b == 3 else 18}\n"
        for a, b in combinations(range(4), 2)
    ),
}


@pytest.mark.parametrize("text", AGREEING.values(), ids=AGREEING)
def test_what_looks_odd_and_is_not(text: str) -> None:
    assert parse(NODE + text).gpus


CHANGE = "[[change]]\nat_s = 1\n"
CHANGES = {
    "no time": ("[[change]]\ngpu = 0\nlost = true\n", "change[0].at_s: missing; a number from 0 to 31536000"),
    "a GPU that is not there": (CHANGE + "gpu = 7\nlost = true\n", "change[0].gpu: there is no GPU with index 7"),
    "nothing of a GPU": (CHANGE + "gpu = 0\n", "change[0]: changes nothing: lost, unavailable, signs, mig, pre"),
    "nothing of the node": (CHANGE, "change[0]: changes nothing: driver, cuda, majors, fault"),
    "twice the same": (CHANGE + "gpu = 0\nlost = true\nunavailable = 'x'\n", "change[0].lost: says the same as"),
    "a version of none": (CHANGE + "driver = 'new'\n", "change[0].driver: 'new' is not a version"),
    "a GPU's word of the node": (CHANGE + "lost = true\n", "change[0].lost: needs `gpu`, which is missing"),
    "majors of a GPU": (
        CHANGE + "gpu = 0\nlost = true\nmajors = {}\n",
        "change[0].majors: is of the node, not of a GPU",
    ),
    "there already": (CHANGE + "gpu = 0\npresent = true\n", "change[0].present: GPU 0 is already present at that time"),
    "gone already": (
        CHANGE + "gpu = 0\npresent = false\n" + CHANGE.replace("1", "7") + "gpu = 0\npresent = false\n",
        "change[1].present: GPU 0 is already absent at that time, since 1 s",
    ),
    "of one that is gone": (
        CHANGE.replace("1", "9") + "gpu = 0\nlost = true\n" + CHANGE + "gpu = 0\npresent = false\n",
        "change[0].gpu: GPU 0 is absent at that time, since 1 s",
    ),
    "leaving and more": (
        CHANGE + "gpu = 0\npresent = false\nlost = true\n",
        "change[0].present: a GPU that leaves changes in no other way at that time",
    ),
    "the same moment twice": (
        CHANGE + "cuda = '12.0'\n" + CHANGE + "cuda = '13.0'\n",
        "change[1].cuda: another change sets it at the same time, 1 s",
    ),
    "a device twice": (
        CHANGE + "gpu = 0\n" + 2 * MIG.replace("gpu.mig", "change.mig"),
        "change[0].mig[1].uuid: the same as change[0].mig[0].uuid",
    ),
}


@pytest.mark.parametrize(("text", "words"), CHANGES.values(), ids=CHANGES)
def test_wrong_change(text: str, words: str) -> None:
    assert faults(NODE + GPU + text)[0].startswith(words)


def test_a_device_of_another_gpu() -> None:
    change = CHANGE + "gpu = 1\n" + MIG.replace("gpu.mig", "change.mig")
    (fault,) = faults(NODE + GPU + MIG + SECOND + change)
    assert fault == (
        "change[0].mig: from then on: MIG-01234567-89ab-5def-8123-456789abcdef is already the UUID of MIG device 0:0"
    )


def test_a_device_that_another_gpu_was_given_meanwhile() -> None:
    mig = MIG.replace("gpu.mig", "change.mig")
    text = f"{NODE}{GPU}{SECOND}{CHANGE}gpu = 0\n{mig}[[change]]\nat_s = 2\ngpu = 1\n{mig}"
    assert [fault.partition(": ")[0] for fault in faults(text)] == ["change[1].mig"]
    parse(text.replace("[[change]]\nat_s = 2", "[[change]]\nat_s = 1.5\ngpu = 0\nmig = false\n[[change]]\nat_s = 2"))


@pytest.mark.parametrize("arch", ["7.5", "8.6", "8.9"])
def test_a_gpu_that_cannot_be_cut(arch: str) -> None:
    (fault,) = faults(NODE + GPU.replace("9.0", arch) + CHANGE + "gpu = 0\nmig = true\n")
    assert fault == f"change[0].mig: GPU 0 does not support MIG: its compute capability is {arch}"


def changed(at_s: float, gpu: int, *parts: str) -> str:
    return f"[[change]]\nat_s = {at_s}\ngpu = {gpu}\n" + "".join(parts).replace("gpu.mig", "change.mig")


def test_one_device_given_to_two_gpus_by_two_changes() -> None:
    """In the order of their times, and not of the file."""
    text = NODE + GPU + SECOND + changed(5, 1, MIG) + changed(2, 0, MIG)
    (fault,) = faults(text)
    assert fault.startswith("change[0].mig: ")
    assert "MIG-01234567-89ab-5def-8123-456789abcdef is " in fault
    moved = NODE + GPU + SECOND + changed(2, 0, MIG) + "[[change]]\nat_s = 3\ngpu = 0\nmig = false\n"
    assert parse_scenario(moved + changed(5, 1, MIG), "node.toml", 5.0).after(5).parts[0].gpu.index == 1


def test_what_changes_lead_to_is_held_against_the_rest() -> None:
    minors = part(3, gi_minor=138, ci_minor=139)  # those of GPU 1's first
    text = NODE + GPU + SECOND + changed(1, 1, part(0)) + changed(2, 0, minors, part(4, profile="7g.80gb"))
    assert faults(text) == [
        "change[1].mig: from then on: 138 is already gi_minor of MIG device 0:0",
        "change[1].mig: from then on: 139 is already ci_minor of MIG device 0:0",
        "change[1].mig: from then on: with those before it 8 slices, and no GPU has more than 7",
    ]


def test_a_change_while_nobody_can_be_asked_is_looked_at_too() -> None:
    fault = "[[change]]\nat_s = 1\nfault = 'gone'\n"
    text = NODE + GPU + SECOND + fault + changed(2, 0, MIG) + changed(3, 1, MIG)
    assert [each.partition(":")[0] for each in faults(text)] == ["change[2].mig"]
