"""What a topology file plays: each change at its time, what contradicts itself refused with its place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from nri_gpu.cli.gpus import Printer
from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.health import ScriptedEvent, Sign
from nri_gpu.domain.node import Majors
from nri_gpu.inventory.controller import InventoryCache
from nri_gpu.simulation.scenario import LOST, Scenario
from nri_gpu.simulation.source import TopologySource
from nri_gpu.simulation.topology import parse_scenario
from tests.support.daemon import TOPOLOGIES
from tests.unit.inventory.test_topology import GPU, LINK, MIG, NODE, SECOND, faults, parse, part

PLAYED = f"""{NODE}driver = "580.95.05"
{GPU}{SECOND}
[[change]]
at_s = 3.5
gpu = 1
lost = true
[[change]]
at_s = 9
gpu = 1
lost = false
[[change]]
at_s = 1
gpu = 0
{MIG.replace("gpu.mig", "change.mig")}
[[change]]
at_s = 20
gpu = 0
mig = false
[[change]]
at_s = 30
fault = "nvmlInit: Driver Not Loaded (9)"
[[change]]
at_s = 40
fault = ""
driver = "590.10"
cuda = "13.1"
[[change]]
at_s = 50
gpu = 0
unavailable = "XID 79"
"""


def scenario(text: str = PLAYED) -> Scenario:
    return parse_scenario(text, "node.toml", 5.0)


def test_the_beginning_is_the_file_without_changes() -> None:
    assert scenario().after(0) == parse(PLAYED) == parse(PLAYED[: PLAYED.index("[[change]]")])


def test_a_gpu_is_lost_and_comes_back() -> None:
    assert [scenario().after(at).gpus[1].unavailable for at in (3.4, 3.5, 8.9, 9.0)] == ["", LOST, LOST, ""]


def test_a_lost_gpu_shows_it_as_nvml_would() -> None:
    assert [scenario().after(at).gpus[1].signs for at in (3.4, 3.5, 9.0)] == [(), (Sign.LOST,), ()]
    hot = f"{NODE}{GPU}signs = ['thermal']\n[[change]]\nat_s = 1\ngpu = 0\n"
    assert scenario(f"{hot}lost = true\n").after(1).gpus[0].signs == (Sign.LOST, Sign.THERMAL)
    assert scenario(f"{hot}signs = []\n").after(1).gpus[0].signs == ()
    assert scenario(f"{hot}signs = 'power-brake, thermal'\n").after(1).gpus[0].signs == (Sign.POWER_BRAKE, Sign.THERMAL)


UNPLUGGED = f"{NODE}{GPU}{SECOND}{LINK}[[change]]\nat_s = 2\ngpu = 0\npresent = false\n"


def test_a_gpu_is_unplugged_and_plugged() -> None:
    back = "[[change]]\nat_s = 5\ngpu = 0\npresent = true\nsigns = ['remap-pending']\n"
    played = scenario(UNPLUGGED + back)
    assert [[gpu.index for gpu in played.after(at).gpus] for at in (1, 2, 5)] == [[0, 1], [1], [0, 1]]
    assert [len(played.after(at).links) for at in (1, 2, 5)] == [1, 0, 1]
    assert played.after(5).gpus[0].signs == (Sign.REMAP_PENDING,)


def test_one_that_is_not_there_from_the_beginning() -> None:
    assert [gpu.index for gpu in scenario(UNPLUGGED.replace("at_s = 2", "at_s = 0")).after(0).gpus] == [1]


def test_modules_change_with_a_driver() -> None:
    text = f"{NODE}[node.majors]\nnvidia = 195\nnvidia_uvm = 508\n[[change]]\nat_s = 1\ndriver = '590.10'\n"
    assert scenario(f"{text}majors = {{ nvidia = 195, nvidia_caps = 9 }}\n").after(1).majors == Majors(195, None, 9)
    assert scenario(text).after(1).majors == Majors(195, 508)
    assert scenario(f"{text}majors = {{}}\n").after(1).majors == Majors()


def test_the_order_in_the_file_does_not_matter() -> None:
    assert [change.at_s for change in scenario().changes] == [1, 3.5, 9, 20, 30, 40, 50]


def test_mig_instances_come_and_go() -> None:
    assert [len(scenario().after(at).parts) for at in (0.9, 1, 19, 20)] == [0, 1, 1, 0]
    assert [scenario().after(at).gpus[0].mig_enabled for at in (0, 1, 20)] == [False, True, False]


def test_a_driver_is_swapped() -> None:
    with pytest.raises(InventoryError, match="Driver Not Loaded"):
        scenario().after(39.9)
    after = scenario().after(40)
    assert (after.driver_version, after.cuda_version) == ("590.10", "13.1")
    assert scenario().after(29).driver_version == "580.95.05"
    assert scenario().after(50).gpus[0].unavailable == "XID 79"


def test_a_layout_may_keep_a_device_of_the_one_before() -> None:
    again = MIG.replace("gpu.mig", "change.mig")
    text = f"{NODE}{GPU}{MIG}[[change]]\nat_s = 1\ngpu = 0\n{again}[[change]]\nat_s = 2\ngpu = 0\n{again}"
    assert scenario(text).after(1).parts == scenario(text).after(0).parts


CHANGE = "[[change]]\nat_s = 1\n"
FAULTS = {
    "no time": ("[[change]]\ngpu = 0\nlost = true\n", "change[0].at_s: missing; a whole number"),
    "a time before the start": (CHANGE.replace("1", "-1.5") + "fault = ''\n", "change[0].at_s: -1.5 is not from 0 to"),
    "no time at all": (CHANGE.replace("1", "nan") + "fault = ''\n", "change[0].at_s: nan is not from 0 to"),
    "a GPU that is not there": (CHANGE + "gpu = 7\nlost = true\n", "change[0].gpu: there is no GPU with index 7"),
    "nothing of a GPU": (CHANGE + "gpu = 0\n", "change[0]: changes nothing: lost, unavailable, signs, mig, pre"),
    "nothing of the node": (CHANGE, "change[0]: changes nothing: driver, cuda, majors, fault"),
    "twice the same": (CHANGE + "gpu = 0\nlost = true\nunavailable = 'x'\n", "change[0].lost: says the same as"),
    "a version of none": (CHANGE + "driver = 'new'\n", "change[0].driver: 'new' is not a version"),
    "a GPU's word of the node": (CHANGE + "lost = true\n", "change[0]: changes nothing"),
    "a sign of none": (CHANGE + "gpu = 0\nsigns = ['sad']\n", "change[0].signs: 'sad' is not a sign (lost, "),
    "a major of none": (CHANGE + "majors = { nvidia = 0 }\n", "change[0].majors.nvidia: 0 is not from 1 to 4095"),
    "majors of a GPU": (CHANGE + "gpu = 0\nlost = true\nmajors = {}\n", "change[0].majors: unknown key"),
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


@pytest.mark.parametrize(("text", "words"), FAULTS.values(), ids=FAULTS)
def test_fault(text: str, words: str) -> None:
    assert faults(NODE + GPU + text)[0].startswith(words)


def test_a_device_of_another_gpu() -> None:
    change = CHANGE + "gpu = 1\n" + MIG.replace("gpu.mig", "change.mig")
    (fault,) = faults(NODE + GPU + MIG + SECOND + change)
    assert fault == "change[0].mig: MIG-01234567-89ab-5def-8123-456789abcdef is a MIG device of another GPU"


def test_a_device_that_another_gpu_was_given_meanwhile() -> None:
    mig = MIG.replace("gpu.mig", "change.mig")
    text = f"{NODE}{GPU}{SECOND}{CHANGE}gpu = 0\n{mig}[[change]]\nat_s = 2\ngpu = 1\n{mig}"
    assert [fault.partition(": ")[0] for fault in faults(text)] == ["change[1].mig"]
    scenario(text.replace("[[change]]\nat_s = 2", "[[change]]\nat_s = 1.5\ngpu = 0\nmig = false\n[[change]]\nat_s = 2"))


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
    assert scenario(moved + changed(5, 1, MIG)).after(5).parts[0].gpu.index == 1


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


def test_a_device_larger_than_its_gpu() -> None:
    (fault,) = faults(NODE + GPU + MIG.replace("10_200_547_328", "99_000_000_000"))
    assert fault == "gpu[0].mig[0].memory_bytes: 99000000000 is more than its GPU has: 85520809984"


def test_a_gpu_that_cannot_be_described_and_is() -> None:
    (fault,) = faults(f'{NODE}{GPU}[[fault]]\nindex = 0\nreason = "gone"\n')
    assert fault == "fault[0].index: the same as gpu[0].index"


def test_devices_have_the_index_they_say() -> None:
    inventory = parse(f"{NODE}{GPU}{MIG}index = 4\n")
    assert [part.index for part in inventory.gpus[0].mig] == [4]


def test_the_source_sees_an_edit_and_the_time(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(PLAYED)
    now = 100.0
    source = TopologySource(file, clock=lambda: now)
    assert asyncio.run(source.refresh()).gpus[1].unavailable == ""
    before = source.kernel_view()
    assert source.kernel_view() == before
    now = 103.5
    assert (at_time := source.kernel_view()) != before
    assert asyncio.run(source.refresh()).gpus[1].unavailable == LOST
    os.utime(file, ns=(1, 1))
    assert (edited := source.kernel_view()) != at_time
    file.unlink()
    assert source.kernel_view() != edited


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_nodes_play_without_a_fault(path: Path) -> None:
    played = parse_scenario(path.read_text(), path.name, 1.0)
    for change in played.changes:
        try:
            played.after(change.at_s)
        except InventoryError as error:
            assert str(error) == change.fault


def test_the_troubled_node_has_the_troubles_that_it_says() -> None:
    """As `gpus --watch` shows them, but for the time that passes."""
    now, lines = 0.0, list[str]()
    source = TopologySource(TOPOLOGIES / "troubled-node.toml", clock=lambda: now)
    printer = Printer(as_json=False, say=lines.append, clock=lambda: now)
    cache = InventoryCache(
        source,
        printer.publish,
        printer.fault,
    )
    cache.subscribe(printer.answered)
    for second in range(31):
        now = float(second)
        asyncio.run(cache.refresh())
    assert lines[0].startswith("4 GPUs")
    said = [line[len("1970-01-01 00:00:") :].replace(" UTC", "") for line in lines[1:]]
    gpu = [f"GPU {at} (GPU-{at}bad0080-0000-4000-8000-00000000000{at})" for at in range(4)]
    assert said == [
        f"03 {gpu[0]} shows thermal",
        f"05 {gpu[1]} shows lost",
        f"05 {gpu[1]} is unavailable: {LOST}",
        f"08 {gpu[0]} no longer shows thermal",
        f"11 {gpu[1]} no longer shows lost",
        f"11 {gpu[1]} is available again",
        f"13 {gpu[2]} is in MIG mode",
        "13 MIG device 2:0 3g.40gb (MIG-20bad080-0000-5000-8000-010000000000) of GPU 2 is new",
        "13 MIG device 2:1 1g.10gb (MIG-21bad080-0000-5000-8000-090000000000) of GPU 2 is new",
        "17 not refreshed: nvmlInit: Driver Not Loaded (9)",
        "20 driver 580.95.05 -> 590.10",
        "20 CUDA 13.0 -> 13.1",
        "20 kernel module nvidia-uvm has major 1520, and had 1510",
        "20 kernel module nvidia-caps has major 1521, and had 1511",
        "20 the driver answers again",
        "23 MIG device 2:0 3g.40gb (MIG-20bad080-0000-5000-8000-010000000000) of GPU 2 is gone",
        "23 MIG device 2:1 1g.10gb (MIG-21bad080-0000-5000-8000-090000000000) of GPU 2 is gone",
        f"23 {gpu[2]} is no longer in MIG mode",
        "25 links changed",
        f"25 {gpu[3]} is gone",
        "28 links changed",
        f"28 {gpu[3]} is new",
    ]


def test_the_example_of_the_docs_plays() -> None:
    text = (TOPOLOGIES.parents[1] / "docs/inventory.md").read_text().partition("### Seeing it")[0]
    example = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    ") or not line)
    played = scenario(NODE + GPU + SECOND + example[example.index("[[change]]") :])
    assert [change.at_s for change in played.changes] == [3.5, 6, 8, 10, 20, 25]
    assert played.after(25).driver_version == "590.10"
    assert played.inventory.script == (ScriptedEvent(30, 0, 63),)
