"""Contradictions in topology files, at the beginning and after each change."""

from __future__ import annotations

from itertools import combinations

import pytest

from nri_gpu.simulation.topology import parse_scenario
from tests.unit.simulation.files import GPU, LINK, MIG, NODE, SECOND, faults, parse, part


def numbered(number: int) -> str:
    """One more GPU after the second."""
    return SECOND.replace("1\n", f"{number}\n").replace("GPU-1", f"GPU-{number}").replace("3c", f"3{number}")


def link(a: int, b: int, nvlink: int) -> str:
    return f"[[link]]\na = {a}\nb = {b}\npcie = 'NODE'\nnvlink = {nvlink}\n"


def changed(at_s: float, gpu: int, *parts: str) -> str:
    return f"[[change]]\nat_s = {at_s}\ngpu = {gpu}\n" + "".join(parts).replace("gpu.mig", "change.mig")


# What is said of a file, and what follows `[node]` in it.
CONTRADICTIONS: dict[str, str] = {
    "node.majors.nvidia_caps: 195 already belongs to nvidia": "[node.majors]\nnvidia = 195\nnvidia_caps = 195\n",
    "gpu[0].mig[1].ci_minor: 13 is already ci_minor of MIG device 0:0": GPU
    + part(1, ci_minor=13)
    + part(2, ci_minor=13),
    "gpu[0].mig[1].gi_minor: 12 is already gi_minor of MIG device 0:0": GPU
    + part(1, gi_minor=12)
    + part(2, gi_minor=12),
    "gpu[1].mig[0].gi_minor: 12 is already gi_minor of MIG device 0:0": GPU + part(1) + SECOND + part(2, gi_minor=12),
    "gpu[0].mig[0].ci_minor: 5 is already gi_minor of MIG device 0:0": GPU + part(1, gi_minor=5, ci_minor=5),
    "gpu[0].mig[1].gi_minor: 77, where another part of GPU instance 1 has 12": GPU
    + part(1, profile="1c.3g.40gb")
    + part(2, gi=1, ci=1, profile="1c.3g.40gb", gi_minor=77),
    "gpu[0].mig[1].memory_bytes: with those before it 90000000000 bytes, and its GPU has 85520809984": GPU
    + part(1, memory_bytes=50 * 10**9)
    + part(2, memory_bytes=40 * 10**9),
    "gpu[0].mig[0].memory_bytes: it has 99000000000 bytes, and its GPU has 85520809984": GPU
    + part(1, memory_bytes=99 * 10**9),
    "gpu[0].mig[1].profile: with those before it 14 slices, and no GPU has more than 7": GPU
    + "".join(part(number, profile="7g.80gb") for number in range(3)),
    "gpu[0].mig[1].profile: with those before it 4 compute slices, and GPU instance 1 has 3": GPU
    + part(1, profile="2c.3g.40gb")
    + part(2, gi=1, ci=1, profile="2c.3g.40gb"),
    "gpu[0].mig[1].profile: 1c.2g.20gb, where another part of GPU instance 1 is 1c.3g.40gb": GPU
    + part(1, profile="1c.3g.40gb")
    + part(2, gi=1, ci=1, profile="1c.2g.20gb"),
    # Devices are found by what they say, wherever they stand.
    "gpu[0].mig[0].ci_minor: 13 is already ci_minor of MIG device 1:3": SECOND
    + part(1, index=4, ci_minor=13)
    + part(2, index=3, ci_minor=13)
    + GPU,
    "gpu[1].drm[1].minor: 226:0 already belongs to card0": GPU
    + "drm = [{ name = 'card0', major = 226, minor = 0 }]\n"
    + SECOND
    + "drm = [{ name = 'card1', major = 226, minor = 1 }, { name = 'card2', major = 226, minor = 0 }]\n",
    "link[2].nvlink: GPU 0 has 37 NVLinks, and no GPU has more than 36; through switches this pair would have 17": GPU
    + SECOND
    + numbered(2)
    + link(0, 1, 20)
    + link(0, 2, 17)
    + link(1, 2, 4),
    "link[0].b: there is no GPU with index 1": GPU + "[[fault]]\nindex = 1\nreason = 'gone'\n" + LINK,
    "link[1]: the same as link[0]": GPU + SECOND + LINK + LINK,
    "event[0].gpu: there is no GPU with index 7": GPU + "[[event]]\nat_s = 1\ngpu = 7\nxid = 79\n",
    # Beside a fault of its own nothing is made up.
    "gpu[0].index: 'a' is not a whole number from 0 to 247": GPU.replace("index = 0", "index = 'a'")
    + part(1, ci_minor=13)
    + part(2, ci_minor=13),
}


@pytest.mark.parametrize(("fault", "text"), CONTRADICTIONS.items(), ids=CONTRADICTIONS)
def test_contradiction(fault: str, text: str) -> None:
    assert faults(NODE + text) == [fault]


def test_contradictions_of_every_kind_at_once() -> None:
    majors = "[node.majors]\nnvidia = 195\nnvidia_uvm = 195\n"
    assert faults(NODE + majors + GPU + part(1, ci_minor=13) + part(2, ci_minor=13) + part(3, profile="7g.80gb")) == [
        "node.majors.nvidia_uvm: 195 already belongs to nvidia",
        "gpu[0].mig[1].ci_minor: 13 is already ci_minor of MIG device 0:0",
        "gpu[0].mig[2].profile: with those before it 9 slices, and no GPU has more than 7",
    ]


AGREEING = {
    "parts of one GPU instance share its memory and its capability": GPU
    + part(1, profile="1c.4g.40gb", memory_bytes=60 * 10**9)
    + part(2, gi=1, ci=1, profile="3c.4g.40gb", memory_bytes=60 * 10**9),
    "seven slices": GPU + "".join(part(number) for number in range(7, 14)),
    "unknown minors": GPU + part(1, gi_minor=-1, ci_minor=-1) + part(2, gi_minor=-1, ci_minor=-1),
    "a GPU that shares the host's memory": GPU.replace("85_520_809_984", "0") + part(1) + part(2),
    "switches, one link of which is down": GPU
    + SECOND
    + numbered(2)
    + numbered(3)
    + "".join(link(a, b, 17 if b == 3 else 18) for a, b in combinations(range(4), 2)),
}


@pytest.mark.parametrize("text", AGREEING.values(), ids=AGREEING)
def test_what_looks_odd_and_is_not(text: str) -> None:
    assert parse(NODE + text).gpus


NODE_AT_1 = "[[change]]\nat_s = 1\n"
AT_1 = NODE_AT_1 + "gpu = 0\n"
# How a fault begins, and what follows the node and its first GPU.
CHANGES: dict[str, str] = {
    "change[0].at_s: missing; a number from 0 to 31536000": "[[change]]\ngpu = 0\nlost = true\n",
    "change[0].gpu: there is no GPU with index 7": changed(1, 7) + "lost = true\n",
    "change[0]: changes nothing: lost, unavailable, signs, reco": AT_1,
    "change[0]: changes nothing: driver, cuda, majors, fault": NODE_AT_1,
    "change[0].lost: says the same as": AT_1 + "lost = true\nunavailable = 'x'\n",
    "change[0].driver: 'new' is not a version": NODE_AT_1 + "driver = 'new'\n",
    "change[0].lost: needs `gpu`, which is missing": NODE_AT_1 + "lost = true\n",
    "change[0].majors: is of the node, not of a GPU": AT_1 + "lost = true\nmajors = {}\n",
    "change[0].present: GPU 0 is already present at that time": AT_1 + "present = true\n",
    "change[1].present: GPU 0 is already absent at that time, since 1 s": AT_1
    + "present = false\n"
    + changed(7, 0)
    + "present = false\n",
    "change[0].gpu: GPU 0 is absent at that time, since 1 s": changed(9, 0)
    + "lost = true\n"
    + AT_1
    + "present = false\n",
    "change[0].present: a GPU that leaves changes in no other way at that time": AT_1
    + "present = false\nlost = true\n",
    "change[1].cuda: another change sets it at the same time, 1 s": NODE_AT_1
    + "cuda = '12.0'\n"
    + NODE_AT_1
    + "cuda = '13.0'\n",
    "change[0].mig[1].uuid: the same as change[0].mig[0].uuid": changed(1, 0, MIG, MIG),
    "change[0].mig: from then on: MIG-01234567-89ab-5def-8123-456789abcdef is already the UUID of MIG device 0:0": MIG
    + SECOND
    + changed(1, 1, MIG),
    "change[1].mig: ": SECOND + changed(1, 0, MIG) + changed(2, 1, MIG),
    # In the order of their times, and not of the file; and while nobody can be asked.
    "change[0].mig: ": SECOND + changed(5, 1, MIG) + changed(2, 0, MIG),
    "change[2].mig: ": SECOND + NODE_AT_1 + "fault = 'gone'\n" + changed(2, 0, MIG) + changed(3, 1, MIG),
}


@pytest.mark.parametrize(("words", "text"), CHANGES.items(), ids=CHANGES)
def test_wrong_change(words: str, text: str) -> None:
    assert faults(NODE + GPU + text)[0].startswith(words)


@pytest.mark.parametrize("arch", ["7.5", "8.6", "8.9"])
def test_a_gpu_that_cannot_be_cut(arch: str) -> None:
    (fault,) = faults(NODE + GPU.replace("9.0", arch) + AT_1 + "mig = true\n")
    assert fault == f"change[0].mig: GPU 0 does not support MIG: its compute capability is {arch}"


def test_a_device_may_move_once_it_is_free() -> None:
    text = NODE + GPU + SECOND + changed(2, 0, MIG) + changed(3, 0) + "mig = false\n" + changed(5, 1, MIG)
    assert parse_scenario(text, "node.toml", 5.0).after(5).parts[0].gpu.index == 1


def test_what_changes_lead_to_is_held_against_the_rest() -> None:
    minors = part(3, gi_minor=138, ci_minor=139)  # those of GPU 1's first
    text = NODE + GPU + SECOND + changed(1, 1, part(0)) + changed(2, 0, minors, part(4, profile="7g.80gb"))
    assert faults(text) == [
        "change[1].mig: from then on: 138 is already gi_minor of MIG device 0:0",
        "change[1].mig: from then on: 139 is already ci_minor of MIG device 0:0",
        "change[1].mig: from then on: with those before it 8 slices, and no GPU has more than 7",
    ]
